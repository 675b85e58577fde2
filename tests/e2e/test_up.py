# SPDX-License-Identifier: Apache-2.0
"""``./deploy/up`` and ``./deploy/down``: from nothing to a running guest, again without harm, and
back to nothing.

The first run is the session's own (conftest.py).
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openstack.exceptions import ServiceDisabledException

from deploy.one_machine.cloud import processes
from deploy.one_machine.cloud.cloud import Ports
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.machine.abilities import Ability
from deploy.one_machine.seed import Seed
from deploy.testing.servers import free_ports
from tests.e2e.conftest import First, new_home
from tests.e2e.guests import orphans
from tests.e2e.live import PROGRAMS, SETTLE, Live
from tests.services import demand
from tests.waiting import await_true

#: Seconds of work, and in all, that it may take on a machine that is busy with others; alone it
#: takes some two.
SECOND_RUN = 10, 60


@pytest.fixture
def elsewhere() -> Iterator[Live]:
    """A cloud that does not exist, and must not begin to."""
    home = new_home()
    home.rmdir()
    yield Live(home, free_ports(Ports.COUNT))
    assert not home.exists()


@pytest.fixture
def resting(cloud: Live) -> None:
    """Nothing that a failed test may have left is on its way somewhere."""
    rest = cloud.rest()

    def moving() -> list[dict[str, Any]]:
        return [
            one
            for one in rest.servers()
            if one["OS-EXT-STS:task_state"] or one["status"] == "BUILD"
        ]

    await_true(lambda: moving() == [], SETTLE, moving)


def everything(live: Live) -> dict[str, Any]:
    """What a run of up could double or change."""
    return {
        "servers": sorted((one["id"], one["name"]) for one in live.rest().servers()),
        # others rest
        "status": [one["status"] for one in live.rest().servers() if one["name"] == "first"],
        "images": sorted((one.id, one.name) for one in live.seed.admin.image.images()),
        "flavors": sorted((one.id, one.name) for one in live.seed.admin.compute.flavors()),
        "projects": sorted(one.name for one in live.seed.admin.identity.projects()),
        "users": sorted(one.name for one in live.seed.admin.identity.users()),
        "key pairs": sorted(
            (one.name, one.fingerprint) for one in live.seed.demo.compute.keypairs()
        ),
        "addresses": sorted((one["name"], str(one["addresses"])) for one in live.rest().servers()),
        **{
            kind: sorted((one.id, one.name) for one in getattr(live.seed.admin.network, kind)())
            for kind in (
                "networks",
                "subnets",
                "routers",
                "ports",
                "ips",
                "security_groups",
                "security_group_rules",
            )
        },
        "processes": [
            find_process(live.cloud, program.name) for program in processes.programs(live.cloud)
        ],
    }


def test_up_ends_with_the_guests_own_words_and_how_to_go_on(first_up: First) -> None:
    live, said = first_up.live, first_up.said.stdout
    [server] = [one for one in live.rest().servers() if one["name"] == "first"]
    assert "kilonova tiny guest: booting" in said
    assert f"kilonova tiny guest: id {server['id']}" in said
    assert "kilonova tiny guest: hello, this is first" in said
    assert [line for line in said.splitlines() if line.startswith("[")][-1].startswith("[17/17]")
    advice = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    [setting] = [line for line in advice if line.startswith("export OS_CLIENT_CONFIG_FILE=")]
    [command] = [line for line in advice if line.endswith("server list")]
    shown = live.run(
        PROGRAMS / command.split()[0],
        *command.split()[1:],
        OS_CLOUD="kilonova",
        OS_CLIENT_CONFIG_FILE=setting.partition("=")[2],
    )
    assert shown.returncode == 0, shown
    assert server["id"] in shown.stdout
    assert said_by_guest(live, said) == "first"


def said_by_guest(live: Live, said: str) -> str:
    """What the guest says to ``hostname``, asked by the line that up has ended with."""
    [line] = [line.strip() for line in said.splitlines() if line.startswith("  ssh -i ")]
    return live.run(*line.split(), "hostname", seconds=30).stdout.strip()


def work_of_commands() -> float:
    """Seconds of CPU time that all commands have had that were run here so far, with what they
    ran."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slice("guests")
@pytest.mark.usefixtures("resting")
def test_second_run_is_quick_and_changes_nothing(cloud: Live) -> None:
    before, worked, began = everything(cloud), work_of_commands(), time.monotonic()
    done = cloud.up()
    worked, took = work_of_commands() - worked, time.monotonic() - began
    assert done.returncode == 0, done
    assert 0 < worked < SECOND_RUN[0]
    assert took < SECOND_RUN[1]
    assert everything(cloud) == before


