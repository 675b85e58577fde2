# SPDX-License-Identifier: Apache-2.0
"""Real guests as a person reaches them: by ``ssh`` with a key, through a floating address.

Every wait is bounded. ``orphans`` looks at what networks leave in the kernel and in the network
service. A ``Witness`` is a guest that can tell what became of it: it wrote a canary on its disk
when that was new, and counts in its memory since it booted. ``listener`` measures from outside how
long nobody heard a guest.
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

#: Seconds: what a change of rules or addresses may take to be true on a host; what a silent peer is
#: given.
SOON, SILENCE = 15, 2
#: Seconds that a busy guest may be silent, and for how long ssh is tried again that failed before
#: its command began.
PATIENT, AGAIN = 10, 30
#: What ssh says when it is in, which is before the command is sent.
IN = "Authenticated to "
TAP = re.compile(r"\btap[0-9a-f]{8}-[0-9a-f]{2}\b")


def clear(rest: Rest, keep: Container[str] = ()) -> None:
    """The user's servers go, but for these."""
    doomed = [server["id"] for server in rest.servers() if server["id"] not in keep]
    for server in doomed:
        rest.insist("DELETE", f"/servers/{server}", fine=(204, 404))
    for server in doomed:
        rest.await_gone(server)


@dataclass(frozen=True)
class Guest:
    """A guest with a floating address; commands run in it as its user."""

    live: Live
    server: str
    name: str
    floating: str
    user: str = "root"

    def ssh(
        self, command: str, seconds: float = 30, given: bytes = b"", patience: int = 3
    ) -> subprocess.CompletedProcess[str]:
        """Try once to run a command with this on its standard input, whatever becomes of it; 255 is
        what ssh itself says when it cannot, as it does soon where nobody is expected to answer.

        ``patience``: seconds until the guest must have said who it is; of so many it may later miss
        three in a row.
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
            done = subprocess.run(
                line, input=given, capture_output=True, check=False, timeout=seconds
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
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )

    def insist(
        self, command: str, seconds: float = 60, given: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command once, however it ends: ssh tries again only while the guest did not let it
        in."""
        last: list[subprocess.CompletedProcess[str]] = []

        def got_in() -> bool:
            last[:] = [self.ssh(command, seconds, given, PATIENT)]
            return last[0].returncode != 255 or IN in last[0].stderr

        await_true(got_in, AGAIN, lambda: f"{self.name}: {command}: {last}", pause=0.5)
        assert last[0].returncode != 255, f"{self.name}: {command}: {last}"
        return last[0]

    def run(self, command: str, given: bytes = b"") -> str:
        """What a command that must go well says."""
        done = self.insist(command, given=given)
        assert done.returncode == 0, (
            f"{self.name}: {command}: {done.returncode} {done.stdout} {done.stderr}"
        )
        return done.stdout

    def does(self, command: str) -> bool:
        """Does it go well? That ssh does not get there is no answer."""
        return self.insist(command).returncode == 0

    def reaches(self, address: str, *options: str) -> bool:
        """Does the address answer to one of three pings?"""
        return self.does(
            f"ping -c 3 -i 0.3 -W {SILENCE} {' '.join(options)} {address} | grep -q ' bytes from '"
        )

    def await_ssh(self, seconds: float = BOOT, patience: int = 3) -> Guest:
        """Until the guest lets the key in and says its name; each try has so much patience, and
        some for the login."""

        def asked() -> subprocess.CompletedProcess[str]:
            return self.ssh("hostname", 3 * patience + 1, patience=patience)

        await_true(
            lambda: asked().stdout.strip() == self.name,
            seconds,
            lambda: (
                f"{self.name}: {asked()}\n"
                f"{self.live.rest('kilonova-admin').console(self.server)[-2000:]}"
            ),
            pause=0.3,
        )
        return self

    @property
    def rest(self) -> Rest:
        return self.live.rest()

    def interfaces(self) -> dict[str, dict[str, Any]]:
        """Port -> what the API lists of it."""
        listed = self.rest.call("GET", f"/servers/{self.server}/os-interface").body[
            "interfaceAttachments"
        ]
        return {one["port_id"]: one for one in listed}

    def host(self) -> int:
        """Number of the host that it is on."""
        shown = self.live.rest("kilonova-admin").server(self.server)
        return self.live.cloud.hosts.index(shown["OS-EXT-SRV-ATTR:host"]) + 1

    def mac(self) -> str:
        """Of its first interface, in the guest's own words."""
        return self.run("cat /sys/class/net/eth0/address").strip()

    def fixed(self) -> str:
        """The address on the shared network."""
        [entry] = [
            one["addr"]
            for one in self.rest.server(self.server)["addresses"][PRIVATE]
            if one["OS-EXT-IPS:type"] == "fixed"
        ]
        return str(entry)


