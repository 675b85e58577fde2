# SPDX-License-Identifier: Apache-2.0
"""The underlay: the addresses and names of several clouds on a machine.

As root, the tests also cover the bridges and namespaces themselves.
"""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.one_machine import preflight
from deploy.one_machine.cloud import lifecycle, processes
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.one_machine.machine.abilities import FOR_HOSTS
from deploy.one_machine.machine.supervise import Program
from deploy.one_machine.machine.underlay import EXTERNAL, PARTS, PORTS, TUNNELS, Underlay
from deploy.progress import Failure
from deploy.testing.servers import free_ports
from tests.services import demand

#: A distance between the first ports of two clouds at which both get the same addresses.
NEAR = 7
NO_BROKER = "rabbit://guest:guest@127.0.0.1:1/"


def test_underlays_of_different_ports_share_no_addresses_or_names() -> None:
    bases = (1024, 5000, *range(20000, 25000, Ports.COUNT), 65000)
    clouds = [Underlay(Path("/var/lib") / str(base), base) for base in bases]
    for part in (
        [underlay.external for underlay in clouds],
        [underlay.address(1) for underlay in clouds],
        [underlay.tag for underlay in clouds],
        [underlay.first_identifier for underlay in clouds],
    ):
        assert len(set(part)) == len(clouds)
    assert all(
        underlay.external.subnet_of(EXTERNAL) and underlay.address(9) in TUNNELS
        for underlay in clouds
    )
    assert Ports.COUNT >= PORTS and 65535 // PORTS < PARTS


def test_underlay_addresses_of_cloud_end_before_those_of_next_cloud(tmp_path: Path) -> None:
    underlay, next_underlay = Underlay(tmp_path, 5000), Underlay(tmp_path, 5000 + PORTS)
    assert str(underlay.external) == "172.24.156.64/26"
    assert str(underlay.address(2)) == "198.18.39.18"
    assert underlay.external[-1] < next_underlay.external[0] and underlay.address(
        14
    ) < next_underlay.address(1)
    assert next_underlay.first_identifier - underlay.first_identifier == 2048
    assert (underlay.namespace(1), underlay.namespace(2)) == (None, f"{underlay.bridge}-2")


def test_underlay_bridge_name_fits_kernel_limit(tmp_path: Path) -> None:
    # The suffix with the host's number has two more characters.
    assert len(Underlay(tmp_path, 5000).bridge) <= 13


