# SPDX-License-Identifier: Apache-2.0
"""An NBD client that reads the size of an export, before any guest uses the export.

Called by ``connectors``. The client speaks the fixed newstyle negotiation, with TLS if required.
QEMU reads the data itself.

Invariant: if TLS is required, the export's name is sent only over TLS. A server without TLS is
refused.
"""

from __future__ import annotations

import socket
import struct
from contextlib import closing

from common.security.tls import Tls
from compute_agent.verb_context import VerbFailed

MAGIC, OPTION_MAGIC, REPLY_MAGIC = b"NBDMAGIC", b"IHAVEOPT", 0x0003E889045565A9
FIXED_NEWSTYLE, NO_ZEROES = 1, 2
ABORT, STARTTLS, INFO = 2, 5, 6
ACK, INFO_REPLY = 1, 3
INFO_EXPORT = 0
#: Seconds for each answer, and bytes of an answer.
TIMEOUT_SECONDS, MAX_ANSWER_BYTES = 10.0, 4096


def export_size(host: str, port: int, export: str, tls: Tls | None) -> int:
    """Return the size of the export in bytes.

    Args:
        host: Host of the NBD server.
        port: Port of the NBD server.
        export: Name of the export.
        tls: This host's certificates and key, or None for plain text.

    Raises:
        VerbFailed: The server is unreachable, has no such export, or does not speak TLS as
            required.
    """
    try:
        with closing(socket.create_connection((host, port), TIMEOUT_SECONDS)) as plain:
            connection = _negotiate(plain)
            if tls is None:
                return _read_size(connection, export)
            kind, _ = _send_option(connection, STARTTLS, b"")
            if kind != ACK:
                raise VerbFailed(
                    f"The server of volume {export} at {host}:{port} does not support TLS, which this host requires; "
                    "set up TLS at the volume service.",
                    details=f"the server answers STARTTLS with {kind:#x}",
                )
            with tls.for_client().wrap_socket(plain, server_hostname=host) as encrypted:
                return _read_size(encrypted, export)
    # ssl.SSLError is an OSError too.
    except (OSError, ValueError) as problem:
        raise VerbFailed(
            f"The server of volume {export} at {host}:{port} does not answer this host; check that the server runs, "
            "and try again.",
            details=str(problem),
            retryable=True,
        ) from problem


def _negotiate(connection: socket.socket) -> socket.socket:
    magic, option, flags = struct.unpack(">8s8sH", _read(connection, 18))
    if (magic, option) != (MAGIC, OPTION_MAGIC) or not flags & FIXED_NEWSTYLE:
        raise ValueError("the server does not offer NBD's fixed newstyle negotiation")
    connection.sendall(struct.pack(">I", flags & (FIXED_NEWSTYLE | NO_ZEROES)))
    return connection


def _read_size(connection: socket.socket, export: str) -> int:
    name, size = export.encode(), -1
    request = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    kind, reply = _send_option(connection, INFO, request)
    while kind == INFO_REPLY:
        if len(reply) >= 12 and struct.unpack(">H", reply[:2])[0] == INFO_EXPORT:
            size = struct.unpack(">Q", reply[2:10])[0]
        kind, reply = _read_reply(connection, INFO)
    if kind != ACK or size < 0:
        raise VerbFailed(
            f"The server that the volume service names does not serve volume {export}; attach the volume again.",
            details=f"the server answers {kind:#x} {reply[:200].decode(errors='replace')}",
        )
    connection.sendall(struct.pack(">8sII", OPTION_MAGIC, ABORT, 0))
    return size


def _send_option(connection: socket.socket, option: int, data: bytes) -> tuple[int, bytes]:
    connection.sendall(struct.pack(">8sII", OPTION_MAGIC, option, len(data)) + data)
    return _read_reply(connection, option)


def _read_reply(connection: socket.socket, option: int) -> tuple[int, bytes]:
    magic, reply_option, kind, length = struct.unpack(">QIII", _read(connection, 20))
    if magic != REPLY_MAGIC or reply_option != option or length > MAX_ANSWER_BYTES:
        raise ValueError(
            f"the NBD server's answer to option {option} is invalid or longer than {MAX_ANSWER_BYTES} bytes"
        )
    return kind, _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ValueError("the server closed the connection")
        data += piece
    return data
