# SPDX-License-Identifier: Apache-2.0
"""Buffer a request while it arrives, and detect the end.

gunicorn's parser reads the head after its last byte has arrived, and later the body from exactly
the bytes that were counted here. There is no second parser, so the bytes after a request are always
the next request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gunicorn.config import Config
from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import (
    ChunkMissingTerminator,
    InvalidChunkSize,
    LimitRequestHeaders,
    UnsupportedTransferCoding,
)
from gunicorn.http.message import Request
from gunicorn.http.unreader import Unreader

MAX_HEAD_BYTES, MAX_LINE_BYTES = 64 * 1024, 8190
_END = b"\r\n\r\n"


class BufferedUnreader(Unreader):  # type: ignore[misc]  # gunicorn ships no types
    """The source from which gunicorn reads a request: the buffered data, then ``more`` if set."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._buffered = [data]
        self.more: Callable[[], bytes] | None = None

    def add(self, data: bytes) -> None:
        """Append data that gunicorn reads after the data added before."""
        self._buffered.append(data)

    def chunk(self, size_hint: int | None = None) -> bytes:
        """Return the next data of any size, or b"" at the end. gunicorn calls this.

        After the buffered data this is the result of ``more``, which may raise OSError.
        """
        while self._buffered:
            if data := self._buffered.pop(0):
                return data
        return self.more() if self.more else b""


class RequestBuffer:
    """The requests of one connection, one after the other.

    Args:
        config: The configuration of gunicorn.
        peer: Address of the client.
        most: Largest number of bytes of a body that are buffered.
    """

    def __init__(self, config: Config, peer: object, most: int) -> None:
        self._config, self._peer, self._most = config, peer, most
        self._count = self._searched = 0
        self._chunks: ChunkedBody | None = None
        self._length = 0
        self.arrived = bytearray()
        #: The parsed head, or None until the head has arrived.
        self.request: Any = None
        #: The body is incomplete, so no further request can follow.
        self.is_cut = False

    def advance(self) -> bool:
        """Parse ``arrived``. Return True if a request is complete, or its body exceeds the buffer.

        Then the caller can read ``request``, and ``arrived`` has only the data after the request.

        Raises:
            ParseException: The request is invalid, or the head is too long.
        """
        if self.request is None and not self._read_head():
            return False
        end = self._find_end()
        if end is None and max(len(self.arrived), self._length) <= self._most:
            return False
        self.is_cut = end is None
        self.request.unreader.add(bytes(self.arrived[:end]))
        del self.arrived[:end]
        return True

    def cut(self) -> None:
        """End the body with the data that has arrived, because the client sends no more."""
        self.is_cut = True
        self.request.unreader.add(bytes(self.arrived))
        self.arrived.clear()

    def forget(self) -> None:
        """Forget the answered request, but keep data of the next request that has arrived."""
        self.request = self._chunks = None
        self._searched = self._length = 0

    def _read_head(self) -> bool:
        end = self.arrived.find(_END, max(0, self._searched - len(_END)))
        self._searched = len(self.arrived)
        if (end if end >= 0 else self._searched) > MAX_HEAD_BYTES:
            raise LimitRequestHeaders(f"The request's head has more than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return False
        head = bytes(self.arrived[: end + len(_END)])
        del self.arrived[: end + len(_END)]
        self._count += 1
        self.request = Request(self._config, BufferedUnreader(head), self._peer, self._count)
        _check_coding(self.request.headers)
        reader = self.request.body.reader
        if isinstance(reader, ChunkedReader):
            self._chunks = ChunkedBody()
        else:
            self._length = reader.length
        return True

    def _find_end(self) -> int | None:
        """Return the position after the body in ``arrived``, or None if the body is incomplete.

        Raises:
            ParseException: A chunk of the body is invalid.
        """
        if self._chunks is not None:
            return self._chunks.end(self.arrived)
        return self._length if len(self.arrived) >= self._length else None


def _check_coding(headers: list[tuple[str, str]]) -> None:
    """Check that a request has no transfer coding, or only "chunked".

    gunicorn accepts further codings without decoding them, and proxies may interpret them
    differently.

    Raises:
        UnsupportedTransferCoding: There is another coding.
    """
    for name, value in headers:
        if name == "TRANSFER-ENCODING" and value.lower() != "chunked":
            raise UnsupportedTransferCoding(value)


class ChunkedBody:
    """Finds the end of a chunked body that arrives in any pieces.

    Invariant: the rules are as strict as those of gunicorn's reader, because a proxy must find the
    same end.
    """

    def __init__(self) -> None:
        self._position = self._remaining = 0
        self._is_last = False

    def end(self, data: bytearray) -> int | None:
        """Return the position after the body in ``data``, or None if some of the body is missing.

        Each call gets the same data with more bytes at the end.

        Raises:
            InvalidChunkSize: The size of a chunk is invalid, or a line is too long.
            ChunkMissingTerminator: A chunk does not end with CRLF.
        """
        while True:
            if self._remaining:
                step = min(self._remaining, len(data) - self._position)
                self._position, self._remaining = self._position + step, self._remaining - step
                if self._remaining:
                    return None
                if data[self._position - 2 : self._position] != b"\r\n":
                    raise ChunkMissingTerminator(bytes(data[self._position - 2 : self._position]))
            line = data.find(b"\r\n", self._position)
            if line < 0 or line - self._position > MAX_LINE_BYTES:
                if max(line, len(data)) - self._position > MAX_LINE_BYTES:
                    raise InvalidChunkSize(b"the line is too long")
                return None
            text, self._position = bytes(data[self._position : line]), line + 2
            if self._is_last and not text:
                return self._position
            if not self._is_last:
                self._is_last, self._remaining = self._parse_size(
                    text.partition(b";")[0].rstrip(b" \t")
                )

    @staticmethod
    def _parse_size(size: bytes) -> tuple[bool, int]:
        """Parse the size of a chunk. Return True for the last chunk, and a number of bytes.

        The number counts the bytes after the line of the size: data and CRLF. For the last chunk
        the number is 0.

        Raises:
            InvalidChunkSize: The size is not a hexadecimal number of 1 to 16 digits.
        """
        if not size or len(size) > 16 or size.strip(b"0123456789abcdefABCDEF"):
            raise InvalidChunkSize(size[:16])
        length = int(size, 16)
        return length == 0, length + 2 if length else 0
