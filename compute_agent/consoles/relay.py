# SPDX-License-Identifier: Apache-2.0
"""Bytes between a connection and a guest's console, both ways, until either side ends.

Used by ``consoles`` and ``direct_consoles``. Must stay true: sockets block, so that who reads
slowly slows the writer, and nothing piles up here.
"""

from __future__ import annotations

import logging
import socket
import threading

from common.security.tls_socket import TlsSocket

log = logging.getLogger(__name__)
CHUNK_BYTES = 64 * 1024
Side = socket.socket | TlsSocket


def join(peer: Side, guest: socket.socket, name: str) -> None:
    """Carry what the peer says on this thread, and what the guest says on one of this ``name``; at
    the end both have ended, and are still to be closed."""
    back = threading.Thread(target=_copy, args=(guest, peer), name=name, daemon=True)
    back.start()
    _copy(peer, guest)
    back.join()


def _copy(source: Side, target: Side) -> None:
    """Until the source ends or the target does; then both do."""
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    except OSError as error:
        log.debug("a console ended: %s", error)
    shut(source)
    shut(target)


def shut(side: Side) -> None:
    """Both directions of it end; it may have ended before."""
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a console's other side had closed before")


def stay_alive(peer: Side) -> None:
    """Small messages go at once; a console service that vanished is noticed within a minute of
    silence."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        peer.setsockopt(level, option, value)
