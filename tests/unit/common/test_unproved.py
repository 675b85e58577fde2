# SPDX-License-Identifier: Apache-2.0
"""Limits for connections of peers that have not yet authenticated."""

from __future__ import annotations

import socket

from common.security.unproved import Unproved


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def is_ended(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False


def test_excess_unauthenticated_connection_closes_oldest_of_busiest_network() -> None:
    unproved, pairs = Unproved(4), [socket_pair() for _ in range(5)]
    addresses = ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2", "192.0.2.1")
    for (connection, _), address in zip(pairs, addresses, strict=True):
        unproved.add(connection, (address, 1))
    assert [is_ended(peer) for _, peer in pairs] == [False, False, True, False, False]
    for connection, peer in pairs:
        connection.close()
        peer.close()


def test_removed_unauthenticated_connection_stays_open_and_frees_its_slot() -> None:
    unproved, (first, peer), (second, other) = Unproved(1), socket_pair(), socket_pair()
    unproved.remove(unproved.add(first, ("192.0.2.1", 1)))
    unproved.add(second, ("192.0.2.1", 2))
    assert not is_ended(peer)
    first.close()
    assert is_ended(peer), "a copy of the descriptor would keep the connection open"
    for open_socket in (peer, second, other):
        open_socket.close()