def give_address(live: Live, server: str) -> str:
    """A floating address for the first port of demo's server."""
    network = live.seed.demo.network
    [port, *_] = network.ports(device_id=server)
    public = next(iter(network.networks(name=PUBLIC)))
    return str(
        network.create_ip(floating_network_id=public.id, port_id=port.id).floating_ip_address
    )


def door(address: str, port: int) -> str:
    """What a TCP connection from outside meets: "open"; "reached", where the guest itself says no;
    or "shut"."""
    try:
        socket.create_connection((address, port), timeout=SILENCE).close()
    except ConnectionRefusedError:
        return "reached"
    except TimeoutError:
        return "shut"
    return "open"


def make(live: Live, name: str, **more: Any) -> Guest:
    """A guest of demo on the shared network, with the key pair and a floating address; nobody waits
    for its boot."""
    rest = live.rest()
    network = next(iter(live.seed.demo.network.networks(name=PRIVATE)))
    server = rest.create(
        image=live.image(),
        name=name,
        **{"flavor": live.flavor(), "networks": [{"uuid": network.id}], "key_name": KEY, **more},
    )
    rest.await_status(server, "ACTIVE")
    return Guest(live, server, name, give_address(live, server))


#: The first process of a witness. Its disk is used behind the image's partition: at 64 MiB is
#: "canary", at 65 MiB are 4 MiB of noise, at 72 MiB is what it had counted about a second ago. The
#: name of a count is new with each boot.
TESTIMONY = f"""#!/bin/sh
{IN_TURNS}
disk=/dev/vda
if [ "$(dd if=$disk bs=1M skip=64 count=1 2> /dev/null | head -c 6)" != canary ]; then
    dd if=/dev/urandom of=$disk bs=1M seek=65 count=4 conv=notrunc,fsync 2> /dev/null
    echo canary | dd of=$disk bs=1M seek=64 conv=notrunc,fsync 2> /dev/null
fi
(
    run=$(cat /proc/sys/kernel/random/uuid)
    count=0
    while :; do
        count=$((count + 1))
        echo "$run $count" > /run/counting
        mv /run/counting /run/count
        if [ $((count % 10)) = 1 ]; then
            cat /run/count | dd of=$disk bs=1M seek=72 conv=notrunc,fsync 2> /dev/null
            echo "kilonova tiny guest: counts $count of $run"
        fi
        usleep 100000
    done
) < /dev/null > /dev/console 2>&1 &
""".encode()


@dataclass(frozen=True)
class Account:
    """What a witness says: the digest of its canary, the name of its count and how far it is, in
    memory and on disk."""

    canary: str
    run: str
    count: int
    written: tuple[str, int]