def test_preflight_finds_route_hidden_by_external_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ip").write_text(
        "#!/bin/sh\necho 'default via 10.0.0.1 dev eth0'\n"
        "echo '172.16.0.0/12 dev lan scope link'\n"
        "echo '172.24.156.64/26 dev own'\necho '192.168.1.0/24 dev eth0'\n"
    )
    (folder / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert preflight.find_routes(Underlay(tmp_path, 5000).external) == [
        "172.16.0.0/12 dev lan scope link"
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KILONOVA_HOSTS", "0"), ("KILONOVA_HOSTS", "many"), ("KILONOVA_NETWORKS", "perhaps")],
)
def test_cloud_from_environment_refuses_invalid_hosts_or_networks(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Failure, match=rf"{variable} is '{value}'"):
        Cloud.from_environment()


def test_cloud_from_environment_reads_hosts_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cloud.from_environment().has_networks and len(Cloud.from_environment().hosts) == 1
    monkeypatch.setenv("KILONOVA_HOSTS", "2")
    monkeypatch.setenv("KILONOVA_NETWORKS", "no")
    cloud = Cloud.from_environment()
    assert (cloud.hosts[1], cloud.has_networks) == (f"{cloud.hosts[0]}-2", False)
    assert not Cloud(driver="memory").has_networks


def test_programs_of_cloud_with_networks_use_namespaces_and_gateway(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, hosts=("h1", "h2"), broker_url=NO_BROKER)
    lifecycle.prepare(cloud)
    programs = {program.name: program.command for program in processes.programs(cloud)}
    assert list(programs) == [
        "libvirtd",
        "libvirtd-2",
        "identity",
        "image",
        "network",
        "network-host",
        "network-host-2",
        "api",
        "conductor",
        "scheduler",
        "placement",
        "image-gateway",
        "metadata",
        "console",
        "agent",
        "agent-2",
    ]
    first, second = programs["network-host"], programs["network-host-2"]
    assert ("--external-gateway" in first, "--external-gateway" in second) == (True, False)
    network = f"/run/netns/{cloud.underlay.namespace(2)}"
    assert f"--net={network}" in second and not any("--net=" in word for word in first)
    for number, name, where in ((1, "libvirtd", "/proc/self/ns/net"), (2, "libvirtd-2", network)):
        assert programs[name][-4:] == [
            where,
            f"h{number}",
            str(cloud.underlay.address(number)),
            str(tmp_path / f"tls/libvirt-h{number}"),
        ]
    assert (
        programs["agent-2"][2:8]
        == [
            network,
            "h2",
            str(cloud.underlay.boot_id(2)),
            str(cloud.state_folder(1)),
            str(cloud.libvirt_folder(1)),
            "--",
        ]
        and len(programs["agent"]) == 1
    )
    assert (
        "--no-hosts"
        in {
            program.name: program.command
            for program in processes.programs(Cloud(tmp_path, driver="memory", networks=True))
        }["network"]
    )


def test_cloud_with_one_host_or_without_networks_uses_loopback(tmp_path: Path) -> None:
    for cloud in (
        Cloud(tmp_path, hosts=("h1",)),
        Cloud(tmp_path, hosts=("h1", "h2"), networks=False),
    ):
        assert (cloud.address, cloud.host_address(2), cloud.namespace(2)) == (
            "127.0.0.1",
            "127.0.0.1",
            None,
        )
    cloud = Cloud(tmp_path, hosts=("h1",), broker_url=NO_BROKER)
    lifecycle.prepare(cloud)
    assert {program.name: program.command for program in processes.programs(cloud)}["libvirtd"][
        -2:
    ] == [
        "serve",
        str(cloud.libvirt_folder(1)),
    ]
    assert "live_migration_port" not in cloud.config("h1").read_text()


def test_programs_of_cloud_differ_when_configuration_differs(tmp_path: Path) -> None:
    def programs(*options: tuple[str, str, object]) -> list[Program]:
        cloud = Cloud(tmp_path, hosts=("h1",), broker_url=NO_BROKER, options=options)
        lifecycle.prepare(cloud)
        return processes.programs(cloud)

    before = programs()
    assert before == programs() != programs(("DEFAULT", "shelved_offload_time", 5))


def test_lab_runs_gateway_but_no_host_in_machine_namespace(tmp_path: Path) -> None:
    cloud = Cloud(
        tmp_path, hosts=("a", "b"), apart=True, shared=True, networks=True, broker_url=NO_BROKER
    )
    lifecycle.prepare(cloud)
    programs = {program.name: program.command for program in processes.programs(cloud)}
    gateway, first = programs["network-host-gateway"], programs["network-host"]
    assert ("--external-gateway" in gateway, "--external-gateway" in first) == (True, False)
    assert cloud.address in gateway and not any("--net=" in word for word in gateway)
    assert f"--net={cloud.namespace(1)}" in first
    assert [cloud.host_address(1), cloud.host_address(2)] == [
        str(cloud.underlay.machine + 1),
        str(cloud.underlay.machine + 2),
    ]
    assert processes.of_host(cloud, 1) == ["libvirtd", "network-host", "agent"]
    assert processes.of_host(cloud, 2) == ["libvirtd-2", "network-host-2", "agent-2"]
    for number, host in enumerate(cloud.hosts, 1):
        assert (
            f"live_migration_inbound_addr = {cloud.host_address(number)}\n"
            in cloud.config(host).read_text()
        )
        assert (cloud.state_folder(number) / "instances").resolve() == tmp_path / "instances"


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Underlay]:
    demand(*FOR_HOSTS, programs=("ip", "nft"), ring="unit")
    new_wire = Underlay(tmp_path, free_ports(NEAR + Ports.COUNT))
    yield new_wire
    new_wire.remove()
    assert new_wire.namespaces() == []
    assert (
        new_wire.tag
        not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    )


