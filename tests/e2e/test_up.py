# SPDX-License-Identifier: Apache-2.0
"""``./deploy/up`` and ``./deploy/down``: a new cloud with a guest, a second up, and the end.

The first run of up belongs to the session (conftest.py).
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

#: Limits of a second run on a busy machine: CPU seconds, and seconds. An idle machine needs about
#: two seconds.
SECOND_RUN = 10, 60


@pytest.fixture
def absent_cloud() -> Iterator[Live]:
    """Yield a cloud that does not exist yet. At the end, no home may exist."""
    home = new_home()
    home.rmdir()
    yield Live(home, free_ports(Ports.COUNT))
    assert not home.exists()


@pytest.fixture
def settled_cloud(cloud: Live) -> None:
    """Wait until no server of an earlier test has a running task."""
    rest = cloud.rest()

    def list_busy_servers() -> list[dict[str, Any]]:
        return [
            server
            for server in rest.servers()
            if server["OS-EXT-STS:task_state"] or server["status"] == "BUILD"
        ]

    await_true(lambda: list_busy_servers() == [], SETTLE, list_busy_servers)


def list_resources(live: Live) -> dict[str, Any]:
    """Return all resources that a run of up could create twice or change."""
    return {
        "servers": sorted((item["id"], item["name"]) for item in live.rest().servers()),
        # Other servers may be in any status.
        "status": [item["status"] for item in live.rest().servers() if item["name"] == "first"],
        "images": sorted((item.id, item.name) for item in live.seed.admin.image.images()),
        "flavors": sorted((item.id, item.name) for item in live.seed.admin.compute.flavors()),
        "projects": sorted(item.name for item in live.seed.admin.identity.projects()),
        "users": sorted(item.name for item in live.seed.admin.identity.users()),
        "key pairs": sorted(
            (item.name, item.fingerprint) for item in live.seed.demo.compute.keypairs()
        ),
        "addresses": sorted(
            (item["name"], str(item["addresses"])) for item in live.rest().servers()
        ),
        **{
            kind: sorted((item.id, item.name) for item in getattr(live.seed.admin.network, kind)())
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


def test_up_prints_output_of_guest_and_commands_to_continue(first_up: First) -> None:
    live, output = first_up.live, first_up.result.stdout
    [server] = [
        server_record for server_record in live.rest().servers() if server_record["name"] == "first"
    ]
    assert "kilonova tiny guest: booting" in output
    assert f"kilonova tiny guest: id {server['id']}" in output
    assert "kilonova tiny guest: hello, this is first" in output
    assert [line for line in output.splitlines() if line.startswith("[")][-1].startswith("[17/17]")
    advice = [line.strip() for line in output.splitlines() if line.startswith("  ")]
    [setting] = [line for line in advice if line.startswith("export OS_CLIENT_CONFIG_FILE=")]
    [command] = [line for line in advice if line.endswith("server list")]
    listing = live.run(
        PROGRAMS / command.split()[0],
        *command.split()[1:],
        OS_CLOUD="kilonova",
        OS_CLIENT_CONFIG_FILE=setting.partition("=")[2],
    )
    assert listing.returncode == 0, listing
    assert server["id"] in listing.stdout
    assert run_hostname_on_guest(live, output) == "first"


def run_hostname_on_guest(live: Live, output: str) -> str:
    """Run ``hostname`` on the guest with the ssh command that up printed."""
    [line] = [line.strip() for line in output.splitlines() if line.startswith("  ssh -i ")]
    return live.run(*line.split(), "hostname", seconds=30).stdout.strip()


def measure_child_cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes of this test run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slice("guests")
@pytest.mark.usefixtures("settled_cloud")
def test_second_up_is_quick_and_changes_nothing(cloud: Live) -> None:
    before, cpu_seconds, began = (
        list_resources(cloud),
        measure_child_cpu_seconds(),
        time.monotonic(),
    )
    result = cloud.up()
    cpu_seconds, seconds = measure_child_cpu_seconds() - cpu_seconds, time.monotonic() - began
    assert result.returncode == 0, result
    assert 0 < cpu_seconds < SECOND_RUN[0]
    assert seconds < SECOND_RUN[1]
    assert list_resources(cloud) == before


def test_up_and_down_refuse_wrong_argument_before_any_change(absent_cloud: Live) -> None:
    for ran in (absent_cloud.up("--please"), absent_cloud.down("--please")):
        assert ran.returncode == 1
        assert "--please" in ran.stderr
        assert "What to do: " in ran.stderr


@pytest.mark.parametrize("base", ["eighty", "80", "99999"])
def test_up_refuses_wrong_port_base(absent_cloud: Live, base: str) -> None:
    ran = absent_cloud.up(KILONOVA_PORT_BASE=base)
    assert ran.returncode == 1
    assert "KILONOVA_PORT_BASE" in ran.stderr
    assert "1024 to 65000" in ran.stderr


def test_up_names_port_in_use_before_any_change(absent_cloud: Live) -> None:
    port = absent_cloud.cloud.ports.api
    with socket.create_server(("127.0.0.1", port)):
        ran = absent_cloud.up()
    assert ran.returncode == 1
    assert f"{port} (api)" in ran.stderr
    assert "KILONOVA_PORT_BASE" in ran.stderr
    assert "ss -ltnp" in ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("[1/17]")


def list_network_names(live: Live) -> list[str]:
    """Return the names of the networks for a new client, or [] without a network service."""
    live.seed = Seed(live.cloud)
    try:
        return sorted(network.name for network in live.seed.demo.network.networks())
    except ServiceDisabledException:
        return []


@pytest.mark.slice("guests")
def test_up_with_memory_driver_has_networks_only_when_requested(absent_cloud: Live) -> None:
    """A cloud with the memory driver needs only root, and boots no guest.

    A running cloud keeps its settings.
    """
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
            result = absent_cloud.up(**variables)
            assert result.returncode == 0, result
            assert (
                "[17/17]" in result.stdout
                and "exist only in the database" in result.stdout
                and "ssh -i" not in result.stdout
            )
            assert list_network_names(absent_cloud) == networks
            reply = absent_cloud.rest().call(
                "POST",
                "/servers",
                {
                    "server": {
                        "name": "other",
                        "flavorRef": absent_cloud.flavor(),
                        "imageRef": absent_cloud.image(),
                        "networks": "auto",
                    }
                },
            )
            assert reply.status == 202, reply
            refused = absent_cloud.up(
                **paper, KILONOVA_NETWORKS="no" if networks else "yes", KILONOVA_HOSTS="2"
            )
            assert refused.returncode == 1
            assert "[2/17]" not in refused.stdout
            assert (
                f"KILONOVA_NETWORKS={'yes' if networks else 'no'}, KILONOVA_HOSTS=1."
                in refused.stderr
            )
            assert "./deploy/down" in refused.stderr
            assert list_network_names(absent_cloud) == networks
            assert absent_cloud.down().returncode == 0
    finally:
        absent_cloud.down("--purge")
    assert absent_cloud.processes() == []


def test_down_without_cloud_succeeds(absent_cloud: Live) -> None:
    ran = absent_cloud.down()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "nothing runs" in ran.stdout


@pytest.mark.slice("guests")
@pytest.mark.usefixtures("settled_cloud")
def test_down_stops_all_processes_and_up_restores_same_servers(cloud: Live) -> None:
    before = list_resources(cloud)
    result = cloud.down()
    assert result.returncode == 0, result
    assert cloud.processes() == []
    assert cloud.kernel_leftovers() == []
    assert "--purge" in result.stdout
    assert (cloud.home / "data").is_dir()

    result = cloud.up()
    assert result.returncode == 0, result
    rest = cloud.rest()
    again = list_resources(cloud)
    assert {**again, "processes": None} == {**before, "processes": None}
    assert None not in again["processes"]
    [server] = [
        server_record for server_record in rest.servers() if server_record["name"] == "first"
    ]
    await_true(lambda: cloud.domain_state(server["id"]) == "running", 60, cloud.domains)
    # The guest has the same address as before.
    assert run_hostname_on_guest(cloud, result.stdout) == "first"
    # The network host needs some time.
    await_true(lambda: orphans(cloud) == [], SETTLE, lambda: orphans(cloud))
    cloud.assert_healthy()


def test_down_purge_refuses_folder_not_home_of_cloud(tmp_path: Path) -> None:
    foreign_folder = tmp_path / "mine"
    foreign_folder.mkdir()
    (foreign_folder / "letter").write_text("dear")
    ran = Live(foreign_folder, free_ports(Ports.COUNT)).down("--purge")
    assert ran.returncode == 1
    assert "nothing is removed" in ran.stderr
    assert (foreign_folder / "letter").read_text() == "dear"
