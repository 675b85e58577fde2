# SPDX-License-Identifier: Apache-2.0
"""How long clients may take, how many connections there may be, and what they may make a process hold."""
from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process.

    Seconds: head: from connecting, or from a request's first byte, until its head is here. patience: for a body or an
    answer, beside a second for each ``rate`` bytes of it. idle: between two requests.
    Counts: connections, and of one address ``each`` (of IPv6: of one /64); bodies that stream at a time.
    Bytes: body: what is waited for before a thread begins; held: what all clients together may make us keep.
    """

    head: float = 10
    patience: float = 10
    idle: float = 75
    rate: int = 16 * 1024
    connections: int = 4000
    each: int = 500
    streams: int = 0
    body: int = 1024 * 1024
    held: int = 128 * 1024 * 1024


def origin(peer: Any) -> str:
    """What counts as one address: the network of an IPv6 address, for who has one has all of it."""
    host = peer[0] if isinstance(peer, tuple) else str(peer)
    if ":" not in host:
        return str(host)
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)
