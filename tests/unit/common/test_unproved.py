# SPDX-License-Identifier: Apache-2.0
"""Connections whose other side has not yet proved who it is."""

from __future__ import annotations

import socket

from common.security.unproved import Unproved


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def is_ended(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False


def test_one_more_ends_the_oldest_of_the_address_with_most() -> None:
    unproved, pairs = Unproved(4), [pair() for _ in range(5)]
    addresses = ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2", "192.0.2.1")
    for (mine, _), address in zip(pairs, addresses, strict=True):
        unproved.add(mine, (address, 1))
    assert [is_ended(peer) for _, peer in pairs] == [False, False, True, False, False]
    for mine, peer in pairs:
        mine.close()
        peer.close()


def test_removed_connection_stays_open_and_makes_room() -> None:
    unproved, (first, peer), (second, other) = Unproved(1), pair(), pair()
    unproved.remove(unproved.add(first, ("192.0.2.1", 1)))
    unproved.add(second, ("192.0.2.1", 2))
    assert not is_ended(peer)
    first.close()
    assert is_ended(peer), "no copy of the descriptor is left"
    for one in (peer, second, other):
        one.close()
