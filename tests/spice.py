# SPDX-License-Identifier: Apache-2.0
"""A SPICE client that opens channels and reads messages, over sockets and websockets.

The ticket is empty, because guests have no password. The client still encrypts it with the key of
the server.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import load_der_public_key

MAGIC = b"REDQ"
MAIN, DISPLAY, INPUTS, CURSOR = 1, 2, 3, 4
#: Type of the main channel's first message, which contains the number of the session.
INIT = 103
#: Length of the server's key, which follows the error in the body of a reply.
KEY_BYTES = 162
#: Capabilities: selection of the authentication, SPICE tickets as authentication, mini headers.
_COMMON, _CHANNEL = 0b1011, 0b1001


class Bytes(Protocol):
    """A connection over a socket or a websocket."""

    def send(self, data: bytes) -> None: ...

    def read(self, length: int) -> bytes: ...


class Message(NamedTuple):
    kind: int
    body: bytes


class OverSocket:
    """A connection over a socket."""

    def __init__(self, side: socket.socket) -> None:
        self._side = side

    def send(self, data: bytes) -> None:
        self._side.sendall(data)

    def read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._side.recv(length - len(data))
            assert part, f"it ended after {data!r}"
            data += part
        return data


class OverMessages:
    """A connection over the messages of a websocket.

    Args:
        send: Sends a message.
        following: Returns the next message.
    """

    def __init__(self, send: Callable[[bytes], None], following: Callable[[], bytes | str]) -> None:
        self._send, self._following, self._buffer = send, following, b""

    def send(self, data: bytes) -> None:
        self._send(data)

    def read(self, length: int) -> bytes:
        while len(self._buffer) < length:
            part = self._following()
            assert isinstance(part, bytes), part
            self._buffer += part
        data, self._buffer = self._buffer[:length], self._buffer[length:]
        return data


def greeting(channel: int = MAIN, session: int = 0) -> bytes:
    """Return the link message for a channel of a session. Session 0 requests a new session."""
    body = struct.pack("<IBBIIIII", session, channel, 0, 1, 1, 18, _COMMON, _CHANNEL)
    return struct.pack("<4sIII", MAGIC, 2, 2, len(body)) + body


def link(side: Bytes, channel: int = MAIN, session: int = 0) -> int:
    """Open a channel and return the error of the server, or 0 if the channel is open."""
    side.send(greeting(channel, session))
    magic, major, _, size = struct.unpack("<4sIII", side.read(16))
    assert (magic, major) == (MAGIC, 2)
    reply = side.read(size)
    (refused,) = struct.unpack_from("<I", reply)
    if refused:
        return int(refused)
    key = load_der_public_key(reply[4 : 4 + KEY_BYTES])
    assert isinstance(key, rsa.RSAPublicKey)
    way = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
    side.send(struct.pack("<I", 1) + key.encrypt(b"\0", way))
    return int(struct.unpack("<I", side.read(4))[0])


def message(side: Bytes) -> Message:
    """Return the next message of an open channel."""
    kind, size = struct.unpack("<HI", side.read(6))
    return Message(kind, side.read(size))


def open_main(side: Bytes) -> int:
    """Open the main channel and return the number of the session for further channels."""
    assert link(side) == 0
    first = message(side)
    assert first.kind == INIT, first
    return int(struct.unpack_from("<I", first.body)[0])
