# SPDX-License-Identifier: Apache-2.0
"""Whether a guest that was on its way has arrived: asked of the destination's proxy, by the
source's agent.

Called by ``virt.libvirt.live_migration`` where libvirtd died in the last moments of a migration.
Must stay true: only what a host that is proved has said counts; all else is NoAnswer.
"""

from __future__ import annotations

import socket
import time

from common.domain import errors
from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from compute_agent.virt.libvirt.migration.incoming import rpc
from compute_agent.virt.libvirt.migration.incoming.proxy import ABSENT, ARRIVING, HERE, WELCOME
from compute_agent.virt.libvirt.migration.incoming.rpc import Malformed, Packet, Reader

SECONDS, MOST = 10.0, 256


def has_arrived(host: str, port: int, server: str, tls: Tls | None) -> bool:
    """Whether the guest is the other host's. Raises NoAnswer while that is not known."""
    try:
        reply = _asked(host, port, server, tls)
    except (OSError, ValueError, Malformed) as problem:
        raise errors.NoAnswer(
            "It is not known whether the guest has arrived: the destination does not answer. It "
            "stands still until that is known."
        ) from problem
    if reply == ARRIVING:
        raise errors.NoAnswer(
            "It is not known whether the guest arrives: the destination still waits for it."
        )
    if reply not in (ABSENT, HERE):
        raise errors.NoAnswer(
            "It is not known whether the guest has arrived: the destination speaks otherwise."
        )
    return reply == HERE


def _asked(host: str, port: int, server: str, tls: Tls | None) -> bytes:
    deadline = time.monotonic() + SECONDS
    context = tls.for_client() if tls else None
    plain = socket.create_connection((host, port), SECONDS)
    with plain:
        side = plain if context is None else TlsSocket.open(plain, context, host)
        try:
            if context is not None and side.recv(len(WELCOME)) != WELCOME:
                raise Malformed("the destination does not speak as it should")
            asked = Packet(rpc.QUESTION, 1, body=rpc.opaque(server.encode()))
            side.sendall(asked.written())
            heard = b""
            while len(heard) < MOST and time.monotonic() < deadline and (read := side.recv(MOST)):
                heard += read
        finally:
            side.close()
    answer = Packet.read(heard)
    if (answer.program, answer.kind) != (rpc.QUESTION, rpc.REPLY):
        raise Malformed("no answer to the question")
    return Reader(answer.body).opaque()
