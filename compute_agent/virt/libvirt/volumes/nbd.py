# SPDX-License-Identifier: Apache-2.0
"""What an NBD server says of an export: its size, asked before any guest sees it.

Called by ``connectors``. A client of the protocol's negotiation (fixed newstyle), with TLS where
the connection says so; the data itself is QEMU's to read. Must stay true: where TLS is wanted
nothing is said of the export before it is there, and a server that has none is refused.
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
#: Seconds for each answer, and the longest that is read.
TIMEOUT_SECONDS, MAX_ANSWER_BYTES = 10.0, 4096


def export_size(host: str, port: int, export: str, tls: Tls | None) -> int:
    """Bytes of the export. VerbFailed when the server does not have it, or not as ``tls`` says, or
    does not answer."""
    try:
        with closing(socket.create_connection((host, port), TIMEOUT_SECONDS)) as plain:
            connection = _greeted(plain)
            if tls is None:
                return _size(connection, export)
            kind, _ = _asked(connection, STARTTLS, b"")
            if kind != ACK:
                raise VerbFailed(
                    f"The server of the volume at {host}:{port} speaks no TLS, and this host no plain text; "
                    "give it certificates.",
                    details=f"it answers {kind:#x}",
                )
            with tls.for_client().wrap_socket(plain, server_hostname=host) as encrypted:
                return _size(encrypted, export)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        raise VerbFailed(
            f"The server of volume {export} at {host}:{port} does not answer this host; see whether it runs, "
            "and try again.",
            details=str(problem),
            retryable=True,
        ) from problem


def _greeted(connection: socket.socket) -> socket.socket:
    magic, option, flags = struct.unpack(">8s8sH", _read(connection, 18))
    if (magic, option) != (MAGIC, OPTION_MAGIC) or not flags & FIXED_NEWSTYLE:
        raise ValueError("it does not speak NBD")
    connection.sendall(struct.pack(">I", flags & (FIXED_NEWSTYLE | NO_ZEROES)))
    return connection


def _size(connection: socket.socket, export: str) -> int:
    name, size = export.encode(), -1
    question = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    kind, answer = _asked(connection, INFO, question)
    while kind == INFO_REPLY:
        if len(answer) >= 12 and struct.unpack(">H", answer[:2])[0] == INFO_EXPORT:
            size = struct.unpack(">Q", answer[2:10])[0]
        kind, answer = _reply(connection, INFO)
    if kind != ACK or size < 0:
        raise VerbFailed(
            f"Volume {export} is not served where the volume service says; attach it again.",
            details=f"the server answers {kind:#x} {answer[:200].decode(errors='replace')}",
        )
    connection.sendall(struct.pack(">8sII", OPTION_MAGIC, ABORT, 0))
    return size


def _asked(connection: socket.socket, option: int, data: bytes) -> tuple[int, bytes]:
    connection.sendall(struct.pack(">8sII", OPTION_MAGIC, option, len(data)) + data)
    return _reply(connection, option)


def _reply(connection: socket.socket, option: int) -> tuple[int, bytes]:
    magic, about, kind, length = struct.unpack(">QIII", _read(connection, 20))
    if magic != REPLY_MAGIC or about != option or length > MAX_ANSWER_BYTES:
        raise ValueError("it does not speak NBD")
    return kind, _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise ValueError("it ended the connection")
        found += piece
    return found
