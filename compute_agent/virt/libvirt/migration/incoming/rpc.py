# SPDX-License-Identifier: Apache-2.0
"""The wire format of libvirt's RPC, as far as a migration uses it: packets and their XDR values.

Used by ``filter``, ``proxy`` and ``question``. A packet is a length, a header of six numbers, and a
body. Numbers have four bytes, the most significant first. Strings are padded to a multiple of four
bytes.

Invariant: a read never exceeds the packet. The caller limits the size of the packet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Program numbers: libvirt's calls, libvirt's keepalive, and ``question``.
REMOTE, KEEPALIVE, QUESTION = 0x20008086, 0x6B656570, 0x4B4E5641
VERSION = 1
#: Kinds and statuses of packets.
CALL, REPLY, MESSAGE = 0, 1, 2
OK = 0
HEADER = struct.Struct("!IIIiIIi")
NUMBER = struct.Struct("!I")
#: Types of typed parameters, and the sizes of the numeric types.
STRING = 7
NUMBERS = {1: 4, 2: 4, 3: 8, 4: 8, 5: 8, 6: 4}
#: Limit of the parameters of a call. The calls of a migration have fewer.
MOST_PARAMETERS = 64


class Malformed(Exception):
    """The bytes are not a packet of this protocol."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet of libvirt's RPC."""

    program: int
    procedure: int
    kind: int = CALL
    serial: int = 0
    body: bytes = b""
    status: int = OK
    version: int = VERSION

    @classmethod
    def read(cls, data: bytes) -> Packet:
        """Parse one complete packet.

        Raises:
            Malformed: The bytes are not exactly one packet.
        """
        if len(data) < HEADER.size:
            raise Malformed("the packet is shorter than a header")
        length, program, version, procedure, kind, serial, status = HEADER.unpack_from(data)
        if length != len(data):
            raise Malformed("the packet does not have the length in its header")
        return cls(program, procedure, kind, serial, data[HEADER.size :], status, version)

    def to_bytes(self) -> bytes:
        """Return the bytes of the packet."""
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
        """Return a reply to this packet with the same serial number and the new body."""
        return replace(self, kind=REPLY, body=body)


class Reader:
    """Reads the values of a body one after the other.

    Each method raises Malformed if the body does not contain the value.
    """

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def number(self) -> int:
        """Read an unsigned number of 32 bits, or raise Malformed if the body ends before."""
        return int(NUMBER.unpack(self._take(NUMBER.size))[0])

    def opaque(self) -> bytes:
        """Read bytes or a string of variable length, or raise Malformed if the body ends before."""
        length = self.number()
        data = self._take(length)
        self._take(-length % NUMBER.size)
        return data

    def optional(self) -> bytes | None:
        """Read a string that may be absent. Return None if it is absent.

        Raises:
            Malformed: The body ends before.
        """
        return self.opaque() if self.number() else None

    def strings(self) -> dict[str, list[bytes]]:
        """Read typed parameters, and return the strings among them by name.

        A name may occur several times. Numbers are skipped.

        Raises:
            Malformed: There are more than ``MOST_PARAMETERS``, a type is unknown, or the body ends
                before.
        """
        values_by_name: dict[str, list[bytes]] = {}
        count = self.number()
        if count > MOST_PARAMETERS:
            raise Malformed(f"the call has more than {MOST_PARAMETERS} parameters")
        for _ in range(count):
            name, kind = self.opaque().decode(errors="replace"), self.number()
            if kind == STRING:
                values_by_name.setdefault(name, []).append(self.opaque())
            elif kind in NUMBERS:
                self._take(NUMBERS[kind])
            else:
                raise Malformed(f"a parameter has the unknown type {kind}")
        return values_by_name

    def end(self) -> None:
        """Raise Malformed if the body has bytes that were not read."""
        if self._at != len(self._body):
            raise Malformed("the body has more values than the call")

    def _take(self, length: int) -> bytes:
        if length > len(self._body) - self._at:
            raise Malformed("the body ends within a value")
        self._at += length
        return self._body[self._at - length : self._at]


def number(value: int) -> bytes:
    """Return an unsigned number of 32 bits, in wire format."""
    return NUMBER.pack(value)


def opaque(data: bytes) -> bytes:
    """Return bytes of variable length, or the bytes of a string, in wire format."""
    return NUMBER.pack(len(data)) + data + bytes(-len(data) % NUMBER.size)


def strings(parameters: Sequence[tuple[str, str]]) -> bytes:
    """Return typed parameters of the type string, in wire format."""
    return number(len(parameters)) + b"".join(
        opaque(name.encode()) + number(STRING) + opaque(value.encode())
        for name, value in parameters
    )