@dataclass(frozen=True)
class Witness(Guest):
    """A guest that runs ``TESTIMONY``."""

    def account(self) -> Account:
        """All that it can tell, once it counts."""
        await_true(
            lambda: self.does("test -e /run/count"),
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
        return Account(canary.split()[0], run, int(count), (written[0], int(written[1])))

    def run_lines(self, command: str, lines: int) -> list[str]:
        """What a command says in so many lines."""
        said = self.run(command).splitlines()
        assert len(said) == lines, said
        return said


@contextmanager
def witness(live: Live, name: str, host: str | None = None, **more: Any) -> Iterator[Witness]:
    """A witness for the block, which begins on this host; it counts when the block begins."""
    with live.only(live.cloud.hosts.index(host) + 1) if host else nullcontext():
        made = make(
            live,
            f"{name}-{uuid.uuid4().hex[:6]}",
            user_data=base64.b64encode(TESTIMONY).decode(),
            **more,
        )
    found = Witness(live, made.server, made.name, made.floating)
    try:
        found.await_ssh()
        found.account()
        yield found
    finally:
        remove(found)


@dataclass
class Heard:
    """When a guest answered, by this machine's clock in seconds; ``longest`` is the longest
    silence."""

    answers: list[float]

    @property
    def longest(self) -> float:
        return max(
            (after - before for before, after in pairwise(self.answers)), default=float("inf")
        )


@contextmanager
def listener(guest: Guest, pause: float = 0.05) -> Iterator[Heard]:
    """Ping a guest's floating address all the time; when the block is over, ``answers`` are
    known."""
    heard = Heard([])
    ping = subprocess.Popen(
        ["ping", "-D", "-n", "-i", str(pause), guest.floating],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield heard
    finally:
        ping.send_signal(signal.SIGINT)
        said, _ = ping.communicate(timeout=30)
        heard.answers += [
            float(found)
            for found in re.findall(r"^\[(\d+\.\d+)\] \d+ bytes from", said, re.MULTILINE)
        ]


def remove(guest: Guest) -> None:
    """Guest and floating address go, and nothing of them stays."""
    network = guest.live.seed.demo.network
    for found in network.ips(floating_ip_address=guest.floating):
        network.delete_ip(found)
    guest.rest.insist("DELETE", f"/servers/{guest.server}", fine=(204, 404))
    guest.rest.await_gone(guest.server)
    guest.live.await_nothing_of(guest.server, SETTLE)


@contextmanager
def guest(live: Live, name: str, **more: Any) -> Iterator[Guest]:
    """A guest for the block, which is reached when it begins."""
    made = make(live, f"{name}-{uuid.uuid4().hex[:6]}", **more)
    try:
        yield made.await_ssh()
    finally:
        remove(made)


def orphans(live: Live) -> list[str]:
    """Ports of servers that are no more; devices, rules, reservations and leases of ports that are
    no more."""
    servers = {row[0] for row in live.rows("SELECT id FROM servers WHERE deleted = 0")}
    ports = list(live.seed.admin.network.ports())
    devices, macs = {f"tap{port.id[:11]}" for port in ports}, {port.mac_address for port in ports}
    found = [
        f"port {port.id} of server {port.device_id}"
        for port in ports
        if (port.device_owner or "").startswith("compute:") and port.device_id not in servers
    ]
    for number in range(0 if live.cloud.apart else 1, len(live.cloud.hosts) + 1):
        names = Names.of(live.cloud.network_folder(number))
        left = sorted(taps(live, number, names) - devices)
        found += [f"host {number}: device or rule of {device}" for device in left]
        for kind in ("hosts", "leases"):
            written = "".join(read(path) for path in names.runtime.glob(f"*.{kind}"))
            found += [
                f"host {number}: {mac} in {kind}"
                for mac in sorted(
                    set(re.findall(r"\bfa:16:3e(?::[0-9a-f]{2}){3}\b", written)) - macs
                )
            ]
    return found


def taps(live: Live, number: int, names: Names) -> set[str]:
    """Guests' devices that a host has, or has rules for; without those of another cloud, whose host
    may have the same network namespace."""
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
    """A file's text; of one that has just been removed, none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def kernel(live: Live, number: int, *command: str) -> str:
    """What a command says in a host's network namespace."""
    return subprocess.run(
        [*entered(live, number), *command], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def entered(live: Live, number: int) -> list[str]:
    """What stands before a command so that it runs in a host's network namespace."""
    namespace = live.cloud.underlay.namespace(number)
    return ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []
