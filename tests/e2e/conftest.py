# SPDX-License-Identifier: Apache-2.0
"""The clouds of this ring: one for the whole session, made by ``./deploy/up`` itself and removed by
``./deploy/down``, with a second host that takes guests only when a test opens it; labs of three
hosts that can be struck, made by ``./deploy/lab`` (lab.py); and two without guests, each on two
hosts in memory: one for tests of many servers, one that keeps what is deleted or shelved.

They need root, and stand on ports of its own below /tmp, beside whatever else runs. With
KILONOVA_HOME and KILONOVA_PORT_BASE in the environment that cloud is taken for the first, and left
running for a look afterwards.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.one_machine import up
from deploy.one_machine.cloud import lifecycle
from deploy.one_machine.cloud.cloud import Ports
from deploy.one_machine.lab_hosts import Facts, Lab
from deploy.one_machine.machine.abilities import FOR_NETWORKS, Ability
from deploy.testing.servers import free_ports
from tests.e2e.guests import SOON, Guest, clear, give_address, make, orphans, remove
from tests.e2e.lab import LiveLab
from tests.e2e.live import Live, Rest
from tests.e2e.watcher import Watcher
from tests.failures import diagnose_first
from tests.services import demand
from tests.waiting import await_true

NO_LIMIT = {
    "instances": 1000,
    "cores": 1000,
    "ram": 1 << 24,
    "server_groups": 1000,
    "server_group_members": 1000,
    "key_pairs": 1000,
}
#: Seconds that the cloud "keeping" keeps a deleted server.
KEPT = 20
#: Seconds that a test may take that names no other limit: the first and last ones make and remove
#: the clouds, too, and whatever is awaited has a limit of its own.
LIMIT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit of this ring's tests."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))


@dataclass(frozen=True)
class First:
    """The first ``./deploy/up``: the cloud that it made, and what it said."""

    live: Live
    said: subprocess.CompletedProcess[str]


def new_home() -> Path:
    """A short path that QEMU's user can enter."""
    home = Path(tempfile.mkdtemp(prefix="kn-e2e-", dir="/tmp"))
    home.chmod(0o755)
    return home


@pytest.fixture(scope="session")
def first_up() -> Iterator[First]:
    demand(*FOR_NETWORKS)
    given = os.environ.get("KILONOVA_HOME")
    place = (
        (Path(given), int(os.environ["KILONOVA_PORT_BASE"]))
        if given
        else (new_home(), free_ports(Ports.COUNT))
    )
    live = Live(*place, hosts=(socket.gethostname(), f"{socket.gethostname()}-2"), volumes=True)
    said = live.up()
    try:
        if said.returncode != 0:
            pytest.fail(
                f"./deploy/up failed; logs are in {live.home}/log\n{said.stdout}\n{said.stderr}"
            )
        live.open_only(1)
        yield First(live, said)
    finally:
        if not given:
            gone = live.down("--purge") if said.returncode == 0 else live.down()
            assert (gone.returncode, live.processes(), live.in_kernel()) == (0, [], []), gone
            assert said.returncode != 0 or not live.home.exists()


@pytest.fixture(scope="session")
def cloud(first_up: First) -> Live:
    """A cloud with two libvirt hosts, the second closed, networks, a first server, and the users
    demo and admin."""
    return first_up.live


@dataclass(frozen=True)
class Pair:
    """Two guests of demo on the shared network: one on the first host, one on the second."""

    near: Guest
    far: Guest
    told: dict[str, Any]  # of the near one, by the command that made it

    def outside(self) -> list[Any]:
        """What a test may change of them and must put right again."""
        found: list[Any] = []
        for guest in (self.near, self.far):
            shown = guest.rest.server(guest.server)
            found += [
                guest.name,
                shown.get("status"),
                shown.get("OS-EXT-STS:task_state"),
                sorted(
                    (network, one["addr"])
                    for network, listed in shown.get("addresses", {}).items()
                    for one in listed
                ),
            ]
            found += sorted(
                (port.id, port.binding_host_id, sorted(port.security_group_ids))
                for port in guest.live.seed.admin.network.ports(device_id=guest.server)
            )
        return found

    def remove(self) -> None:
        """Nothing of them stays."""
        for guest in (self.near, self.far):
            remove(guest)


def made_pair(cloud: Live) -> Pair:
    """Both, reached."""
    rest = cloud.rest()
    before = [server["id"] for server in rest.servers()]
    try:
        [told] = cloud.openstack(
            "server create --image tiny --flavor m1.nano --network private --key-name kilonova "
            "--wait near -f json"
        )
        near = Guest(cloud, told["id"], "near", give_address(cloud, told["id"]))
        with cloud.only(2):
            far = make(cloud, "far")
        return Pair(near.await_ssh(), far.await_ssh(), told)
    except BaseException:
        clear(rest, before)
        raise


@pytest.fixture(scope="session")
def pairs(cloud: Live) -> Iterator[list[Pair]]:
    """The pair, when there is one. At the end nothing of it is anywhere."""
    made: list[Pair] = []
    yield made
    for one in made:
        one.remove()
    await_true(lambda: orphans(cloud) == [], SOON, lambda: orphans(cloud))
    cloud.judge()


