# SPDX-License-Identifier: Apache-2.0
"""Relay bytes between a connection and a guest's console until either side ends.

``consoles`` and ``direct_consoles`` use this.

Invariant: sockets block, so that a slow reader slows down the writer and no data accumulates here.
"""

from __future__ import annotations

import socket
import threading

from common.security.tls_socket import TlsSocket
from common.service.log import get_logger

log = get_logger(__name__)
CHUNK_BYTES = 64 * 1024
Side = socket.socket | TlsSocket


def join(peer: Side, guest: socket.socket, name: str) -> None:
    """Relay bytes in both directions until one side ends. The caller then closes both sockets.

    This thread copies from ``peer`` to ``guest``. A second thread called ``name`` copies from
    ``guest`` to ``peer``. When one direction ends, both connections are shut down.
    """
    back = threading.Thread(target=_copy, args=(guest, peer), name=name, daemon=True)
    back.start()
    _copy(peer, guest)
    back.join()


def _copy(source: Side, target: Side) -> None:
    """Copy bytes until the source ends or either side fails. Then shut down both."""
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    except OSError as error:
        log.debug("a console ended", problem=error)
    shut(source)
    shut(target)


def shut(side: Side) -> None:
    """Shut down both directions of a connection, which may have ended already."""
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a console's other side had closed before")


def stay_alive(peer: Side) -> None:
    """Set options of the connection, so that a vanished peer ends it after a minute of silence.

    The connection also sends small messages without a delay.
    """
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        peer.setsockopt(level, option, value)
