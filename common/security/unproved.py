# SPDX-License-Identifier: Apache-2.0
"""Connections to a listener before the peer has authenticated.

The number is limited. A further connection replaces the oldest of the address with the most
connections, so that silent connections do not block other clients. Used by the listeners of agents
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
    """The unauthenticated connections of one listener, at most ``most``. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._lock, self._numbers = most, threading.Lock(), itertools.count()
        # A copy of the descriptor, because TLS takes over the original.
        self._open: dict[int, tuple[socket.socket, str]] = {}

    def add(self, connection: socket.socket, peer: object) -> int:
        """Add a connection, and return the number for ``remove``.

        If ``most`` connections were there already, the choice of ``to_shed`` is shut down. The new
        connection is never chosen.

        Args:
            connection: The connection, which the caller still has to close.
            peer: The peer's address from accept().
        """
        copy = connection.dup()
        with self._lock:
            shed = None
            if len(self._open) >= self._most:
                late = to_shed(self._open, {key: at for key, (_, at) in self._open.items()})
                shed, _ = self._open.pop(late)
            number = next(self._numbers)
            self._open[number] = copy, origin(peer)
        if shed is not None:
            _end(shed)
        return number

    def remove(self, number: int) -> None:
        """Remove a connection that has ended or has authenticated. The connection is not closed.

        Args:
            number: The result of ``add``. Ignored if ``add`` has shut this connection down since.
        """
        with self._lock:
            copy, _ = self._open.pop(number, (None, ""))
        if copy is not None:
            copy.close()


def to_shed(oldest_first: Iterable[Connection], addresses: Mapping[Connection, str]) -> Connection:
    """Return the oldest connection of the address with the most connections.

    If several addresses have the most, the oldest connection of all of these is returned. The
    caller ends the connection.

    Args:
        oldest_first: The connections, of which there is at least one.
        addresses: The address of each connection (see ``origin``).
    """
    waiting = list(oldest_first)
    counts = Counter(addresses[connection] for connection in waiting)
    # max() returns the first of equals, which is the oldest.
    return max(waiting, key=lambda connection: counts[addresses[connection]])


def origin(peer: object) -> str:
    """Return the key under which connections of one client are counted.

    The key is the IPv4 address, or the /64 network of an IPv6 address, because a client has all
    addresses of such a network. An IPv4-mapped IPv6 address counts as IPv4. The key of a peer
    without an IP address is its text.

    Args:
        peer: The peer's address from accept().
    """
    host = peer[0] if isinstance(peer, tuple) else str(peer)
    if ":" not in host:
        return str(host)
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)


def _end(connection: socket.socket) -> None:
    """Shut down the connection of this copied descriptor, and close the copy.

    The thread that waits for the connection then ends it.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection was already closed", extra={"parts": {"problem": error}})
    connection.close()
