# SPDX-License-Identifier: Apache-2.0
"""Ethernet frames as a forger makes them, each with a mark by which it is found again on the wire.

``send`` lets a guest say them; ``Watch`` sees what comes out of a host at a guest's device.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from tests.e2e.guests import Guest, entered
from tests.waiting import await_true

BROADCAST = b"\xff" * 6
TOOL, SOURCE = "/tmp/send_frames", Path(__file__).with_name("send_frames.c")


def mac_of(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def mark() -> bytes:
    """Printable, and nowhere else."""
    return uuid.uuid4().hex.encode()


def checksum(data: bytes) -> int:
    """Of the internet protocols."""
    total = sum(
        struct.unpack(f"!{len(data + bytes(len(data) % 2)) // 2}H", data + bytes(len(data) % 2))
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def udp(source: tuple[bytes, str, int], target: tuple[bytes, str, int], payload: bytes) -> bytes:
    """A datagram in a frame; each side is (MAC, address, port). Without the checksum of UDP, which
    is allowed."""
    (source_mac, source_ip, source_port), (target_mac, target_ip, target_port) = source, target
    datagram = struct.pack("!4H", source_port, target_port, 8 + len(payload), 0) + payload
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        20 + len(datagram),
        1,
        0,
        64,
        17,
        0,
        IPv4Address(source_ip).packed,
        IPv4Address(target_ip).packed,
    )
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return target_mac + source_mac + b"\x08\x00" + head + datagram


def arp_answer(
    frame_mac: bytes, claimed_mac: bytes, claimed_ip: str, target: tuple[bytes, str], payload: bytes
) -> bytes:
    """ "This address is mine"; what follows an ARP message in its frame is padding, which holds the
    mark."""
    target_mac, target_ip = target
    said = struct.pack(
        "!HHBBH6s4s6s4s",
        1,
        0x0800,
        6,
        4,
        2,
        claimed_mac,
        IPv4Address(claimed_ip).packed,
        target_mac,
        IPv4Address(target_ip).packed,
    )
    return target_mac + frame_mac + b"\x08\x06" + said + payload


def router_advertisement(mac: bytes, payload: bytes) -> bytes:
    """ "I am your router for IPv6", to all nodes; the mark is in an option that nobody knows."""
    own = IPv6Address(b"\xfe\x80" + bytes(6) + bytes([mac[0] ^ 2, *mac[1:3], 0xFF, 0xFE, *mac[3:]]))
    everybody = IPv6Address("ff02::1")
    option = bytes([253, 5]) + payload.ljust(38, b"\0")
    said = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + option
    pseudo = own.packed + everybody.packed + struct.pack("!II", len(said), 58)
    said = said[:2] + struct.pack("!H", checksum(pseudo + said)) + said[4:]
    head = struct.pack("!IHBB", 0x60000000, len(said), 58, 255) + own.packed + everybody.packed
    return b"\x33\x33\x00\x00\x00\x01" + mac + b"\x86\xdd" + head + said


def send(guest: Guest, device: str, frames: Iterable[bytes]) -> None:
    """Let the guest say these frames, by a program that is built here and brought there."""
    if guest.ssh(f"test -x {TOOL}").returncode != 0:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "send_frames"
            subprocess.run(["gcc", "-static", "-O1", "-Wall", "-o", built, SOURCE], check=True)
            guest.run(f"cat > {TOOL} && chmod 755 {TOOL}", given=built.read_bytes())
    guest.run(
        f"{TOOL} {device}",
        given=b"".join(struct.pack("!H", len(frame)) + frame for frame in frames),
    )


class Watch:
    """What a host has given to a device so far."""

    def __init__(self, seen: Path) -> None:
        self._seen = seen

    def has(self, marked: bytes) -> bool:
        return marked in self._seen.read_bytes()


@contextmanager
def watching(guest: Guest) -> Iterator[Watch]:
    """See what comes to the guest's first interface, on its host."""
    device = f"tap{next(iter(guest.interfaces()))[:11]}"
    with tempfile.TemporaryDirectory() as folder:
        seen, told = Path(folder) / "seen", Path(folder) / "told"
        with told.open("wb") as err:
            watcher = subprocess.Popen(
                [
                    *entered(guest.live, guest.host()),
                    "tcpdump",
                    "-i",
                    device,
                    "-Q",
                    "out",
                    "-U",
                    "-Z",
                    "root",
                    "-w",
                    str(seen),
                ],
                stderr=err,
                stdin=subprocess.DEVNULL,
            )
        try:
            await_true(lambda: b"listening on" in told.read_bytes(), 10, lambda: told.read_bytes())
            yield Watch(seen)
        finally:
            watcher.terminate()
            watcher.wait(10)
