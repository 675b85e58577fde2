# SPDX-License-Identifier: Apache-2.0
"""A request while it arrives, and whether it is whole.

gunicorn's parser reads the head once all of it is here, and later the body, from exactly the bytes
that were counted here. So there is one parser, and what follows a request is the next one."""

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

MAX_HEAD_BYTES, MAX_LINE_BYTES = 64 * 1024, 8190  #: bytes
_END = b"\r\n\r\n"


class BufferedUnreader(Unreader):  # type: ignore[misc]  # gunicorn ships no types
    """Where gunicorn reads a request from: what is here, and then ``more``, if there is such."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._here = [data]
        self.more: Callable[[], bytes] | None = None

    def add(self, data: bytes) -> None:
        """This comes next."""
        self._here.append(data)

    def chunk(self, size_hint: int | None = None) -> bytes:
        """Called by gunicorn; empty: the end."""
        while self._here:
            if data := self._here.pop(0):
                return data
        return self.more() if self.more else b""


class RequestBuffer:
    """The requests of one connection, one after the other. ``most``: the bytes of a body that are
    waited for."""

    def __init__(self, config: Config, peer: object, most: int) -> None:
        self._config, self._peer, self._most = config, peer, most
        self._count = self._searched = 0
        self._chunks: ChunkedBody | None = None
        self._length = 0
        self.arrived = bytearray()
        self.request: Any = None  #: its head is here
        self.is_cut = False  #: its body is not all here, and what follows is no request

    def advance(self) -> bool:
        """Is a request whole? Raises what gunicorn's parser raises for a wrong one."""
        if self.request is None and not self._read_head():
            return False
        end = self._end()
        if end is None and max(len(self.arrived), self._length) <= self._most:
            return False
        self.is_cut = end is None
        self.request.unreader.add(bytes(self.arrived[:end]))
        del self.arrived[:end]
        return True

    def cut(self) -> None:
        """No more of the body comes: what is here is all."""
        self.is_cut = True
        self.request.unreader.add(bytes(self.arrived))
        self.arrived.clear()

    def forget(self) -> None:
        """The request has been answered."""
        self.request = self._chunks = None
        self._searched = self._length = 0

    def _read_head(self) -> bool:
        end = self.arrived.find(_END, max(0, self._searched - len(_END)))
        self._searched = len(self.arrived)
        if (end if end >= 0 else self._searched) > MAX_HEAD_BYTES:
            raise LimitRequestHeaders("the head is too long")
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

    def _end(self) -> int | None:
        """Where the body ends; None: it is not all here."""
        if self._chunks is not None:
            return self._chunks.end(self.arrived)
        return self._length if len(self.arrived) >= self._length else None


def _check_coding(headers: list[tuple[str, str]]) -> None:
    """Raises UnsupportedTransferCoding for all but chunks. gunicorn takes more codings, which
    nobody here decodes, and which servers before us may understand in another way."""
    for name, value in headers:
        if name == "TRANSFER-ENCODING" and value.lower() != "chunked":
            raise UnsupportedTransferCoding(value)


class ChunkedBody:
    """Finds the end of a chunked body, however it arrives. As strict as gunicorn's reader: who
    stands before us must not count otherwise."""

    def __init__(self) -> None:
        self._at = self._left = 0
        self._is_last = False

    def end(self, data: bytearray) -> int | None:
        """Where it ends; None: not yet. Raises InvalidChunkSize, ChunkMissingTerminator."""
        while True:
            if self._left:
                step = min(self._left, len(data) - self._at)
                self._at, self._left = self._at + step, self._left - step
                if self._left:
                    return None
                if data[self._at - 2 : self._at] != b"\r\n":
                    raise ChunkMissingTerminator(bytes(data[self._at - 2 : self._at]))
            line = data.find(b"\r\n", self._at)
            if line < 0 or line - self._at > MAX_LINE_BYTES:
                if max(line, len(data)) - self._at > MAX_LINE_BYTES:
                    raise InvalidChunkSize(b"the line is too long")
                return None
            text, self._at = bytes(data[self._at : line]), line + 2
            if self._is_last and not text:
                return self._at
            if not self._is_last:
                self._is_last, self._left = self._next(text.partition(b";")[0].rstrip(b" \t"))

    @staticmethod
    def _next(size: bytes) -> tuple[bool, int]:
        """Is this the last chunk, and how many bytes it has with its end."""
        if not size or len(size) > 16 or size.strip(b"0123456789abcdefABCDEF"):
            raise InvalidChunkSize(size[:16])
        length = int(size, 16)
        return length == 0, length + 2 if length else 0
