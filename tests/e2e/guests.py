# SPDX-License-Identifier: Apache-2.0
"""Real guests that tests reach by ``ssh`` with a key, through a floating address.

``orphans`` returns leftovers of networks in the kernel and in the network service. A ``Witness`` is
a guest that writes a canary to its new disk at the first boot, and counts in memory since the last
boot. ``listener`` measures from outside how long a guest does not answer. Every wait has a limit.
"""

from __future__ import annotations

import base64
import re
import signal
import socket
import subprocess
import uuid
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from deploy.one_machine.connectivity import KEY, PRIVATE, PUBLIC, QUICK, SSH
from deploy.one_machine.services.network.host.names import Names
from tests.contract.virt_rigs import IN_TURNS
from tests.e2e.live import BOOT, SETTLE, Live, Rest
from tests.waiting import await_true

#: Seconds until a change of rules or addresses is applied on a host, and seconds after which a peer
#: counts as silent.
SOON, SILENCE = 15, 2
#: Seconds that a busy guest may be silent, and seconds for which failed ssh logins are repeated.
PATIENT, AGAIN = 10, 30
#: Text that ssh prints after the login and before the command.
IN = "Authenticated to "
TAP = re.compile(r"\btap[0-9a-f]{8}-[0-9a-f]{2}\b")


def clear(rest: Rest, keep: Container[str] = ()) -> None:
    """Delete the user's servers except those in ``keep``, and wait until they are gone."""
    servers = [server["id"] for server in rest.servers() if server["id"] not in keep]
    for server in servers:
        rest.insist("DELETE", f"/servers/{server}", expected=(204, 404))
    for server in servers:
        rest.await_gone(server)


@dataclass(frozen=True)
class LiveServer:
    """A server of demo, whose name is also the guest's host name."""

    live: Live
    server: str
    name: str

    @property
    def rest(self) -> Rest:
        return self.live.rest()

    def interfaces(self) -> dict[str, dict[str, Any]]:
        """Return the guest's interfaces from the API, by port."""
        interfaces = self.rest.call("GET", f"/servers/{self.server}/os-interface").body[
            "interfaceAttachments"
        ]
        return {interface["port_id"]: interface for interface in interfaces}

    def host(self) -> int:
        """Return the number of the guest's host, counted from 1."""
        shown = self.live.rest("kilonova-admin").server(self.server)
        return self.live.cloud.hosts.index(shown["OS-EXT-SRV-ATTR:host"]) + 1

    def fixed_address(self) -> str:
        """Return the fixed address on the shared network."""
        [entry] = [
            address["addr"]
            for address in self.rest.server(self.server)["addresses"][PRIVATE]
            if address["OS-EXT-IPS:type"] == "fixed"
        ]
        return str(entry)

    def remove(self) -> None:
        """Delete the server, and wait until nothing is left of it."""
        self.rest.insist("DELETE", f"/servers/{self.server}", expected=(204, 404))
        self.rest.await_gone(self.server)
        self.live.await_removed(self.server, SETTLE)


