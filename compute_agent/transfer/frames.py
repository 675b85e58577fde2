# SPDX-License-Identifier: Apache-2.0
"""What two agents say to each other while files travel: one request, and frames in answer.

Used by ``service`` and ``client`` beside this file. A request is its length and a small JSON
object. Each frame is a head (kind, offset, length), the SHA-256 of all that was sent on this
connection so far, and the bytes: whoever has read a frame knows that nothing before it was changed
or left out, so what has arrived is kept when a connection breaks. Must stay true: nothing that
comes from the other side decides how much is read into memory, or for how long.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import struct
import time
from dataclasses import asdict, dataclass

VERSION = 1
MEBIBYTE = 1 << 20
#: Bytes of a request, and of a frame; seconds for a request, and for a frame that was begun.
MAX_REQUEST_BYTES, MAX_FRAME_BYTES = 4096, MEBIBYTE
REQUEST_TIMEOUT_SECONDS, FRAME_TIMEOUT_SECONDS = 10.0, 30.0
#: Kinds of frames: bytes of a file (none: the other side is still there), its end (the offset is
#: its size), the list of files, why there is nothing more.
DATA, END, LIST, FAILURE = b"D", b"E", b"L", b"F"
_LENGTH, _HEAD, _DIGEST = struct.Struct("!I"), struct.Struct("!cQI"), hashlib.sha256().digest_size


class TransferInterrupted(Exception):
    """The connection ended, or was silent for too long. What has been read before is good."""


class TransferCorrupted(Exception):
    """What came is not what this protocol says, or not what was sent."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Whose files, by which right, and which: ``name`` empty asks for the list; data before
    ``start`` is left out."""

    server: str
    secret: str
    name: str = ""
    start: int = 0
    version: int = VERSION

    def __repr__(self) -> str:
        return f"TransferRequest({self.server}, {self.name!r}, from {self.start})"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: bytes
    offset: int
    data: bytes


class Frames:
    """The frames of one connection, in one direction; each has ``seconds`` to pass."""

    def __init__(self, connection: socket.socket, seconds: float = FRAME_TIMEOUT_SECONDS) -> None:
        self._connection, self._seconds = connection, seconds
        self._digest = hashlib.sha256()

    def send(self, kind: bytes, offset: int = 0, data: bytes = b"") -> None:
        """Raises TransferInterrupted."""
        head = _HEAD.pack(kind, offset, len(data))
        self._digest.update(head)
        self._digest.update(data)
        deadline = time.monotonic() + self._seconds
        _send(self._connection, head + self._digest.digest(), deadline)
        _send(self._connection, data, deadline)

    def receive(self) -> Frame:
        """The next frame; it is what was sent. Raises TransferInterrupted, TransferCorrupted."""
        deadline = time.monotonic() + self._seconds
        kind = _receive(self._connection, 1, deadline)
        if kind not in (DATA, END, LIST, FAILURE):  # TLS, say, whose refusal is shorter than a head
            raise TransferCorrupted("the other side does not speak this protocol")
        payload = kind + _receive(self._connection, _HEAD.size - 1 + _DIGEST, deadline)
        _, offset, length = _HEAD.unpack_from(payload)
        if length > MAX_FRAME_BYTES:
            raise TransferCorrupted("the other side does not speak as it should")
        data = _receive(self._connection, length, deadline)
        self._digest.update(payload[: _HEAD.size])
        self._digest.update(data)
        if self._digest.digest() != payload[_HEAD.size :]:
            raise TransferCorrupted("the checksum differs")
        return Frame(kind, offset, data)


def send_request(connection: socket.socket, request: TransferRequest) -> None:
    """Raises TransferInterrupted."""
    payload = json.dumps(asdict(request)).encode()
    _send(
        connection, _LENGTH.pack(len(payload)) + payload, time.monotonic() + REQUEST_TIMEOUT_SECONDS
    )


def receive_request(
    connection: socket.socket, seconds: float = REQUEST_TIMEOUT_SECONDS
) -> TransferRequest:
    """Raises TransferInterrupted, and TransferCorrupted when it is none of this version."""
    deadline = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > MAX_REQUEST_BYTES:
        raise TransferCorrupted("the request is too long")
    try:
        payload = json.loads(_receive(connection, length, deadline))
        request = TransferRequest(**payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise TransferCorrupted("the request is not one of this protocol") from error
    texts = (request.server, request.secret, request.name)
    if (
        request.version != VERSION
        or not all(isinstance(text, str) for text in texts)
        or type(request.start) is not int
        or request.start < 0
    ):
        raise TransferCorrupted(
            "the request is not one of this version of the protocol; upgrade both agents"
        )
    return request


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    """All of it before the deadline; ``sendall`` would give each part of it the whole time anew
    over TLS."""
    left = memoryview(data)
    try:
        while left:
            connection.settimeout(_seconds_until(deadline))
            left = left[connection.send(left) :]
    except OSError as error:
        raise meaning(error) from error


def _receive(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray(length)
    left = memoryview(data)
    try:
        while left:
            connection.settimeout(_seconds_until(deadline))
            read = connection.recv_into(left)
            if read == 0:
                raise TransferInterrupted("the connection ended")
            left = left[read:]
    except OSError as error:
        raise meaning(error) from error
    return bytes(data)


def meaning(error: OSError) -> Exception:
    """What an error of the connection means: TLS refuses certificates, and bytes that somebody
    changed."""
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    ):
        return TransferCorrupted(f"TLS: {error}")
    return TransferInterrupted(str(error) or type(error).__name__)


def _seconds_until(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("it took too long")
    return seconds
