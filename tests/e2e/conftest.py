# SPDX-License-Identifier: Apache-2.0
"""The clouds of the end-to-end tests. All need root, and have their own ports and homes in /tmp.

* ``cloud``: created by ``./deploy/up`` for the whole session. The second host is disabled except in
  tests that enable it. With KILONOVA_HOME and KILONOVA_PORT_BASE in the environment, the tests use
  that cloud and leave it running.
* ``lab`` and ``shared_lab``: three hosts that tests can kill or disconnect (lab.py).
* ``in_memory`` and ``keeping``: two hosts with a driver in memory, without guests. ``in_memory`` is
  for tests of many servers. ``keeping`` keeps deleted and shelved servers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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
from tests.e2e.guests import SOON, Guest, clear, give_address, make, orphans
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
#: Time limit of a test without a limit of its own, in seconds. The first and the last test also
#: create and remove the clouds.
LIMIT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the time limit of the tests in this folder."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))


@dataclass(frozen=True)
class First:
    """The result of the first ``./deploy/up``: the cloud and the output of the command."""

    live: Live
    result: subprocess.CompletedProcess[str]


def new_home() -> Path:
    """Create a folder with a short path that QEMU's user can enter."""
    home = Path(tempfile.mkdtemp(prefix="kn-e2e-", dir="/tmp"))
    home.chmod(0o755)
    return home


@pytest.fixture(scope="session")
def first_up() -> Iterator[First]:
    demand(*FOR_NETWORKS)
    existing = os.environ.get("KILONOVA_HOME")
    place = (
        (Path(existing), int(os.environ["KILONOVA_PORT_BASE"]))
        if existing
        else (new_home(), free_ports(Ports.COUNT))
    )
    live = Live(*place, hosts=(socket.gethostname(), f"{socket.gethostname()}-2"), volumes=True)
    result = live.up()
    try:
        if result.returncode != 0:
            pytest.fail(
                f"./deploy/up failed; logs are in {live.home}/log\n{result.stdout}\n{result.stderr}"
            )
        live.open_only(1)
        yield First(live, result)
    finally:
        if not existing:
            removal = live.down("--purge") if result.returncode == 0 else live.down()
            assert (removal.returncode, live.processes(), live.kernel_leftovers()) == (
                0,
                [],
                [],
            ), removal
            assert result.returncode != 0 or not live.home.exists()


@pytest.fixture(scope="session")
def cloud(first_up: First) -> Live:
    """Return a cloud with two libvirt hosts, networks, a server, and the users demo and admin.

    The second host is disabled.
    """
    return first_up.live


@dataclass(frozen=True)
class Pair:
    """Two guests of demo on the shared network: one on the first host, one on the second."""

    near: Guest
    far: Guest
    near_shown: dict[str, Any]
    """The near guest as the create command showed it."""

    def read_state(self) -> list[Any]:
        """Return the state of the guests that a test must restore after a change."""
        state: list[Any] = []
        for guest in (self.near, self.far):
            shown = guest.rest.server(guest.server)
            state += [
                guest.name,
                shown.get("status"),
                shown.get("OS-EXT-STS:task_state"),
                sorted(
                    (network, address["addr"])
                    for network, addresses in shown.get("addresses", {}).items()
                    for address in addresses
                ),
            ]
            state += sorted(
                (port.id, port.binding_host_id, sorted(port.security_group_ids))
                for port in guest.live.seed.admin.network.ports(device_id=guest.server)
            )
        return state

    def remove(self) -> None:
        for guest in (self.near, self.far):
            guest.remove()


def make_pair(cloud: Live) -> Pair:
    """Create the guests and wait until both answer by ssh."""
    rest = cloud.rest()
    before = [server["id"] for server in rest.servers()]
    try:
        [shown] = cloud.openstack(
            "server create --image tiny --flavor m1.nano --network private --key-name kilonova "
            "--wait near -f json"
        )
        near = Guest(cloud, shown["id"], "near", give_address(cloud, shown["id"]))
        with cloud.only(2):
            far = make(cloud, "far")
        return Pair(near.await_ssh(), far.await_ssh(), shown)
    except BaseException:
        clear(rest, before)
        raise


@pytest.fixture(scope="session")
def pairs(cloud: Live) -> Iterator[list[Pair]]:
    """Yield a list of the current pair, empty before the first test with a pair.

    At the end the pair is removed, and must leave no ports, devices or rules.
    """
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.remove()
    await_true(lambda: orphans(cloud) == [], SOON, lambda: orphans(cloud))
    cloud.assert_healthy()


@pytest.fixture
def pair(cloud: Live, pairs: list[Pair]) -> Iterator[Pair]:
    """Two guests that tests share. A test must restore them after a change.

    If a test leaves changes, the test fails and the next test gets a new pair. Other servers are
    deleted.
    """
    if not pairs:
        pairs.append(make_pair(cloud))
    [pair] = pairs
    rest, before = cloud.rest(), pair.read_state()
    servers = [server["id"] for server in rest.servers()]
    yield pair
    try:
        clear(rest, servers)
        await_true(
            lambda: pair.read_state() == before,
            SOON,
            lambda: f"was {before}, is {pair.read_state()}",
        )
    except BaseException:
        pairs.clear()
        pair.remove()
        raise


