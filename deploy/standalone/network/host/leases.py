# SPDX-License-Identifier: Apache-2.0
"""dnsmasq's leases: which are of ports that are no more, and how it is made to forget one.

dnsmasq keeps a lease until it runs out, whatever its reservations say. It forgets a lease of IPv4 at once when the
guest gives it back, and anybody in its namespace can say so in the guest's place: no other guest notices. One of
IPv6 carries no MAC and is struck from the file, which takes a restart. Pure: servers.py reads, sends and restarts.
"""
from __future__ import annotations

import re
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

SERVER_PORT = 67
MAGIC, END = bytes((99, 130, 83, 99)), b"\xff"
IS_RELEASE, SERVER, CLIENT = b"\x35\x01\x07", 54, 61
ETHERNET, LONGEST_MAC = 1, 16
#: expiry, [kind of device-]MAC or the guest's number of IPv6, address, name, what the client calls itself
LINE = re.compile(r"\d+ (?:([0-9a-f]{2})-)?(\S+) ([0-9a-f.:]+) \S+ (\S+)")
BYTES = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2})*")


@dataclass(frozen=True, slots=True)
class Lease:
    """One line of the file. ``mac`` is "" where none is written; ``kind`` is that of the device (1: Ethernet)."""

    line: str
    address: str
    mac: str
    kind: int
    client: bytes


def lease(line: str) -> Lease | None:
    """A line of the file; None for one that is no lease."""
    found = LINE.fullmatch(line)
    if found is None:
        return None
    kind, who, address, client = found.groups()
    return Lease(line, address, who if ":" not in address and BYTES.fullmatch(who) else "",
                 int(kind, 16) if kind else ETHERNET, _bytes(client) if BYTES.fullmatch(client) else b"")


def stale(lines: list[str], owners: Mapping[str, str], moved: Container[str]) -> list[Lease]:
    """Leases that nobody may have: ``owners`` are address -> MAC, ``moved`` the addresses that have another owner."""
    found = [one for one in map(lease, lines) if one is not None]
    return [one for one in found if one.address not in owners or one.address in moved
            or ("." in one.address and one.mac != owners[one.address])]


def moved(hosts: str, owners: Mapping[str, str]) -> set[str]:
    """The addresses of a hosts file that belong to another MAC now."""
    lines = [line.split(",") for line in hosts.splitlines()]
    pairs = [(word.strip("[]"), words[0]) for words in lines for word in words[2:-1]]
    return {address for address, mac in pairs if owners.get(address, mac) != mac}


def release(given: Lease, server: IPv4Address) -> bytes:
    """What the guest would send to give its lease of IPv4 back to this server."""
    own = _bytes(given.mac)[:LONGEST_MAC]
    head = struct.pack("!4B2I4s12x16s192x", 1, given.kind, len(own), 0, 0, 0, IPv4Address(given.address).packed, own)
    client = bytes((CLIENT, len(given.client))) + given.client if given.client else b""
    return head + MAGIC + IS_RELEASE + bytes((SERVER, 4)) + server.packed + client + END


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
