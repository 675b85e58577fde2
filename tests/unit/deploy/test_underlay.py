# SPDX-License-Identifier: Apache-2.0
"""Addresses and names of clouds side by side; as root, the wire itself: made twice, broken, removed."""
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import preflight
from deploy.cloud import Cloud, Ports
from deploy.progress import Failure
from deploy.servers import free_ports
from deploy.underlay import EXTERNAL, PARTS, PORTS, TUNNELS, Underlay


def test_clouds_whose_ports_differ_share_nothing() -> None:
    bases = (1024, 5000, *range(20000, 25000, Ports.COUNT), 65000)
    clouds = [Underlay(Path("/var/lib") / str(base), base) for base in bases]
    for part in ([one.external for one in clouds], [one.address(1) for one in clouds], [one.tag for one in clouds],
                 [one.first_identifier for one in clouds]):
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
    assert len(Underlay(tmp_path, 5000).bridge) <= 13       # and two more for a host's number


def test_route_that_would_be_hidden_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ip").write_text("#!/bin/sh\necho 'default via 10.0.0.1 dev eth0'\n"
                               "echo '172.16.0.0/12 dev lan scope link'\n"
                               "echo '172.24.156.64/26 dev own'\necho '192.168.1.0/24 dev eth0'\n")
    (folder / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert preflight._routes(Underlay(tmp_path, 5000).external) == ["172.16.0.0/12 dev lan scope link"]


@pytest.mark.parametrize(("variable", "value"), [("KILONOVA_HOSTS", "0"), ("KILONOVA_HOSTS", "many"),
                                                 ("KILONOVA_NETWORKS", "perhaps")])
def test_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
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
    cloud = Cloud(tmp_path, hosts=("h1", "h2"), broker_url="rabbit://guest:guest@127.0.0.1:1/")
    cloud.prepare()
    programs = {program.name: program.command for program in cloud.programs()}
    assert list(programs) == ["libvirtd", "libvirtd-2", "identity", "image", "network", "network-host",
                              "network-host-2", "api", "conductor", "scheduler", "placement", "metadata", "console",
                              "agent", "agent-2"]
    first, second = programs["network-host"], programs["network-host-2"]
    assert ("--external-gateway" in first, "--external-gateway" in second) == (True, False)
    assert f"/run/netns/{cloud.underlay.namespace(2)}" in second and "--netns" not in first
    assert programs["libvirtd-2"][-2:] == [f"/run/netns/{cloud.underlay.namespace(2)}", "h2"]
    assert "--no-hosts" in {program.name: program.command for program in Cloud(
        tmp_path, driver="memory", networks=True).programs()}["network"]


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Underlay]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    made = Underlay(tmp_path, free_ports(Ports.COUNT))
    yield made
    made.remove()
    assert made.namespaces() == []
    assert made.tag not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def reaches(wire: Underlay, number: int, other: int) -> bool:
    command = ["nsenter", f"--net=/run/netns/{wire.namespace(number)}", "ping", "-c1", "-W2", str(wire.address(other))]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_hosts_reach_each_other_and_what_is_broken_is_mended(wire: Underlay) -> None:
    wire.make(1)
    assert wire.namespaces() == []
    wire.make(3)
    wire.make(3)
    assert reaches(wire, 2, 1) and reaches(wire, 3, 2)
    subprocess.run(["ip", "netns", "delete", f"{wire.bridge}-2"], check=True)
    wire.make(3)
    assert reaches(wire, 2, 1) and reaches(wire, 3, 2)
    wire.remove()
    wire.remove()
