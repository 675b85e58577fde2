# SPDX-License-Identifier: Apache-2.0
"""Addresses and names of clouds side by side; as root, the wire itself: made twice, broken,
removed."""

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

NEAR = 7  #: ports between the first ports of two clouds that mean the same part
NO_BROKER = "rabbit://guest:guest@127.0.0.1:1/"


def test_clouds_whose_ports_differ_share_nothing() -> None:
    bases = (1024, 5000, *range(20000, 25000, Ports.COUNT), 65000)
    clouds = [Underlay(Path("/var/lib") / str(base), base) for base in bases]
    for part in (
        [one.external for one in clouds],
        [one.address(1) for one in clouds],
        [one.tag for one in clouds],
        [one.first_identifier for one in clouds],
    ):
        assert len(set(part)) == len(clouds)
    assert all(one.external.subnet_of(EXTERNAL) and one.address(9) in TUNNELS for one in clouds)
    assert Ports.COUNT >= PORTS and 65535 // PORTS < PARTS


def test_addresses_of_one_cloud_are_together(tmp_path: Path) -> None:
    one, next_one = Underlay(tmp_path, 5000), Underlay(tmp_path, 5000 + PORTS)
    assert str(one.external) == "172.24.156.64/26"
    assert str(one.address(2)) == "198.18.39.18"
    assert one.external[-1] < next_one.external[0] and one.address(14) < next_one.address(1)
    assert next_one.first_identifier - one.first_identifier == 2048
    assert (one.namespace(1), one.namespace(2)) == (None, f"{one.bridge}-2")


def test_names_fit_into_the_kernels_limit(tmp_path: Path) -> None:
    assert len(Underlay(tmp_path, 5000).bridge) <= 13  # and two more for a host's number


def test_route_that_would_be_hidden_is_told(
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
def test_wrong_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Failure, match=rf"{variable} is '{value}'"):
        Cloud.from_environment()


def test_hosts_and_networks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cloud.from_environment().has_networks and len(Cloud.from_environment().hosts) == 1
    monkeypatch.setenv("KILONOVA_HOSTS", "2")
    monkeypatch.setenv("KILONOVA_NETWORKS", "no")
    cloud = Cloud.from_environment()
    assert (cloud.hosts[1], cloud.has_networks) == (f"{cloud.hosts[0]}-2", False)
    assert not Cloud(driver="memory").has_networks


def test_processes_of_a_cloud_with_networks(tmp_path: Path) -> None:
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


def test_single_host_listens_on_this_machine_alone(tmp_path: Path) -> None:
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


def test_process_is_another_one_with_another_configuration(tmp_path: Path) -> None:
    def programs(*options: tuple[str, str, object]) -> list[Program]:
        cloud = Cloud(tmp_path, hosts=("h1",), broker_url=NO_BROKER, options=options)
        lifecycle.prepare(cloud)
        return processes.programs(cloud)

    before = programs()
    assert before == programs() != programs(("DEFAULT", "shelved_offload_time", 5))


def test_lab_has_no_host_on_the_machine_but_a_gateway(tmp_path: Path) -> None:
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
    made = Underlay(tmp_path, free_ports(NEAR + Ports.COUNT))
    yield made
    made.remove()
    assert made.namespaces() == []
    assert (
        made.tag
        not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    )


def await_true(question: Callable[[], bool]) -> None:
    """Also for a wire that is new: a bridge forwards nothing until it knows of a link, and a busy
    machine is late."""
    deadline = time.monotonic() + 10
    while not question():
        assert time.monotonic() < deadline


def listening(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port))


def reaches(wire: Underlay, number: int, other: int) -> bool:
    command = [
        "nsenter",
        f"--net=/run/netns/{wire.namespace(number)}",
        "ping",
        "-c1",
        "-W2",
        str(wire.address(other)),
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_hosts_reach_each_other_and_what_is_broken_is_mended(wire: Underlay) -> None:
    wire.make(1)
    assert wire.namespaces() == []
    wire.make(3)
    wire.make(3)
    await_true(lambda: reaches(wire, 2, 1) and reaches(wire, 3, 2))
    subprocess.run(["ip", "netns", "delete", f"{wire.bridge}-2"], check=True)
    wire.make(3)
    await_true(lambda: reaches(wire, 2, 1) and reaches(wire, 3, 2))
    wire.remove()
    wire.remove()


def test_cloud_that_would_have_another_one_s_addresses_is_refused(
    tmp_path: Path, wire: Underlay
) -> None:
    """Ports that begin less than eight apart may mean the same part; that there are ten of a cloud
    shows it."""
    wire.make(2)
    second = Cloud(tmp_path / "second", Ports.from_base(wire.port + NEAR), hosts=("h1", "h2"))
    assert second.address == str(wire.machine)
    preflight.check_ports(second)
    with (
        listening(second.address, Ports.from_base(wire.port).metadata),
        pytest.raises(Failure, match=rf"needed: {second.ports.identity} \(identity\)"),
    ):
        preflight.check_ports(second)


def test_each_boot_has_a_name_and_a_cable_can_be_pulled(tmp_path: Path, wire: Underlay) -> None:
    wire = replace(wire, apart=True)
    wire.make(2)
    first = [wire.boot_id(number).read_text() for number in (1, 2)]
    assert len(set(first)) == 2
    await_true(lambda: reaches(wire, 1, 2))
    wire.plug(1, False)
    assert (wire.is_plugged(1), wire.is_plugged(2), reaches(wire, 2, 1)) == (False, True, False)
    wire.plug(1, True)
    await_true(lambda: reaches(wire, 2, 1))
    wire.remove_host(2)
    assert (wire.exists(1), wire.exists(2), wire.is_plugged(2)) == (True, False, False)
    wire.make(2)
    assert [wire.boot_id(1).read_text() == first[0], wire.boot_id(2).read_text() == first[1]] == [
        True,
        False,
    ]
    await_true(lambda: reaches(wire, 1, 2))


def test_only_hosts_reach_hosts(wire: Underlay) -> None:
    wire.make(2)
    stranger = f"{wire.bridge}-9"  # goes with the others
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

    def meets(address: str, port: int, *before: str) -> str:
        done = subprocess.run([*before, *knock, address, str(port)], check=False)
        return {0: "open", errno.ECONNREFUSED: "refused"}.get(done.returncode, "silence")

    inside = ("nsenter", f"--net=/run/netns/{stranger}")
    with listening(str(wire.address(1)), 16598), listening("203.0.113.1", 16598):
        assert meets("203.0.113.1", 16598, *inside) == "open"
        assert meets(str(wire.address(1)), 16598, *inside) == "silence"
        assert (
            meets(str(wire.address(1)), 16598, "nsenter", f"--net=/run/netns/{wire.namespace(2)}")
            == "open"
        )
        assert meets(str(wire.address(1)), 16598) == "open"
