# SPDX-License-Identifier: Apache-2.0
"""Removal of stale DHCP leases with a real dnsmasq, even if the host part is killed at any line."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deploy.one_machine.services.network.host import dnsmasq_processes as module
from deploy.one_machine.services.network.host.description import parse
from deploy.one_machine.services.network.host.dnsmasq_config import DnsmasqConfig, configure
from deploy.one_machine.services.network.host.dnsmasq_processes import DnsmasqProcesses
from deploy.one_machine.services.network.host.kernel import Kernel
from deploy.one_machine.services.network.host.names import Names
from tests.contract.network_lab import await_true, demand_networks, run

NETWORK = "10000000-0000-0000-0000-000000000000"
SUBNETS = {
    "subnet-four": {"cidr": "10.0.0.0/24", "version": 4, "gateway": None, "dhcp": True},
    "subnet-six": {
        "cidr": "2001:db8::/64",
        "version": 6,
        "gateway": None,
        "dhcp": True,
        "ipv6_mode": "dhcpv6-stateful",
    },
}
ONE, TWO, THREE = (f"fa:16:3e:00:00:0{number}" for number in (1, 2, 3))
FUTURE, SERVER = 4102444800, "duid 00:01:00:01:2f:00:00:00:fa:16:3e:00:00:aa"
Ports = dict[str, tuple[str, ...]]
BEFORE: Ports = {ONE: ("10.0.0.5", "2001:db8::5"), TWO: ("10.0.0.6", "2001:db8::6")}
KILLS = 10


def dnsmasq_config(ports: Ports) -> DnsmasqConfig:
    """Return the wanted dnsmasq configuration for ports: MAC -> addresses."""
    own = {"mac": "fa:16:3e:00:00:aa", "addresses": ["10.0.0.2/24", "2001:db8::2/64"]}
    description = parse(
        {
            "revision": 1,
            "networks": {NETWORK: {"vni": 1, "mtu": 1450, "dhcp": own, "subnets": SUBNETS}},
            "ports": {
                str(uuid.uuid4()): {
                    "network": NETWORK,
                    "mac": mac,
                    "addresses": [{"address": address} for address in port_addresses],
                }
                for mac, port_addresses in ports.items()
            },
        }
    )
    return configure(description.networks[NETWORK], list(description.ports.values()), ())


@dataclass
class Rig:
    """A namespace with the DHCP device of dnsmasq, and the lease file."""

    names: Names

    @property
    def space(self) -> str:
        return self.names.network_namespace(NETWORK)

    def ensure(self, ports: Ports) -> None:
        """Apply the ports as a host part that was just started."""
        DnsmasqProcesses(Kernel(), self.names).ensure(self.space, dnsmasq_config(ports))

    def begin(self) -> None:
        """Start dnsmasq with a lease per address of BEFORE. IPv6 leases have client ids."""
        DnsmasqProcesses(Kernel(), self.names).clear()
        self.names.runtime.mkdir()
        lines = [f"{FUTURE} {mac} {four} * *" for mac, (four, _) in BEFORE.items()]
        lines += [
            SERVER,
            *(
                f"{FUTURE} {number} {six} * 00:03:00:01:{mac}"
                for number, (mac, (_, six)) in enumerate(BEFORE.items(), 7)
            ),
        ]
        (self.names.runtime / f"{NETWORK}.hosts").write_text(dnsmasq_config(BEFORE).hosts)
        (self.names.runtime / f"{NETWORK}.leases").write_text(
            "".join(f"{line}\n" for line in lines)
        )
        self.ensure(BEFORE)

    def await_leases(self, ports: Ports, expected: set[str]) -> None:
        """Poll the leases, because dnsmasq truncates the file before each rewrite."""

        def are_expected() -> bool:
            self.ensure(ports)
            return self.leases() == expected

        await_true(are_expected, f"other leases than {expected}")

    def leases(self) -> set[str]:
        lines = (self.names.runtime / f"{NETWORK}.leases").read_text().splitlines()
        return {line.split()[2] for line in lines if not line.startswith("duid")}

    def pid(self) -> str:
        return (self.names.runtime / f"{NETWORK}.pid").read_text()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    demand_networks()
    rig = Rig(Names.of(tmp_path))
    run("ip", "netns", "add", rig.space)
    try:
        for words in (
            ("link", "set", "lo", "up"),
            ("link", "add", "dhcp", "type", "bridge"),
            ("link", "set", "dhcp", "up"),
            ("addr", "add", "10.0.0.2/24", "dev", "dhcp"),
            ("addr", "add", "2001:db8::2/64", "dev", "dhcp", "nodad"),
        ):
            run("ip", *words, space=rig.space)
        yield rig
    finally:
        DnsmasqProcesses(Kernel(), rig.names).clear()
        run("ip", "netns", "del", rig.space)


#: Change -> the ports afterwards, the remaining leases, and whether dnsmasq keeps running.
CHANGES: dict[str, tuple[Ports, set[str], bool]] = {
    "nothing": (BEFORE, {"10.0.0.5", "10.0.0.6", "2001:db8::5", "2001:db8::6"}, True),
    "one goes": ({ONE: BEFORE[ONE]}, {"10.0.0.5", "2001:db8::5"}, False),
    "an IPv4 goes": (
        {ONE: BEFORE[ONE], TWO: ("2001:db8::6",)},
        {"10.0.0.5", "2001:db8::5", "2001:db8::6"},
        True,
    ),
    "an IPv4 is another's": (
        {ONE: BEFORE[ONE], THREE: ("10.0.0.6",), TWO: ("2001:db8::6",)},
        {"10.0.0.5", "2001:db8::5", "2001:db8::6"},
        True,
    ),
    "an IPv6 is another's": (
        {ONE: BEFORE[ONE], THREE: ("2001:db8::6",), TWO: ("10.0.0.6",)},
        {"10.0.0.5", "10.0.0.6", "2001:db8::5"},
        False,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_dhcp_leases_follow_ports_even_if_host_part_is_killed_at_any_line(
    rig: Rig, change: str
) -> None:
    ports, remaining, undisturbed = CHANGES[change]
    rig.begin()
    before = rig.pid()
    lines = run_until_killed(lambda: rig.ensure(ports), sys.maxsize)
    rig.await_leases(ports, remaining)
    assert (rig.pid() == before) == undisturbed
    assert lines > KILLS
    for line in range(1, lines, lines // KILLS):
        rig.begin()
        run_until_killed(lambda: rig.ensure(ports), line)
        rig.await_leases(ports, remaining)
        run("kill", "-0", rig.pid().strip())


def test_dhcp_lease_removal_waits_for_slow_dnsmasq_without_restart(rig: Rig) -> None:
    ports, remaining, _ = CHANGES["an IPv4 goes"]
    rig.begin()
    before = rig.pid()
    os.kill(int(before), signal.SIGSTOP)
    resume = threading.Timer(2, os.kill, (int(before), signal.SIGCONT))
    resume.start()
    try:
        rig.ensure(ports)
        assert rig.pid() == before
        rig.await_leases(ports, remaining)
    finally:
        resume.join()


def run_until_killed(act: Callable[[], None], at: int) -> int:
    """Run ``act`` in a child that exits at line number ``at`` of dnsmasq_processes.py.

    Returns:
        The number of lines that the child ran.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        line_count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal line_count
            if frame.f_code.co_filename != module.__file__:
                return None
            line_count += event == "line"
            if line_count >= at:
                os._exit(9)
            return trace

        sys.settrace(trace)
        try:
            act()
            os.write(writer, str(line_count).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        count = output.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert count or status == 9
    return int(count or at)