def test_wrong_argument_is_said_before_anything_changes(elsewhere: Live) -> None:
    for ran in (elsewhere.up("--please"), elsewhere.down("--please")):
        assert ran.returncode == 1
        assert "--please" in ran.stderr
        assert "What to do: " in ran.stderr


@pytest.mark.parametrize("base", ["eighty", "80", "99999"])
def test_wrong_port_base_is_said(elsewhere: Live, base: str) -> None:
    ran = elsewhere.up(KILONOVA_PORT_BASE=base)
    assert ran.returncode == 1
    assert "KILONOVA_PORT_BASE" in ran.stderr
    assert "1024 to 65000" in ran.stderr


def test_port_in_use_is_named_before_anything_changes(elsewhere: Live) -> None:
    port = elsewhere.cloud.ports.api
    with socket.create_server(("127.0.0.1", port)):
        ran = elsewhere.up()
    assert ran.returncode == 1
    assert f"{port} (api)" in ran.stderr
    assert "KILONOVA_PORT_BASE" in ran.stderr
    assert "ss -ltnp" in ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("[1/17]")


def networks_of(live: Live) -> list[str]:
    """What a process that has just come finds in the network service; [] where the catalogue names
    none."""
    live.seed = Seed(live.cloud)
    try:
        return sorted(network.name for network in live.seed.demo.network.networks())
    except ServiceDisabledException:
        return []


@pytest.mark.slice("guests")
def test_cloud_on_paper_has_networks_when_it_is_started_with_them(elsewhere: Live) -> None:
    """Needs no privileges. Nobody waits for a guest, and a running cloud keeps what it was started
    with."""
    paper, without = (
        {"KILONOVA_DRIVER": "memory"},
        {"KILONOVA_DRIVER": "memory", "KILONOVA_NETWORKS": "no"},
    )
    demand(Ability.ROOT)
    try:
        for variables, networks in (
            (without, []),
            ({**paper, "KILONOVA_NETWORKS": "yes"}, ["private", "public"]),
        ):
            done = elsewhere.up(**variables)
            assert done.returncode == 0, done
            assert (
                "[17/17]" in done.stdout
                and "on paper only" in done.stdout
                and "ssh -i" not in done.stdout
            )
            assert networks_of(elsewhere) == networks
            made = elsewhere.rest().call(
                "POST",
                "/servers",
                {
                    "server": {
                        "name": "other",
                        "flavorRef": elsewhere.flavor(),
                        "imageRef": elsewhere.image(),
                        "networks": "auto",
                    }
                },
            )
            assert made.status == 202, made
            refused = elsewhere.up(
                **paper, KILONOVA_NETWORKS="no" if networks else "yes", KILONOVA_HOSTS="2"
            )
            assert refused.returncode == 1
            assert "[2/17]" not in refused.stdout
            assert (
                f"KILONOVA_NETWORKS={'yes' if networks else 'no'}, KILONOVA_HOSTS=1."
                in refused.stderr
            )
            assert "./deploy/down" in refused.stderr
            assert networks_of(elsewhere) == networks
            assert elsewhere.down().returncode == 0
    finally:
        elsewhere.down("--purge")
    assert elsewhere.processes() == []


def test_down_of_nothing_is_harmless(elsewhere: Live) -> None:
    ran = elsewhere.down()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "nothing runs" in ran.stdout


@pytest.mark.slice("guests")
@pytest.mark.usefixtures("resting")
def test_down_stops_everything_and_up_brings_the_same_servers_back(cloud: Live) -> None:
    before = everything(cloud)
    done = cloud.down()
    assert done.returncode == 0, done
    assert cloud.processes() == []
    assert cloud.in_kernel() == []
    assert "--purge" in done.stdout
    assert (cloud.home / "data").is_dir()

    done = cloud.up()
    assert done.returncode == 0, done
    rest = cloud.rest()
    again = everything(cloud)
    assert {**again, "processes": None} == {**before, "processes": None}
    assert None not in again["processes"]
    [server] = [one for one in rest.servers() if one["name"] == "first"]
    await_true(lambda: cloud.domain_state(server["id"]) == "running", 60, cloud.domains)
    assert said_by_guest(cloud, done.stdout) == "first"  # at the address that it had before
    # the part on the host catches up
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))
    cloud.judge()


def test_purge_wants_the_home_of_a_cloud(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter").write_text("dear")
    ran = Live(mine, free_ports(Ports.COUNT)).down("--purge")
    assert ran.returncode == 1
    assert "nothing is removed" in ran.stderr
    assert (mine / "letter").read_text() == "dear"
