# SPDX-License-Identifier: Apache-2.0
"""The format of libvirt's RPC, as far as a migration uses it: packets, and the XDR in them.

Used by ``filter``, ``proxy`` and ``question`` beside this file. A packet is its length, a header of
six numbers and a body; numbers have four bytes, most significant first, and strings are filled up
to whole ones. Must stay true: what is read is bounded by the packet, and the packet by whoever
reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Programs: libvirt's own, what keeps a connection alive, and the question of ``question``.
REMOTE, KEEPALIVE, QUESTION = 0x20008086, 0x6B656570, 0x4B4E5641
VERSION = 1
#: Kinds and statuses of packets.
CALL, REPLY, MESSAGE = 0, 1, 2
OK = 0
HEADER = struct.Struct("!IIIiIIi")
NUMBER = struct.Struct("!I")
#: Types of typed parameters, and the bytes of those that are numbers.
STRING = 7
NUMBERS = {1: 4, 2: 4, 3: 8, 4: 8, 5: 8, 6: 4}
#: No call of a migration has more.
MOST_PARAMETERS = 64


class Malformed(Exception):
    """These bytes are no packet of this protocol."""


@dataclass(frozen=True, slots=True)
class Packet:
    program: int
    procedure: int
    kind: int = CALL
    serial: int = 0
    body: bytes = b""
    status: int = OK
    version: int = VERSION

    @classmethod
    def read(cls, data: bytes) -> Packet:
        """The whole of a packet. Raises Malformed."""
        if len(data) < HEADER.size:
            raise Malformed("shorter than a header")
        length, program, version, procedure, kind, serial, status = HEADER.unpack_from(data)
        if length != len(data):
            raise Malformed("not as long as it says")
        return cls(program, procedure, kind, serial, data[HEADER.size :], status, version)

    def written(self) -> bytes:
        """Its bytes."""
        return (
            HEADER.pack(
                HEADER.size + len(self.body),
                self.program,
                self.version,
                self.procedure,
                self.kind,
                self.serial,
                self.status,
            )
            + self.body
        )

    def reply(self, body: bytes) -> Packet:
        """The answer to it."""
        return replace(self, kind=REPLY, body=body)


class Reader:
    """The values of a body, one after the other. Each raises Malformed."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def number(self) -> int:
        """Unsigned."""
        return int(NUMBER.unpack(self._take(NUMBER.size))[0])

    def opaque(self) -> bytes:
        """Bytes of any length, and a string."""
        length = self.number()
        data = self._take(length)
        self._take(-length % NUMBER.size)
        return data

    def optional(self) -> bytes | None:
        """A string that need not be there."""
        return self.opaque() if self.number() else None

    def strings(self) -> dict[str, list[bytes]]:
        """Of typed parameters those that are strings, by name; numbers are passed over."""
        found: dict[str, list[bytes]] = {}
        count = self.number()
        if count > MOST_PARAMETERS:
            raise Malformed("too many parameters")
        for _ in range(count):
            name, kind = self.opaque().decode(errors="replace"), self.number()
            if kind == STRING:
                found.setdefault(name, []).append(self.opaque())
            elif kind in NUMBERS:
                self._take(NUMBERS[kind])
            else:
                raise Malformed("a parameter of an unknown type")
        return found

    def end(self) -> None:
        """Nothing is left."""
        if self._at != len(self._body):
            raise Malformed("more than was expected")

    def _take(self, length: int) -> bytes:
        if length > len(self._body) - self._at:
            raise Malformed("less than was expected")
        self._at += length
        return self._body[self._at - length : self._at]


def number(value: int) -> bytes:
    return NUMBER.pack(value)


def opaque(data: bytes) -> bytes:
    return NUMBER.pack(len(data)) + data + bytes(-len(data) % NUMBER.size)


def strings(found: Sequence[tuple[str, str]]) -> bytes:
    """Typed parameters that are strings."""
    return number(len(found)) + b"".join(
        opaque(name.encode()) + number(STRING) + opaque(value.encode()) for name, value in found
    )
