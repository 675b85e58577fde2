# SPDX-License-Identifier: Apache-2.0
"""The query of a migration's source to the destination's proxy whether the guest has arrived.

Called by ``virt.libvirt.migration.live_migration`` if libvirtd died in the last moments of a
migration.

Invariant: only the answer of an authenticated host counts. Everything else is NoAnswer.
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
    """Return True if the guest is active at the destination, False if neither active nor arriving.

    Args:
        host: Address of the destination's proxy.
        port: Port of the destination's proxy.
        server: Id of the server.
        tls: This host's certificates and key, or None for plain text.

    Raises:
        NoAnswer: The destination does not answer, gives an invalid answer, or still waits for the
            guest.
    """
    try:
        reply = _query(host, port, server, tls)
    except (OSError, ValueError, Malformed) as problem:
        raise errors.NoAnswer(
            f"The destination {host} does not answer whether the guest of server {server} has arrived. The guest "
            "stays paused until the destination answers."
        ) from problem
    if reply == ARRIVING:
        raise errors.NoAnswer(
            f"The destination {host} still waits for the guest of server {server}. The guest stays paused until the "
            "migration has ended."
        )
    if reply not in (ABSENT, HERE):
        raise errors.NoAnswer(
            f"The destination {host} gave an invalid answer whether the guest of server {server} has arrived. The "
            "guest stays paused; check the versions of both hosts."
        )
    return reply == HERE


def _query(host: str, port: int, server: str, tls: Tls | None) -> bytes:
    deadline = time.monotonic() + SECONDS
    context = tls.for_client() if tls else None
    plain = socket.create_connection((host, port), SECONDS)
    with plain:
        side = plain if context is None else TlsSocket.open(plain, context, host)
        try:
            if context is not None and side.recv(len(WELCOME)) != WELCOME:
                raise Malformed(
                    "the destination refused this host's certificate, or expects no guest from this host; see the "
                    "log of kilonova-agent there"
                )
            question = Packet(rpc.QUESTION, 1, body=rpc.opaque(server.encode()))
            side.sendall(question.to_bytes())
            data = b""
            while len(data) < MOST and time.monotonic() < deadline and (chunk := side.recv(MOST)):
                data += chunk
        finally:
            side.close()
    answer = Packet.read(data)
    if (answer.program, answer.kind) != (rpc.QUESTION, rpc.REPLY):
        raise Malformed("the reply of the destination has another program or kind")
    return Reader(answer.body).opaque()