def await_true(condition: Callable[[], bool]) -> None:
    """Wait up to 10 seconds, because a new bridge does not forward packets at once."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def listen(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port))


def can_reach(wire: Underlay, number: int, other: int) -> bool:
    command = [
        "nsenter",
        f"--net=/run/netns/{wire.namespace(number)}",
        "ping",
        "-c1",
        "-W2",
        str(wire.address(other)),
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_underlay_connects_hosts_and_repairs_deleted_namespace(wire: Underlay) -> None:
    wire.make(1)
    assert wire.namespaces() == []
    wire.make(3)
    wire.make(3)
    await_true(lambda: can_reach(wire, 2, 1) and can_reach(wire, 3, 2))
    subprocess.run(["ip", "netns", "delete", f"{wire.bridge}-2"], check=True)
    wire.make(3)
    await_true(lambda: can_reach(wire, 2, 1) and can_reach(wire, 3, 2))
    wire.remove()
    wire.remove()


def test_preflight_refuses_overlapping_ports_of_cloud_with_same_addresses(
    tmp_path: Path, wire: Underlay
) -> None:
    """Clouds with first ports fewer than eight apart can have the same addresses.

    Their port ranges then overlap, so the check of ports detects this.
    """
    wire.make(2)
    second = Cloud(tmp_path / "second", Ports.from_base(wire.port + NEAR), hosts=("h1", "h2"))
    assert second.address == str(wire.machine)
    preflight.check_ports(second)
    with (
        listen(second.address, Ports.from_base(wire.port).metadata),
        pytest.raises(Failure, match=rf"needs: {second.ports.identity} \(identity\)"),
    ):
        preflight.check_ports(second)


def test_underlay_host_made_again_has_new_boot_id_and_can_be_unplugged(
    tmp_path: Path, wire: Underlay
) -> None:
    wire = replace(wire, apart=True)
    wire.make(2)
    first = [wire.boot_id(number).read_text() for number in (1, 2)]
    assert len(set(first)) == 2
    await_true(lambda: can_reach(wire, 1, 2))
    wire.plug(1, False)
    assert (wire.is_plugged(1), wire.is_plugged(2), can_reach(wire, 2, 1)) == (False, True, False)
    wire.plug(1, True)
    await_true(lambda: can_reach(wire, 2, 1))
    wire.remove_host(2)
    assert (wire.exists(1), wire.exists(2), wire.is_plugged(2)) == (True, False, False)
    wire.make(2)
    assert [wire.boot_id(1).read_text() == first[0], wire.boot_id(2).read_text() == first[1]] == [
        True,
        False,
    ]
    await_true(lambda: can_reach(wire, 1, 2))


def test_underlay_drops_packets_to_hosts_from_foreign_namespace(wire: Underlay) -> None:
    wire.make(2)
    # The fixture removes this namespace with those of the hosts.
    stranger = f"{wire.bridge}-9"
    for command in (
        f"ip netns add {stranger}",
        f"ip link add klv{wire.tag}-9 type veth peer name out netns {stranger}",
        f"ip link set klv{wire.tag}-9 up",
        f"ip address add 203.0.113.1/24 dev klv{wire.tag}-9",
        f"ip -netns {stranger} address add 203.0.113.2/24 dev out",
        f"ip -netns {stranger} link set out up",
        f"ip -netns {stranger} route add default via 203.0.113.1",
    ):
        subprocess.run(command.split(), check=True)
    knock = [
        sys.executable,
        "-c",
        "import socket, sys; s = socket.socket(); s.settimeout(2); "
        "sys.exit(s.connect_ex((sys.argv[1], int(sys.argv[2]))))",
    ]

    def probe(address: str, port: int, *before: str) -> str:
        done = subprocess.run([*before, *knock, address, str(port)], check=False)
        return {0: "open", errno.ECONNREFUSED: "refused"}.get(done.returncode, "silence")

    inside = ("nsenter", f"--net=/run/netns/{stranger}")
    with listen(str(wire.address(1)), 16598), listen("203.0.113.1", 16598):
        assert probe("203.0.113.1", 16598, *inside) == "open"
        assert probe(str(wire.address(1)), 16598, *inside) == "silence"
        assert (
            probe(str(wire.address(1)), 16598, "nsenter", f"--net=/run/netns/{wire.namespace(2)}")
            == "open"
        )
        assert probe(str(wire.address(1)), 16598) == "open"
