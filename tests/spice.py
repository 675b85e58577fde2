# SPDX-License-Identifier: Apache-2.0
"""A client of SPICE that gets as far as a channel's first message: link, ticket, answer.

Used by tests of consoles, over sockets and over websockets. The ticket is empty, as guests here
have no password; it travels under the key that the server shows all the same.
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
#: The first message of the main channel, which tells the session's number.
INIT = 103
#: Of a reply's body: the error, then the server's key, of so many bytes.
KEY_BYTES = 162
#: That who connects chooses the way of the ticket, chooses this one, and reads small headers.
_COMMON, _CHANNEL = 0b1011, 0b1001


class Bytes(Protocol):
    """A connection of either kind."""

    def send(self, data: bytes) -> None: ...

    def read(self, length: int) -> bytes: ...


class Message(NamedTuple):
    kind: int
    body: bytes


class OverSocket:
    """The bytes of a socket."""

    def __init__(self, side: socket.socket) -> None:
        self._side = side

    def send(self, data: bytes) -> None:
        self._side.sendall(data)

    def read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            part = self._side.recv(length - len(found))
            assert part, f"it ended after {found!r}"
            found += part
        return found


class OverMessages:
    """The bytes of a websocket's messages: how they are sent, and what gives the next."""

    def __init__(self, send: Callable[[bytes], None], following: Callable[[], bytes | str]) -> None:
        self._send, self._following, self._kept = send, following, b""

    def send(self, data: bytes) -> None:
        self._send(data)

    def read(self, length: int) -> bytes:
        while len(self._kept) < length:
            part = self._following()
            assert isinstance(part, bytes), part
            self._kept += part
        found, self._kept = self._kept[:length], self._kept[length:]
        return found


def greeting(channel: int = MAIN, session: int = 0) -> bytes:
    """The link message for a channel of a session; 0: of a new one."""
    body = struct.pack("<IBBIIIII", session, channel, 0, 1, 1, 18, _COMMON, _CHANNEL)
    return struct.pack("<4sIII", MAGIC, 2, 2, len(body)) + body


def link(side: Bytes, channel: int = MAIN, session: int = 0) -> int:
    """Open a channel; what the server answers to the ticket, 0: it is open."""
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
    """The next one of an open channel."""
    kind, size = struct.unpack("<HI", side.read(6))
    return Message(kind, side.read(size))


def open_main(side: Bytes) -> int:
    """Open the main channel; the number of the session, by which others join it."""
    assert link(side) == 0
    first = message(side)
    assert first.kind == INIT, first
    return int(struct.unpack_from("<I", first.body)[0])