@dataclass(frozen=True)
class Guest(LiveServer):
    """A guest with a floating address. Commands run in the guest as ``user``."""

    floating: str
    user: str = "root"

    def ssh(
        self, command: str, seconds: float = 30, stdin: bytes = b"", patience: int = 3
    ) -> subprocess.CompletedProcess[str]:
        """Try once to run a command, and return the result.

        The status is 255 if ssh itself fails or if the command exceeds the time limit.

        Args:
            command: Command for the guest's shell.
            seconds: Time limit of the command.
            stdin: Standard input of the command.
            patience: Seconds until the guest must answer, and the interval of keepalive messages.
                The connection ends after three unanswered messages.
        """
        line = [
            "ssh",
            "-i",
            str(self.live.home / "ssh" / KEY),
            "-o",
            f"ConnectTimeout={patience}",
            "-o",
            f"ServerAliveInterval={patience}",
            "-o",
            "LogLevel=VERBOSE",
            *SSH,
            *QUICK,
            f"{self.user}@{self.floating}",
            command,
        ]
        try:
            result = subprocess.run(
                line, input=stdin, capture_output=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired as late:
            return subprocess.CompletedProcess(
                line,
                255,
                "",
                f"{(late.stderr or b'').decode(errors='replace')}not within {late.timeout} s",
            )
        return subprocess.CompletedProcess(
            line,
            result.returncode,
            result.stdout.decode(errors="replace"),
            result.stderr.decode(errors="replace"),
        )

    def insist(
        self, command: str, seconds: float = 60, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command exactly once and return the result. Only failed logins are repeated."""
        last: list[subprocess.CompletedProcess[str]] = []

        def try_login() -> bool:
            last[:] = [self.ssh(command, seconds, stdin, PATIENT)]
            return last[0].returncode != 255 or IN in last[0].stderr

        await_true(try_login, AGAIN, lambda: f"{self.name}: {command}: {last}", pause=0.5)
        assert last[0].returncode != 255, f"{self.name}: {command}: {last}"
        return last[0]

    def run(self, command: str, stdin: bytes = b"") -> str:
        """Run a command that must succeed, and return its output."""
        result = self.insist(command, stdin=stdin)
        assert result.returncode == 0, (
            f"{self.name}: {command}: {result.returncode} {result.stdout} {result.stderr}"
        )
        return result.stdout

    def can_run(self, command: str) -> bool:
        """Return True if the command succeeds. A failure of ssh fails the test."""
        return self.insist(command).returncode == 0

    def reaches(self, address: str, *options: str) -> bool:
        """Return True if the address answers one of three pings from the guest."""
        return self.can_run(
            f"ping -c 3 -i 0.3 -W {SILENCE} {' '.join(options)} {address} | grep -q ' bytes from '"
        )

    def await_ssh(self, seconds: float = BOOT, patience: int = 3) -> Guest:
        """Wait until ssh to the guest returns the guest's host name, and return the guest."""

        def read_hostname() -> subprocess.CompletedProcess[str]:
            return self.ssh("hostname", 3 * patience + 1, patience=patience)

        await_true(
            lambda: read_hostname().stdout.strip() == self.name,
            seconds,
            lambda: (
                f"{self.name}: {read_hostname()}\n"
                f"{self.live.rest('kilonova-admin').console(self.server)[-2000:]}"
            ),
            pause=0.3,
        )
        return self

    def mac(self) -> str:
        """Return the MAC address of the first interface, read in the guest."""
        return self.run("cat /sys/class/net/eth0/address").strip()

    def remove(self) -> None:
        """Delete the server and its floating address, and wait until nothing is left."""
        network = self.live.seed.demo.network
        for address in network.ips(floating_ip_address=self.floating):
            network.delete_ip(address)
        super().remove()


def give_address(live: Live, server: str) -> str:
    """Create a floating address for the first port of a server of demo, and return the address."""
    network = live.seed.demo.network
    [port, *_] = network.ports(device_id=server)
    public = next(iter(network.networks(name=PUBLIC)))
    return str(
        network.create_ip(floating_network_id=public.id, port_id=port.id).floating_ip_address
    )


def probe_port(address: str, port: int) -> str:
    """Try a TCP connection from outside the cloud's networks.

    Returns:
        "open" if the connection succeeds, "reached" if the guest refuses the connection, "shut" if
        there is no answer.
    """
    try:
        socket.create_connection((address, port), timeout=SILENCE).close()
    except ConnectionRefusedError:
        return "reached"
    except TimeoutError:
        return "shut"
    return "open"


def make(live: Live, name: str, **more: Any) -> Guest:
    """Create a guest of demo on the shared network, with the key pair and a floating address.

    The function waits for the status ACTIVE, but not for the boot. ``more`` has further fields of
    the create request.
    """
    server = create_server(live, name, **{"key_name": KEY, **more})
    return Guest(live, server, name, give_address(live, server))


def create_server(live: Live, name: str, **more: Any) -> str:
    """Create a server of demo on the shared network, wait for ACTIVE, and return the id."""
    rest = live.rest()
    network = next(iter(live.seed.demo.network.networks(name=PRIVATE)))
    fields = {
        "image": live.image(),
        "flavor": live.flavor(),
        "networks": [{"uuid": network.id}],
        **more,
    }
    server = rest.create(name=name, **fields)
    rest.await_status(server, "ACTIVE")
    return server


#: The user data of a witness. The script writes behind the image's partition of the disk: "canary"
#: at 64 MiB, 4 MiB of noise at 65 MiB, and once a second the count at 72 MiB. Each boot gives the
#: count a new name. The loop starts few processes, because an emulated guest starts them slowly.
TESTIMONY = """#!/bin/sh
disk=/dev/vda
if [ "$(dd if=$disk bs=1M skip=64 count=1 2> /dev/null | head -c 6)" != canary ]; then
    dd if=/dev/urandom of=$disk bs=1M seek=65 count=4 conv=notrunc,fsync 2> /dev/null
    echo canary | dd of=$disk bs=1M seek=64 conv=notrunc,fsync 2> /dev/null
fi
(
    run=$(cat /proc/sys/kernel/random/uuid)
    count=0
    mkfifo /run/ticks
    exec 3<> /run/ticks
    while :; do
        count=$((count + 1))
        # One write of the same length each time, so that a reader never sees a part of it.
        printf '%s %08d\n' "$run" $count 1<> /run/count
        if [ $((count % 5)) = 1 ]; then
            dd of=$disk bs=1M seek=72 conv=notrunc,fsync < /run/count 2> /dev/null
            echo "kilonova tiny guest: counts $count of $run"
        fi
        read -t 0.2 never <&3
    done
) < /dev/null > /dev/console 2>&1 &
"""
#: The user data of a witness that migrates while it runs.
MIGRATING_TESTIMONY = f"{TESTIMONY}{IN_TURNS}\n"


@dataclass(frozen=True)
class WitnessState:
    """The state of a witness.

    Attributes:
        canary: Digest of the noise on the disk.
        run: Name of the count since the last boot.
        count: The count in memory.
        written: Name and count on the disk.
    """

    canary: str
    run: str
    count: int
    written: tuple[str, int]


@dataclass(frozen=True)
class Witness(Guest):
    """A guest that runs ``TESTIMONY``."""

    def read_state(self) -> WitnessState:
        """Wait until the witness counts, and return its state."""
        await_true(
            lambda: self.can_run("test -s /run/count"),
            BOOT,
            lambda: self.rest.console(self.server)[-2000:],
        )
        canary, memory, disk = self.run_lines(
            "dd if=/dev/vda bs=1M skip=65 count=4 2> /dev/null | sha256sum; cat /run/count; "
            "dd if=/dev/vda bs=1M skip=72 count=1 iflag=direct 2> /dev/null | head -n 1",
            3,
        )
        run, count = memory.split()
        written = disk.split()
        return WitnessState(canary.split()[0], run, int(count), (written[0], int(written[1])))

    def run_lines(self, command: str, lines: int) -> list[str]:
        """Run a command, check the number of lines of the output, and return the lines."""
        output = self.run(command).splitlines()
        assert len(output) == lines, output
        return output


@contextmanager
def witness(
    live: Live, name: str, host: str | None = None, migrates: bool = False, **more: Any
) -> Iterator[Witness]:
    """Create a witness for the block, on ``host`` if given, and wait until it counts.

    ``migrates`` is True if the witness migrates while it runs, which needs a load in the guest.
    ``more`` has further fields of the create request.
    """
    user_data = MIGRATING_TESTIMONY if migrates else TESTIMONY
    with live.only(live.cloud.hosts.index(host) + 1) if host else nullcontext():
        new_guest = make(
            live,
            f"{name}-{uuid.uuid4().hex[:6]}",
            user_data=base64.b64encode(user_data.encode()).decode(),
            **more,
        )
    new_witness = Witness(live, new_guest.server, new_guest.name, new_guest.floating)
    try:
        new_witness.await_ssh()
        new_witness.read_state()
        yield new_witness
    finally:
        new_witness.remove()


@dataclass
class PingReplies:
    """Times of a guest's ping replies, in seconds since 1970 by this machine's clock.

    ``longest`` is the longest time between two replies.
    """

    answers: list[float]

    @property
    def longest(self) -> float:
        return max(
            (after - before for before, after in pairwise(self.answers)), default=float("inf")
        )


@contextmanager
def listener(guest: Guest, pause: float = 0.05) -> Iterator[PingReplies]:
    """Ping a guest's floating address during the block. ``answers`` are available afterwards."""
    replies = PingReplies([])
    ping = subprocess.Popen(
        ["ping", "-D", "-n", "-i", str(pause), guest.floating],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield replies
    finally:
        ping.send_signal(signal.SIGINT)
        output, _ = ping.communicate(timeout=30)
        replies.answers += [
            float(moment)
            for moment in re.findall(r"^\[(\d+\.\d+)\] \d+ bytes from", output, re.MULTILINE)
        ]


@contextmanager
def guest(live: Live, name: str, **more: Any) -> Iterator[Guest]:
    """Create a guest for the block, and wait for ssh."""
    new_guest = make(live, f"{name}-{uuid.uuid4().hex[:6]}", **more)
    try:
        yield new_guest.await_ssh()
    finally:
        new_guest.remove()


def orphans(live: Live) -> list[str]:
    """Return network leftovers.

    These are ports of deleted servers, and devices, rules, DHCP reservations and leases of deleted
    ports.
    """
    servers = {row[0] for row in live.rows("SELECT id FROM servers WHERE deleted = 0")}
    ports = list(live.seed.admin.network.ports())
    devices, macs = {f"tap{port.id[:11]}" for port in ports}, {port.mac_address for port in ports}
    leftovers = [
        f"port {port.id} of server {port.device_id}"
        for port in ports
        if (port.device_owner or "").startswith("compute:") and port.device_id not in servers
    ]
    for number in range(0 if live.cloud.apart else 1, len(live.cloud.hosts) + 1):
        names = Names.of(live.cloud.network_folder(number))
        unknown = sorted(taps(live, number, names) - devices)
        leftovers += [f"host {number}: device or rule of {device}" for device in unknown]
        for kind in ("hosts", "leases"):
            text = "".join(read(path) for path in names.runtime.glob(f"*.{kind}"))
            leftovers += [
                f"host {number}: {mac} in {kind}"
                for mac in sorted(set(re.findall(r"\bfa:16:3e(?::[0-9a-f]{2}){3}\b", text)) - macs)
            ]
    return leftovers


def taps(live: Live, number: int, names: Names) -> set[str]:
    """Return the tap devices that exist on a host or have rules there.

    Devices of other clouds in the same network namespace are left out.
    """
    mentioned = defaultdict(set)
    table = ""
    for line in kernel(live, number, "nft", "list", "ruleset").splitlines():
        if line.startswith("table "):
            table = line.split()[2]
        mentioned[table].update(TAP.findall(line))
    ours = mentioned.pop(names.table, set())
    present = set(TAP.findall(kernel(live, number, "ip", "-o", "link")))
    return ours | (present - set().union(*mentioned.values()))


def read(path: Path) -> str:
    """Return the text of a file, or "" if the file does not exist any more."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def kernel(live: Live, number: int, *command: str) -> str:
    """Run a command in a host's network namespace and return the output."""
    return subprocess.run(
        [*namespace_prefix(live, number), *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout


def namespace_prefix(live: Live, number: int) -> list[str]:
    """Return the words before a command that run the command in a host's network namespace."""
    namespace = live.cloud.underlay.namespace(number)
    return ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []
