# SPDX-License-Identifier: Apache-2.0
"""The protocol of a file transfer between two agents: one request, and frames in response.

``service`` and ``client`` use this. A request is a length and a small JSON object. A frame is a
head (kind, offset, length), a SHA-256, and the data. The SHA-256 covers all heads and data of this
connection so far. So a valid frame proves that nothing before it was changed or left out, and data
received before a connection breaks remains valid.

Invariant: the other side does not control the amount of memory or the time that a read takes.
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
#: Limits in bytes of a request and of a frame, and in seconds for a request and for each frame.
MAX_REQUEST_BYTES, MAX_FRAME_BYTES = 4096, MEBIBYTE
REQUEST_TIMEOUT_SECONDS, FRAME_TIMEOUT_SECONDS = 10.0, 30.0
#: Kinds of frames: data of a file (empty data is a sign of life), end of a file (the offset is the
#: file's size), list of files, and failure.
DATA, END, LIST, FAILURE = b"D", b"E", b"L", b"F"
_LENGTH, _HEAD, _DIGEST = struct.Struct("!I"), struct.Struct("!cQI"), hashlib.sha256().digest_size


class TransferInterrupted(Exception):
    """The connection ended or was silent for too long. Data received before is valid."""


class TransferCorrupted(Exception):
    """The received data violates the protocol, or differs from the data that was sent."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """A request for the data of a file, or for the list of files.

    Attributes:
        server: Id of the server.
        secret: Secret under which the files are offered.
        name: Name of the file. "" requests the list.
        start: Offset of the first byte to send.
        version: Version of the protocol.
    """

    server: str
    secret: str
    name: str = ""
    start: int = 0
    version: int = VERSION

    def __repr__(self) -> str:
        return f"TransferRequest({self.server}, {self.name!r}, from {self.start})"


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a transfer.

    Attributes:
        kind: DATA, END, LIST or FAILURE.
        offset: Offset of the data in the file. END: the size of the file.
        data: The data. Empty data of kind DATA is a sign of life.
    """

    kind: bytes
    offset: int
    data: bytes


class Frames:
    """The frames of one connection in one direction, with the running SHA-256.

    Args:
        connection: The connection.
        seconds: Time limit for sending or receiving each frame.
    """

    def __init__(self, connection: socket.socket, seconds: float = FRAME_TIMEOUT_SECONDS) -> None:
        self._connection, self._seconds = connection, seconds
        self._digest = hashlib.sha256()

    def send(self, kind: bytes, offset: int = 0, data: bytes = b"") -> None:
        """Send a frame.

        Raises:
            TransferInterrupted: The connection ended, or the frame took too long.
            TransferCorrupted: TLS failed, for example because a certificate was refused.
        """
        head = _HEAD.pack(kind, offset, len(data))
        self._digest.update(head)
        self._digest.update(data)
        deadline = time.monotonic() + self._seconds
        _send(self._connection, head + self._digest.digest(), deadline)
        _send(self._connection, data, deadline)

    def receive(self) -> Frame:
        """Receive the next frame and verify the checksum.

        Raises:
            TransferInterrupted: The connection ended, or the frame took too long.
            TransferCorrupted: The frame is malformed, the checksum differs, or TLS failed.
        """
        deadline = time.monotonic() + self._seconds
        kind = _receive(self._connection, 1, deadline)
        # Check the kind first: a TLS alert, for example, is shorter than a head.
        if kind not in (DATA, END, LIST, FAILURE):
            raise TransferCorrupted("the other side does not use the protocol of file transfers")
        payload = kind + _receive(self._connection, _HEAD.size - 1 + _DIGEST, deadline)
        _, offset, length = _HEAD.unpack_from(payload)
        if length > MAX_FRAME_BYTES:
            raise TransferCorrupted(
                f"a frame has {length} bytes, at most {MAX_FRAME_BYTES} are allowed"
            )
        data = _receive(self._connection, length, deadline)
        self._digest.update(payload[: _HEAD.size])
        self._digest.update(data)
        if self._digest.digest() != payload[_HEAD.size :]:
            raise TransferCorrupted("the checksum of a frame differs")
        return Frame(kind, offset, data)


def send_request(connection: socket.socket, request: TransferRequest) -> None:
    """Send a request.

    Raises:
        TransferInterrupted: The connection ended, or sending took too long.
        TransferCorrupted: TLS failed, for example because a certificate was refused.
    """
    payload = json.dumps(asdict(request)).encode()
    _send(
        connection, _LENGTH.pack(len(payload)) + payload, time.monotonic() + REQUEST_TIMEOUT_SECONDS
    )


def receive_request(
    connection: socket.socket, seconds: float = REQUEST_TIMEOUT_SECONDS
) -> TransferRequest:
    """Receive a request.

    Raises:
        TransferInterrupted: The connection ended, or the request took too long.
        TransferCorrupted: The request is malformed or of another version, or TLS failed.
    """
    deadline = time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > MAX_REQUEST_BYTES:
        raise TransferCorrupted(
            f"the request has {length} bytes, at most {MAX_REQUEST_BYTES} are allowed"
        )
    try:
        payload = json.loads(_receive(connection, length, deadline))
        request = TransferRequest(**payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise TransferCorrupted("the request is malformed") from error
    texts = (request.server, request.secret, request.name)
    if (
        request.version != VERSION
        or not all(isinstance(text, str) for text in texts)
        or type(request.start) is not int
        or request.start < 0
    ):
        raise TransferCorrupted(
            "the request is malformed or of another version of the protocol; upgrade both agents"
        )
    return request


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send all data before the deadline, a monotonic time.

    Why: over TLS, ``sendall`` applies the timeout to each part of the data.

    Raises:
        TransferInterrupted: The connection ended, or the deadline passed.
        TransferCorrupted: TLS failed.
    """
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
                raise TransferInterrupted("the connection ended before all data had arrived")
            left = left[read:]
    except OSError as error:
        raise meaning(error) from error
    return bytes(data)


def meaning(error: OSError) -> Exception:
    """Return the exception of this module that replaces an error of the connection.

    Returns:
        TransferCorrupted for an error of TLS, for example a refused certificate or data that was
        changed on its way. TransferInterrupted for the end of a TLS connection and for all others.
    """
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    ):
        return TransferCorrupted(f"TLS: {error}")
    return TransferInterrupted(str(error) or type(error).__name__)


def _seconds_until(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the request or frame took too long")
    return seconds
