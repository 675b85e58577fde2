# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine for the host part of the network: real namespaces and a real kernel.

Guests are namespaces too. The lab plays the external services (network_neighbours.py) and holds the
wanted state, of which each host gets a part. A guest's device on the host has the name of a
tap device and joins the bridge as under libvirt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.machine.abilities import FOR_HOSTS
from deploy.one_machine.services.network.host.names import Names
from tests import waiting
from tests.contract.network_neighbours import Service
from tests.services import demand

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = "shared secret"
UDHCPC_SCRIPT = """#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr flush dev eth0
ip addr add "$ip/$mask" dev eth0
[ -z "$mtu" ] || ip link set dev eth0 mtu "$mtu"
set -- $staticroutes
while [ -n "$2" ]; do ip route replace "$1" via "$2"; shift 2; done
echo "ip=$ip mask=$mask router=$router dns=$dns mtu=$mtu hostname=$hostname routes=$staticroutes"
"""


def run(
    *words: str | Path,
    space: str | None = None,
    check: bool = True,
    text: str | None = None,
    seconds: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command, optionally in a namespace."""
    prefix = ["ip", "netns", "exec", space] if space else []
    result = subprocess.run(
        [*prefix, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        input=text,
        timeout=seconds,
    )
    assert not check or result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
    return result


#: Seconds in which a network agent applies a change, also while it starts on a busy machine.
ACKNOWLEDGE_SECONDS = 60


def await_true(question: Callable[[], object], story: str, seconds: float = 10) -> None:
    """Wait until the question is true."""
    waiting.await_true(question, seconds, story, pause=0.01)


def pings(space: str, address: str, wait: str = "0.5", *words: str) -> bool:
    """Return True if one packet is answered within ``wait`` seconds.

    Within 5 seconds the kernel sends three ARP requests.
    """
    return (
        run("ping", "-c", "1", "-W", wait, *words, address, space=space, check=False).returncode
        == 0
    )


def reaches(space: str, address: str, seconds: float = 10) -> bool:
    """Return True if a packet is answered within ``seconds``.

    Use this for a first packet, because a bridge does not forward to a new link at once.
    """
    return waiting.is_true_within(lambda: pings(space, address, "1"), seconds, pause=0.01)


@dataclass
class Guest:
    """A guest: a port and a namespace."""

    port: str
    space: str
    mac: str
    address: str
    host: Machine

    @property
    def device(self) -> str:
        return f"tap{self.port[:11]}"

    def run(
        self, *words: str | Path, check: bool = True, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run(*words, space=self.space, check=check, text=text)

    def dhcp(self, tries: int = 8) -> str:
        """Apply and return the DHCP offer, or return "" without an answer. A try takes a second."""
        script = self.host.folder / "udhcpc.script"
        if not script.exists():
            script.write_text(UDHCPC_SCRIPT)
            script.chmod(0o755)
        return self.run(
            "busybox",
            "udhcpc",
            "-i",
            "eth0",
            "-n",
            "-q",
            "-f",
            "-t",
            str(tries),
            "-T",
            "1",
            "-A",
            "0",
            "-O",
            "121",
            "-O",
            "mtu",
            "-O",
            "hostname",
            "-s",
            script,
            check=False,
        ).stdout.strip()

    def take_address(self, gateway: str | None = None) -> None:
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        if gateway:
            self.run("ip", "route", "add", "default", "via", gateway)

    def pings(self, address: str, wait: str = "0.5", *words: str) -> bool:
        return pings(self.space, address, wait, *words)

    def reaches(self, address: str) -> bool:
        return reaches(self.space, address)


def limit_capabilities(capabilities: frozenset[str]) -> list[str]:
    """Return the command prefix that drops all capabilities except these."""
    return [
        "setpriv",
        "--no-new-privs",
        "--inh-caps=-all",
        f"--bounding-set=-all{''.join(f',+{capability}' for capability in sorted(capabilities))}",
    ]


def unit_capabilities() -> frozenset[str]:
    """Return the capabilities in the unit of the network helper."""
    unit = (REPOSITORY / "deploy/systemd/kilonova-network-helper.service").read_text()
    [line] = [line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")]
    return frozenset(name.removeprefix("CAP_").lower() for name in line.partition("=")[2].split())


@dataclass
class Machine:
    """A host: a namespace, and a host part process."""

    lab: Lab
    name: str
    space: str
    folder: Path
    address: str
    gateway: bool = False
    process: subprocess.Popen[bytes] | None = None
    #: Capabilities of a separate helper for privileged work. None: the host part is one process.
    helper_capabilities: frozenset[str] | None = None
    helper: subprocess.Popen[bytes] | None = None

    def start(self, url: str = "") -> None:
        url = url or self.lab.service.url
        program = [sys.executable, "-m", "deploy.one_machine.services.network.host"]
        place = [
            "--tunnel-address",
            self.address,
            *(["--external-gateway"] if self.gateway else []),
        ]
        serve_command = [
            "serve",
            "--host",
            self.name,
            "--url",
            url,
            "--check-seconds",
            "3",
            "--key-file",
            str(self.folder / "secret"),
            "--metadata-url",
            self.lab.service.url,
            *place,
        ]
        if self.helper_capabilities is None:
            self.process = self._run([*program, *serve_command, *self.state_arguments()])
            return
        door = self.folder / "socket"
        self.helper = self._run(
            [
                *limit_capabilities(self.helper_capabilities),
                *program,
                "help",
                "--user",
                "root",
                "--socket",
                str(door),
                *place,
                *self.state_arguments(),
            ]
        )
        await_true(door.is_socket, "the helper does not listen")
        self.process = self._run(
            [*limit_capabilities(frozenset()), *program, *serve_command, "--helper", str(door)]
        )

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def state_arguments(self) -> list[str]:
        return ["--state", str(self.folder / "state"), "--netns", f"/run/netns/{self.space}"]

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(10)
            self.process = None
        if self.helper is not None:
            self.helper.kill()
            self.helper.wait(10)
            self.helper = None
            (self.folder / "socket").unlink()

    def clean(self) -> None:
        run(
            sys.executable,
            "-m",
            "deploy.one_machine.services.network.host",
            "clean",
            *self.state_arguments(),
        )

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def tag(self) -> str:
        return Names.of(self.folder / "state").tag

    def rules(self) -> list[str]:
        """Return all words of the rules, sorted because sets have no order."""
        return sorted(
            run("nft", "list", "ruleset", space=self.space).stdout.replace(",", " ").split()
        )


@dataclass
class Lab:
    """The hosts, and the wanted state of networks, ports, groups and routers."""

    service: Service
    folder: Path
    machines: dict[str, Machine] = field(default_factory=dict)
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    ports: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    routers: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    guests: list[Guest] = field(default_factory=list)
    revision: int = 0
    mark: str = "nh"
    elsewhere: str = "192.168.99.254"  # an address on the wire that belongs to no host

    def space(self, name: str) -> str:
        """Return the name of a namespace. Several test runs may share the machine."""
        return f"{self.mark}-{os.getpid()}-{name}"

    def build(self, names: list[str]) -> None:
        wire = self.space("wire")
        run("ip", "netns", "add", wire)
        run("ip", "link", "add", "wire", "type", "bridge", space=wire)
        run("ip", "addr", "add", f"{self.elsewhere}/24", "dev", "wire", space=wire)
        run("ip", "link", "set", "wire", "up", space=wire)
        for number, name in enumerate(names, 1):
            folder = self.folder / name
            folder.mkdir()
            (folder / "secret").write_text(f"{host_key(SECRET, name)}\n")
            machine = Machine(
                self, name, self.space(name), folder, f"192.168.99.{number}", gateway=number == 1
            )
            machine.helper_capabilities = unit_capabilities() if name == "x2" else None
            run("ip", "netns", "add", machine.space)
            run("ip", "link", "set", "lo", "up", space=machine.space)
            run(
                "ip",
                "link",
                "add",
                f"w{number}",
                "netns",
                wire,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                machine.space,
            )
            run("ip", "link", "set", f"w{number}", "master", "wire", "up", space=wire)
            run("ip", "link", "set", "eth0", "up", space=machine.space)
            run("ip", "addr", "add", f"{machine.address}/24", "dev", "eth0", space=machine.space)
            self.machines[name] = machine
            machine.start()

    def tear_down(self) -> None:
        for guest in self.guests:
            run("ip", "netns", "del", guest.space, check=False)

        def remove(machine: Machine) -> None:
            machine.stop()
            machine.clean()
            run("ip", "netns", "del", machine.space, check=False)

        with ThreadPoolExecutor() as pool:
            list(pool.map(remove, self.machines.values()))
        run("ip", "netns", "del", self.space("wire"), check=False)
        self.service.close()

    def network(
        self,
        cidr: str = "10.0.0.0/24",
        external: bool = False,
        gateway: str | None = None,
        project: str = "project-1",
    ) -> str:
        """Add a network with one subnet and the DHCP port .2. Return the network's id."""
        id_, start = str(uuid.uuid4()), cidr.rsplit(".", 1)[0]
        gateway = gateway or f"{start}.1"
        subnet = {
            "cidr": cidr,
            "version": 4,
            "gateway": gateway,
            "dhcp": not external,
            "dns": [],
            "routes": [],
            "ipv6_mode": None,
        }
        dhcp = (
            None
            if external
            else {"mac": mac(), "addresses": [f"{start}.2/24"], "port": str(uuid.uuid4())}
        )
        self.networks[id_] = {
            "vni": 100 + len(self.networks),
            "mtu": 1450,
            "bridge": f"brq{id_[:11]}",
            "external": external,
            "project_id": project,
            "dhcp": dhcp,
            "subnets": {str(uuid.uuid4()): subnet},
        }
        return id_

    def guest(
        self,
        network: str,
        address: str,
        host: str = "x1",
        groups: list[str] | None = None,
        **more: Any,
    ) -> Guest:
        """Add a port and a guest, await the acknowledgements of all hosts, and plug the guest."""
        port = str(uuid.uuid4())
        guest = Guest(port, self.space(f"g{len(self.guests)}"), mac(), address, self.machines[host])
        self.ports[port] = (
            host,
            {
                "network": network,
                "mac": guest.mac,
                "device": guest.device,
                "allowed_pairs": [],
                "security": True,
                "addresses": [
                    {"address": address, "subnet": next(iter(self.networks[network]["subnets"]))}
                ],
                "groups": [self.open_group()] if groups is None else groups,
                "server": str(uuid.uuid4()),
                "project_id": "project-1",
                "hostname": f"vm{len(self.guests)}",
                "up": True,
                **more,
            },
        )
        self.guests.append(guest)
        self.publish()
        self.plug(guest)
        return guest

    def plug(self, guest: Guest) -> None:
        """Create the guest's device as a member of the bridge, as libvirt does."""
        bridge = f"brq{self.ports[guest.port][1]['network'][:11]}"
        run("ip", "netns", "add", guest.space)
        run(
            "ip",
            "link",
            "add",
            guest.device,
            "netns",
            guest.host.space,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            guest.mac,
            "netns",
            guest.space,
        )
        run("ip", "link", "set", "lo", "up", space=guest.space)
        run("ip", "link", "set", "eth0", "up", space=guest.space)
        run("ip", "link", "set", guest.device, "master", bridge, "up", space=guest.host.space)

    def open_group(self) -> str:
        """Add a security group that allows everything, and return the id."""
        id_ = "00000000-0000-0000-0000-0000000000a1"
        self.groups.setdefault(
            id_,
            {
                "rules": [
                    rule("ingress"),
                    rule("egress"),
                    rule("ingress", version=6),
                    rule("egress", version=6),
                ],
                "members": [],
            },
        )
        return id_

    def publish(self, wait: bool = True) -> None:
        """Publish a new revision to every host, and by default wait for their acknowledgements."""
        self.revision += 1
        with self.service.changed:
            for name in self.machines:
                self.service.descriptions[name] = self.description(name)
            self.service.changed.notify_all()
        if wait:
            self.await_acknowledged()

    def await_acknowledged(self) -> None:
        for name, machine in self.machines.items():
            with self.service.changed:
                is_acknowledged = self.service.changed.wait_for(
                    lambda name=name: (
                        self.service.acknowledged.get(name, {}).get("revision") == self.revision
                    ),
                    ACKNOWLEDGE_SECONDS,
                )
            assert is_acknowledged, (
                f"{name} does not acknowledge {self.revision}: {machine.log()[-3000:]}"
            )

    def description(self, host: str) -> dict[str, Any]:
        ports = {id_: port for id_, (port_host, port) in self.ports.items() if port_host == host}
        routers = {
            id_: router
            for id_, (router_host, router) in self.routers.items()
            if router_host == host
        }
        used_networks = self.networks_of(host)
        networks = {
            id_: network
            | {
                "peers": [
                    machine.address
                    for name, machine in self.machines.items()
                    if name != host and id_ in self.networks_of(name)
                ]
            }
            for id_, network in self.networks.items()
            if id_ in used_networks
        }
        members: dict[str, list[str]] = {}
        for _, port in self.ports.values():
            for group in port["groups"]:
                members.setdefault(group, []).extend(
                    fixed_ip["address"] for fixed_ip in port["addresses"]
                )
        groups = {
            id_: group | {"members": members.get(id_, [])} for id_, group in self.groups.items()
        }
        return {
            "revision": self.revision,
            "host": host,
            "dns": ["1.1.1.1"],
            "networks": networks,
            "ports": ports,
            "groups": groups,
            "routers": routers,
        }

    def networks_of(self, host: str) -> set[str]:
        """Return the networks of a host."""
        networks = {port["network"] for port_host, port in self.ports.values() if port_host == host}
        for router_host, router in self.routers.values():
            if router_host == host:
                networks |= {leg["network"] for leg in router["interfaces"]}
                networks |= {router["external"]["network"]} if router["external"] else set()
        if self.machines[host].gateway:
            networks |= {id_ for id_, network in self.networks.items() if network["external"]}
        return networks

    def reset(self) -> None:
        """Remove all wanted state and guests for the next test."""
        for guest in self.guests:
            run("ip", "netns", "del", guest.space, check=False)
        for thing in (self.networks, self.ports, self.groups, self.routers, self.guests):
            thing.clear()
        self.publish()


def mac() -> str:
    return "fa:16:3e:" + ":".join(f"{byte:02x}" for byte in os.urandom(3))


def rule(direction: str, version: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "direction": direction,
        "version": version,
        "protocol": None,
        "port_min": None,
        "port_max": None,
        "remote_prefix": None,
        "remote_group": None,
        **more,
    }


# fmt: off
NEEDED = ("ip", "nft", "dnsmasq", "dhcp_release", "conntrack", "nsenter", "busybox", "ping", "tcpdump", "ss")
# fmt: on


def demand_networks() -> None:
    """Skip the test where network labs cannot work, or fail where they must."""
    demand(*FOR_HOSTS, programs=NEEDED)


@pytest.fixture(scope="session")
def network_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    demand_networks()
    lab = Lab(Service(), tmp_path_factory.mktemp("network"))
    try:
        lab.build(["x1", "x2"])
        yield lab
    finally:
        lab.tear_down()


@pytest.fixture
def lab(network_hosts: Lab) -> Iterator[Lab]:
    yield network_hosts
    network_hosts.reset()


@contextlib.contextmanager
def capture(guest: Guest, expression: str, folder: Path) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the frames that arrived at the guest, as tcpdump lines."""
    out = folder / f"{guest.space}.dump"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                guest.space,
                "tcpdump",
                "--immediate-mode",
                "-l",
                "-n",
                "-e",
                "-p",
                "-i",
                "eth0",
                "-Q",
                "in",
                *expression.split(),
            ],
            stdout=file,
            stderr=subprocess.PIPE,
        )
    assert process.stderr is not None
    while b"listening on" not in (line := process.stderr.readline()):
        assert line, "tcpdump ended"

    def read_capture() -> str:
        return out.read_text(errors="replace")

    try:
        yield read_capture
    finally:
        process.terminate()
        process.wait(5)
        process.stderr.close()