@pytest.fixture
def pair(cloud: Live, pairs: list[Pair]) -> Iterator[Pair]:
    """Made once; a test that changes them puts them right again. Where it did not, the next one
    gets a new pair; other servers that it left are deleted."""
    if not pairs:
        pairs.append(made_pair(cloud))
    [found] = pairs
    rest, before = cloud.rest(), found.outside()
    there = [server["id"] for server in rest.servers()]
    yield found
    try:
        clear(rest, there)
        await_true(
            lambda: found.outside() == before, SOON, lambda: f"was {before}, is {found.outside()}"
        )
    except BaseException:
        pairs.clear()
        found.remove()
        raise


@dataclass(frozen=True)
class MadeLab:
    """A lab, what the command that made it said, and who watches it."""

    live: LiveLab
    said: subprocess.CompletedProcess[str]
    watcher: Watcher


@contextmanager
def real_hosts(hosts: int, shared: bool = False) -> Iterator[MadeLab]:
    """A lab, watched from its first guest to its last; then nothing of it is anywhere. With
    KILONOVA_LAB (or KILONOVA_SHARED_LAB) in the environment, the home of one that runs, that one is
    taken and left running."""
    demand(*FOR_NETWORKS)
    given = os.environ.get("KILONOVA_SHARED_LAB" if shared else "KILONOVA_LAB")
    lab = (
        Lab.open(Path(given))
        if given
        else Lab.make(new_home(), Facts(hosts, shared, free_ports(Ports.COUNT), not shared))
    )
    live = LiveLab(lab)
    watcher = live.watcher().start()
    try:
        with diagnose_first(live):
            said = live.up()
            if said.returncode != 0:
                pytest.fail(
                    f"./deploy/lab up failed; logs are in {live.home}/log\n{said.stdout}\n{said.stderr}"
                )
            live.seed.admin.compute.update_quota_set(
                live.seed.demo.session.get_project_id(), **NO_LIMIT
            )
            yield MadeLab(live, said, watcher)
            assert watcher.violations == [], "\n".join(watcher.violations)
    finally:
        watcher.stop()
        if not given:
            gone = live.down()
            assert (gone.returncode, live.processes(), live.in_kernel(), live.home.exists()) == (
                0,
                [],
                [],
                False,
            ), gone


@pytest.fixture(scope="session")
def lab_up() -> Iterator[MadeLab]:
    with real_hosts(3) as made:
        yield made


@pytest.fixture(scope="session")
def shared_lab_up() -> Iterator[MadeLab]:
    with real_hosts(3, shared=True) as made:
        yield made


@contextmanager
def watched(made: MadeLab) -> Iterator[LiveLab]:
    """For one test: nobody saw two domains of a server run, and the lab is as it was."""
    before = {server["id"] for server in made.live.rest().servers()}
    with made.watcher.watching():
        yield made.live
        made.live.repair()
        left = [server for server in made.live.rest().servers() if server["id"] not in before]
        assert left == []
        made.live.judge()


@pytest.fixture
def lab(lab_up: MadeLab) -> Iterator[LiveLab]:
    """Three real hosts with storage of their own, described in lab.py."""
    with watched(lab_up) as live:
        yield live


@pytest.fixture
def shared_lab(shared_lab_up: MadeLab) -> Iterator[LiveLab]:
    """Three real hosts whose guests' disks are in one folder."""
    with watched(shared_lab_up) as live:
        yield live


@contextmanager
def without_guests(hosts: tuple[str, ...] = ("one", "two"), **facts: Any) -> Iterator[Live]:
    """A cloud on hosts in memory, with flavors, quotas that nobody reaches, and an image named
    "empty"."""
    demand(Ability.ROOT)
    live = Live(new_home(), free_ports(Ports.COUNT), hosts=hosts, driver="memory", **facts)
    try:
        with diagnose_first(live):
            for step in (up.prepare, up.upgrade, up.bootstrap):
                step(live.cloud)
            lifecycle.launch(live.cloud)
            up.await_services(live.cloud)
            for more in (live.seed.host, live.seed.flavors, live.seed.tenant):
                more()
            for user in (live.seed.demo, live.seed.admin):
                live.seed.admin.compute.update_quota_set(user.session.get_project_id(), **NO_LIMIT)
            live.seed.admin.image.create_image(
                "empty",
                data=bytes(512),
                disk_format="raw",
                container_format="bare",
                visibility="public",
            )
            yield live
    finally:
        lifecycle.shut_down(live.cloud)
        lifecycle.purge(live.cloud)
        # The supervisor gives up its lock a moment before it ends.
        await_true(lambda: live.processes() == [], 10, live.processes)


@pytest.fixture(scope="session")
def in_memory() -> Iterator[Live]:
    """A cloud without guests, as it comes."""
    with without_guests() as live:
        yield live


@pytest.fixture(scope="session")
def keeping() -> Iterator[Live]:
    """A cloud without guests where a deleted server can be restored for KEPT seconds, a shelved one
    stays on its host, ports are wired as soon as they are bound, and servers have volumes."""
    kept = (
        ("DEFAULT", "reclaim_instance_interval", KEPT),
        ("DEFAULT", "shelved_offload_time", -1),
        ("api", "threads", 32),  # a quarter may wait for attachments: as many as ask side by side
    )
    with without_guests(options=kept, networks=True, volumes=True) as live:
        yield live


@pytest.fixture
def demo(cloud: Live) -> Iterator[Rest]:
    """The user demo; what their test leaves is deleted, and the oracle has the last word."""
    rest = cloud.rest()
    before = [server["id"] for server in rest.servers()]
    yield rest
    clear(rest, before)
    cloud.judge()
