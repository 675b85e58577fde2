# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine for the network's host part: real namespaces, a real kernel, guests that
are namespaces.

The lab plays the neighbours (network_neighbours.py) and holds the one truth of which it tells each
host its part. A guest's device on its host has a tap's name and joins the bridge as libvirt would
let it join.
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
    """A command, in a namespace."""
    where = ["ip", "netns", "exec", space] if space else []
    done = subprocess.run(
        [*where, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        input=text,
        timeout=seconds,
    )
    assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done


def await_true(question: Callable[[], object], story: str, seconds: float = 10) -> None:
    """Until the question is answered with something true."""
    waiting.await_true(question, seconds, story, pause=0.01)


def pings(space: str, address: str, wait: str = "0.5", *words: str) -> bool:
    """Is one packet answered within these seconds? In 5 of them the kernel asks three times who has
    the address."""
    return (
        run("ping", "-c", "1", "-W", wait, *words, address, space=space, check=False).returncode
        == 0
    )


def reaches(space: str, address: str, seconds: float = 10) -> bool:
    """Is a packet answered in the end? For first ones: a bridge forwards nothing until it knows of
    a new link."""
    return waiting.is_true_within(lambda: pings(space, address, "1"), seconds, pause=0.01)


@dataclass
class Guest:
    """A guest: its port and its namespace."""

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
        """What it was given, which it now has; "" when nobody answered. A try takes a second."""
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


def limited(capabilities: frozenset[str]) -> list[str]:
    """What stands before a command that shall have these capabilities and no other."""
    return [
        "setpriv",
        "--no-new-privs",
        "--inh-caps=-all",
        f"--bounding-set=-all{''.join(f',+{one}' for one in sorted(capabilities))}",
    ]


def of_unit() -> frozenset[str]:
    """The capabilities that the helper's unit gives it."""
    unit = (REPOSITORY / "deploy/systemd/kilonova-network-helper.service").read_text()
    [line] = [line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")]
    return frozenset(one.removeprefix("CAP_").lower() for one in line.partition("=")[2].split())


@dataclass
class Machine:
    """A host: its namespace and its host part."""

    lab: Lab
    name: str
    space: str
    folder: Path
    address: str
    gateway: bool = False
    process: subprocess.Popen[bytes] | None = None
    #: The capabilities of a helper that does what takes root, for a host part that has none; None:
    #: one process.
    apart: frozenset[str] | None = None
    helper: subprocess.Popen[bytes] | None = None

    def start(self, url: str = "") -> None:
        url = url or self.lab.service.url
        here = [sys.executable, "-m", "deploy.one_machine.services.network.host"]
        place = [
            "--tunnel-address",
            self.address,
            *(["--external-gateway"] if self.gateway else []),
        ]
        serving = [
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
        if self.apart is None:
            self.process = self._run([*here, *serving, *self.where()])
            return
        door = self.folder / "socket"
        self.helper = self._run(
            [
                *limited(self.apart),
                *here,
                "help",
                "--user",
                "root",
                "--socket",
                str(door),
                *place,
                *self.where(),
            ]
        )
        await_true(door.is_socket, "the helper does not listen")
        self.process = self._run([*limited(frozenset()), *here, *serving, "--helper", str(door)])

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def where(self) -> list[str]:
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
            sys.executable, "-m", "deploy.one_machine.services.network.host", "clean", *self.where()
        )

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def tag(self) -> str:
        return Names.of(self.folder / "state").tag

    def rules(self) -> list[str]:
        """All words of them: sets have no order."""
        return sorted(
            run("nft", "list", "ruleset", space=self.space).stdout.replace(",", " ").split()
        )


@dataclass
class Lab:
    """Everything, and the truth."""

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
    elsewhere: str = "192.168.99.254"  # on the wire, and no host

    def space(self, name: str) -> str:
        """The name of a namespace; several runs may go on at once."""
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
            machine.apart = of_unit() if name == "x2" else None
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
        """A network with one subnet and the DHCP port .2."""
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
        """A port and a guest that has it; told and acknowledged, plugged in."""
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
        self.tell()
        self.plug(guest)
        return guest

    def plug(self, guest: Guest) -> None:
        """As libvirt does: a device is made and joins the bridge at once."""
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
        """A group that allows everything."""
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

    def tell(self, wait: bool = True) -> None:
        """A new revision for every host."""
        self.revision += 1
        with self.service.changed:
            for name in self.machines:
                self.service.told[name] = self.description(name)
            self.service.changed.notify_all()
        if wait:
            self.await_acknowledged()

    def await_acknowledged(self) -> None:
        for name, machine in self.machines.items():
            with self.service.changed:
                done = self.service.changed.wait_for(
                    lambda name=name: (
                        self.service.acknowledged.get(name, {}).get("revision") == self.revision
                    ),
                    10,
                )
            assert done, f"{name} does not acknowledge {self.revision}: {machine.log()[-3000:]}"

    def description(self, host: str) -> dict[str, Any]:
        ports = {id_: port for id_, (where, port) in self.ports.items() if where == host}
        routers = {id_: router for id_, (where, router) in self.routers.items() if where == host}
        here = self.used(host)
        networks = {
            id_: network
            | {
                "peers": [
                    machine.address
                    for name, machine in self.machines.items()
                    if name != host and id_ in self.used(name)
                ]
            }
            for id_, network in self.networks.items()
            if id_ in here
        }
        members: dict[str, list[str]] = {}
        for _, port in self.ports.values():
            for group in port["groups"]:
                members.setdefault(group, []).extend(one["address"] for one in port["addresses"])
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

    def used(self, host: str) -> set[str]:
        """The networks of a host."""
        found = {port["network"] for where, port in self.ports.values() if where == host}
        for where, router in self.routers.values():
            if where == host:
                found |= {leg["network"] for leg in router["interfaces"]}
                found |= {router["external"]["network"]} if router["external"] else set()
        if self.machines[host].gateway:
            found |= {id_ for id_, network in self.networks.items() if network["external"]}
        return found

    def forget(self) -> None:
        """A new story: nothing is wanted any more."""
        for guest in self.guests:
            run("ip", "netns", "del", guest.space, check=False)
        for thing in (self.networks, self.ports, self.groups, self.routers, self.guests):
            thing.clear()
        self.tell()


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
    """Skip where this cannot work; fail where it must."""
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
    network_hosts.forget()


@contextlib.contextmanager
def captured(guest: Guest, what: str, folder: Path) -> Iterator[Callable[[], str]]:
    """Yields a function that says what arrived at the guest since, as tcpdump's lines."""
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
                *what.split(),
            ],
            stdout=file,
            stderr=subprocess.PIPE,
        )
    assert process.stderr is not None
    while b"listening on" not in (line := process.stderr.readline()):
        assert line, "tcpdump ended"

    def arrived() -> str:
        return out.read_text(errors="replace")

    try:
        yield arrived
    finally:
        process.terminate()
        process.wait(5)
        process.stderr.close()
