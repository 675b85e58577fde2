# SPDX-License-Identifier: Apache-2.0
"""Forged Ethernet frames, each with a unique mark by which a test recognises the frame.

``send`` sends frames from a guest. ``watching`` captures the frames that a host sends to a guest.
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

from tests.e2e.guests import Guest, namespace_prefix
from tests.waiting import await_true

BROADCAST = b"\xff" * 6
TOOL, SOURCE = "/tmp/send_frames", Path(__file__).with_name("send_frames.c")


def mac_of(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def mark() -> bytes:
    """Return a new unique mark in printable bytes."""
    return uuid.uuid4().hex.encode()


def checksum(data: bytes) -> int:
    """Return the checksum of the internet protocols (RFC 1071)."""
    total = sum(
        struct.unpack(f"!{len(data + bytes(len(data) % 2)) // 2}H", data + bytes(len(data) % 2))
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def udp(source: tuple[bytes, str, int], target: tuple[bytes, str, int], payload: bytes) -> bytes:
    """Return a frame with a UDP datagram. Each side is (MAC, address, port).

    The checksum of UDP is 0, which IPv4 allows.
    """
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
    """Return an ARP reply that claims an address. The padding after the message is the mark."""
    target_mac, target_ip = target
    message = struct.pack(
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
    return target_mac + frame_mac + b"\x08\x06" + message + payload


def router_advertisement(mac: bytes, payload: bytes) -> bytes:
    """Return an IPv6 router advertisement to all nodes. The mark is in an experimental option."""
    own = IPv6Address(b"\xfe\x80" + bytes(6) + bytes([mac[0] ^ 2, *mac[1:3], 0xFF, 0xFE, *mac[3:]]))
    all_nodes = IPv6Address("ff02::1")
    option = bytes([253, 5]) + payload.ljust(38, b"\0")
    message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + option
    pseudo = own.packed + all_nodes.packed + struct.pack("!II", len(message), 58)
    message = message[:2] + struct.pack("!H", checksum(pseudo + message)) + message[4:]
    head = struct.pack("!IHBB", 0x60000000, len(message), 58, 255) + own.packed + all_nodes.packed
    return b"\x33\x33\x00\x00\x00\x01" + mac + b"\x86\xdd" + head + message


def send(guest: Guest, device: str, frames: Iterable[bytes]) -> None:
    """Send frames from the guest, with a program that is compiled here and copied to the guest."""
    if guest.ssh(f"test -x {TOOL}").returncode != 0:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "send_frames"
            subprocess.run(["gcc", "-static", "-O1", "-Wall", "-o", program, SOURCE], check=True)
            guest.run(f"cat > {TOOL} && chmod 755 {TOOL}", stdin=program.read_bytes())
    guest.run(
        f"{TOOL} {device}",
        stdin=b"".join(struct.pack("!H", len(frame)) + frame for frame in frames),
    )


class Watch:
    """The captured frames to a guest's device so far."""

    def __init__(self, capture: Path) -> None:
        self._capture = capture

    def has(self, mark: bytes) -> bool:
        return mark in self._capture.read_bytes()


@contextmanager
def watching(guest: Guest) -> Iterator[Watch]:
    """Capture the frames to the guest's first interface on its host with tcpdump."""
    device = f"tap{next(iter(guest.interfaces()))[:11]}"
    with tempfile.TemporaryDirectory() as folder:
        capture, messages = Path(folder) / "seen", Path(folder) / "told"
        with messages.open("wb") as err:
            watcher = subprocess.Popen(
                [
                    *namespace_prefix(guest.live, guest.host()),
                    "tcpdump",
                    "-i",
                    device,
                    "-Q",
                    "out",
                    "-U",
                    "-Z",
                    "root",
                    "-w",
                    str(capture),
                ],
                stderr=err,
                stdin=subprocess.DEVNULL,
            )
        try:
            await_true(
                lambda: b"listening on" in messages.read_bytes(), 10, lambda: messages.read_bytes()
            )
            yield Watch(capture)
        finally:
            watcher.terminate()
            watcher.wait(10)
