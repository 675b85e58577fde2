# SPDX-License-Identifier: Apache-2.0
"""Connections to a listener whose other side has not yet proved who it is.

There are at most so many at a time. One more takes the place of the oldest of the address that has
the most of them, so that silent connections keep nobody else out. Used by the listeners of agents
and of the console service.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

log = logging.getLogger(__name__)
Connection = TypeVar("Connection")


class Unproved:
    """The unproved connections of one listener, at most ``most``. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._lock, self._numbers = most, threading.Lock(), itertools.count()
        # A copy of the descriptor: TLS takes the original one away.
        self._open: dict[int, tuple[socket.socket, str]] = {}

    def add(self, connection: socket.socket, peer: object) -> int:
        """Add a connection, and end another one if there are too many.

        Args:
            peer: what accept() says of the other side.

        Returns:
            the number to remove it by.
        """
        copy = connection.dup()
        with self._lock:
            shed = None
            if len(self._open) >= self._most:
                late = to_shed(self._open, {one: at for one, (_, at) in self._open.items()})
                shed, _ = self._open.pop(late)
            number = next(self._numbers)
            self._open[number] = copy, origin(peer)
        if shed is not None:
            _end(shed)
        return number

    def remove(self, number: int) -> None:
        """Remove a connection that has ended or whose other side has proved who it is."""
        with self._lock:
            copy, _ = self._open.pop(number, (None, ""))
        if copy is not None:
            copy.close()


def to_shed(oldest_first: Iterable[Connection], addresses: Mapping[Connection, str]) -> Connection:
    """Return the oldest connection of the address that has the most of them."""
    waiting = list(oldest_first)
    each = Counter(addresses[one] for one in waiting)
    return max(waiting, key=lambda one: each[addresses[one]])  # the first of equals


def origin(peer: object) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address,
    because a client has all addresses of its network."""
    host = peer[0] if isinstance(peer, tuple) else str(peer)
    if ":" not in host:
        return str(host)
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)


def _end(connection: socket.socket) -> None:
    """Wake the connection's thread, which then ends it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection had ended by itself: %s", error)
    connection.close()