@dataclass(frozen=True)
class WatchedLab:
    """A lab, the result of ``deploy/lab up``, and the watcher."""

    live: LiveLab
    result: subprocess.CompletedProcess[str]
    watcher: Watcher


@contextmanager
def real_hosts(hosts: int, shared: bool = False) -> Iterator[WatchedLab]:
    """Create a lab, watch the lab during the block, and remove everything afterwards.

    KILONOVA_LAB or KILONOVA_SHARED_LAB may name the home of a running lab. The tests then use that
    lab and leave it running.
    """
    demand(*FOR_NETWORKS)
    existing = os.environ.get("KILONOVA_SHARED_LAB" if shared else "KILONOVA_LAB")
    lab = (
        Lab.open(Path(existing))
        if existing
        else Lab.make(new_home(), Facts(hosts, shared, free_ports(Ports.COUNT), not shared))
    )
    live = LiveLab(lab)
    watcher = live.watcher().start()
    try:
        with diagnose_first(live):
            result = live.up()
            if result.returncode != 0:
                pytest.fail(
                    f"./deploy/lab up failed; logs are in {live.home}/log\n"
                    f"{result.stdout}\n{result.stderr}"
                )
            live.seed.admin.compute.update_quota_set(
                live.seed.demo.session.get_project_id(), **NO_LIMIT
            )
            yield WatchedLab(live, result, watcher)
            assert watcher.violations == [], "\n".join(watcher.violations)
    finally:
        watcher.stop()
        if not existing:
            removal = live.down()
            assert (
                removal.returncode,
                live.processes(),
                live.kernel_leftovers(),
                live.home.exists(),
            ) == (0, [], [], False), removal


@pytest.fixture(scope="session")
def lab_up() -> Iterator[WatchedLab]:
    with real_hosts(3) as lab:
        yield lab


@pytest.fixture(scope="session")
def shared_lab_up() -> Iterator[WatchedLab]:
    with real_hosts(3, shared=True) as lab:
        yield lab


@contextmanager
def watch(lab: WatchedLab) -> Iterator[LiveLab]:
    """Yield the lab to one test, and repair the hosts afterwards.

    Fail if the watcher saw two running domains of a server, or if the test left servers.
    """
    before = {server["id"] for server in lab.live.rest().servers()}
    with lab.watcher.watching():
        yield lab.live
        lab.live.repair()
        leftovers = [server for server in lab.live.rest().servers() if server["id"] not in before]
        assert leftovers == []
        lab.live.assert_healthy()


@pytest.fixture
def lab(lab_up: WatchedLab) -> Iterator[LiveLab]:
    """Three real hosts with separate storage (lab.py)."""
    with watch(lab_up) as live:
        yield live


@pytest.fixture
def shared_lab(shared_lab_up: WatchedLab) -> Iterator[LiveLab]:
    """Three real hosts that store the disks of guests in one shared folder."""
    with watch(shared_lab_up) as live:
        yield live


def start_cloud(live: Live) -> None:
    for step in (up.prepare, up.upgrade, up.bootstrap):
        step(live.cloud)
    lifecycle.launch(live.cloud)


@contextmanager
def without_guests(
    hosts: tuple[str, ...] = ("one", "two"),
    start: Callable[[Live], None] = start_cloud,
    **facts: Any,
) -> Iterator[Live]:
    """Run a cloud on hosts in memory, with flavors, unlimited quotas and an image named "empty".

    ``start`` makes the cloud's database and starts the processes. ``facts`` has other fields of
    ``Cloud``.
    """
    demand(Ability.ROOT)
    live = Live(new_home(), free_ports(Ports.COUNT), hosts=hosts, driver="memory", **facts)
    try:
        with diagnose_first(live):
            start(live)
            up.await_services(live.cloud)
            for create in (live.seed.host, live.seed.flavors, live.seed.tenant):
                create()
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
        # The supervisor releases its lock a moment before the exit.
        await_true(lambda: live.processes() == [], 10, live.processes)


@pytest.fixture(scope="session")
def in_memory() -> Iterator[Live]:
    """Yield a cloud without guests, with the default options."""
    with without_guests() as live:
        yield live


@pytest.fixture(scope="session")
def keeping() -> Iterator[Live]:
    """Yield a cloud without guests, with networks and volumes, that keeps servers.

    A deleted server can be restored for KEPT seconds, and a shelved server stays on its host.
    """
    options = (
        ("DEFAULT", "reclaim_instance_interval", KEPT),
        ("DEFAULT", "shelved_offload_time", -1),
        # A quarter of the threads may wait for attachments, as many as tests request in parallel.
        ("api", "threads", 32),
    )
    with without_guests(options=options, networks=True, volumes=True) as live:
        yield live


@pytest.fixture
def demo(cloud: Live) -> Iterator[Rest]:
    """Yield the API as the user demo. At the end, new servers are deleted and the doctor runs."""
    rest = cloud.rest()
    before = [server["id"] for server in rest.servers()]
    yield rest
    clear(rest, before)
    cloud.assert_healthy()
