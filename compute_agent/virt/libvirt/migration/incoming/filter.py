# SPDX-License-Identifier: Apache-2.0
"""Which of another libvirtd's calls reach the local one, and as what.

Called by ``proxy`` with each packet of a connection. A call is read as a whole and written anew:
those that a migration between two libvirtds begins and ends with, for one expected guest, with this
host's own description of it, its own address and disks. The numbers are libvirt's
(remote_protocol.x, libvirt-domain.h), which change with no release. Must stay true: nothing is
passed on that is not made here; everything else is Refused.
"""

from __future__ import annotations

from collections.abc import Callable

from compute_agent.virt.libvirt.migration.incoming import description, rpc
from compute_agent.virt.libvirt.migration.incoming.records import Arrival
from compute_agent.virt.libvirt.migration.incoming.rpc import (
    CALL,
    KEEPALIVE,
    MESSAGE,
    OK,
    REMOTE,
    VERSION,
    Packet,
    Reader,
)
from compute_agent.virt.libvirt.xml import running_domain, volume_xml
from compute_agent.virt.libvirt.xml.domain_xml import domain_name

#: Procedures.
OPEN, CLOSE, SUPPORTS_FEATURE, AUTH_LIST, AUTH_POLKIT = 1, 2, 60, 66, 70
PREPARE, FINISH, WATCH_CLOSE, UNWATCH_CLOSE = 303, 306, 360, 361
PING, PONG = 1, 2
#: Flags of a migration: the four of every one of ours, those that may be, and those that depend on
#: where disks are and on whether QEMU's own connection is encrypted.
# live, between libvirtds, stays there, leaves nothing behind
ALWAYS = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4
PAUSED, AUTO_CONVERGE, POST_COPY = 1 << 5, 1 << 13, 1 << 15
WITH_DISKS, UNCHECKED, ENCRYPTED = 1 << 7, 1 << 9, 1 << 16
#: Bytes of a packet: of those that carry descriptions, and of others.
MOST, MOST_PLAIN = 1 << 20, 4096
MOST_FEATURE = 63


class Refused(Exception):
    """The other host said what is not let through; the text says why, for this host's log."""


class Filter:
    """The calls of one connection. ``expected``: the guest of this id, if it is expected from who
    is connected;
    ``uri``: what the local libvirtd is opened as."""

    def __init__(self, expected: Callable[[str], Arrival | None], uri: str) -> None:
        self._expected, self._uri = expected, uri
        #: What this connection is about, from the first call that named it.
        self.arrival: Arrival | None = None
        self._calls = {
            AUTH_LIST: _empty,
            AUTH_POLKIT: _empty,
            OPEN: self._open,
            SUPPORTS_FEATURE: _feature,
            WATCH_CLOSE: _empty,
            UNWATCH_CLOSE: _empty,
            PREPARE: self._prepare,
            FINISH: self._finish,
            CLOSE: _empty,
        }

    @staticmethod
    def may_be_long(header: tuple[int, ...]) -> bool:
        """Whether a packet that begins so may have more than ``MOST_PLAIN`` bytes."""
        return header[1] == REMOTE and header[3] in (PREPARE, FINISH)

    def passed(self, data: bytes) -> bytes:
        """The packet that goes to the local libvirtd in place of this one. Raises Refused."""
        try:
            packet = Packet.read(data)
            return self._passed(packet)
        except (rpc.Malformed, description.Unfit) as problem:
            raise Refused(str(problem)) from problem

    def _passed(self, packet: Packet) -> bytes:
        if packet.version != VERSION or packet.status != OK:
            raise Refused(f"version {packet.version}, status {packet.status}")
        if (packet.program, packet.kind) == (KEEPALIVE, MESSAGE):
            if packet.procedure not in (PING, PONG) or packet.body:
                raise Refused("it keeps alive in its own way")
            return Packet(KEEPALIVE, packet.procedure, MESSAGE, packet.serial).written()
        if (packet.program, packet.kind) != (REMOTE, CALL) or packet.procedure not in self._calls:
            raise Refused(
                f"program {packet.program:#x}, procedure {packet.procedure}, kind {packet.kind}"
            )
        reader = Reader(packet.body)
        body = self._calls[packet.procedure](reader)
        reader.end()
        return Packet(REMOTE, packet.procedure, CALL, packet.serial, body).written()

    def _open(self, reader: Reader) -> bytes:
        reader.optional()
        if reader.number():
            raise Refused("a connection with flags")
        return rpc.number(1) + rpc.opaque(self._uri.encode()) + rpc.number(0)

    def _prepare(self, reader: Reader) -> bytes:
        sent, cookie, flags = (
            reader.strings().get("destination_xml", []),
            reader.opaque(),
            reader.number(),
        )
        if len(sent) != 1:
            raise Refused("a migration of no domain, or of several")
        server = description.uuid_of(sent[0])
        arrival = self._expected(server)
        if arrival is None or (self.arrival is not None and self.arrival.server != server):
            raise Refused(f"domain {server[:40]!r} is not expected from this host")
        _check_flags(arrival, flags)
        own = description.domain(arrival.xml, sent[0], server, arrival.fence)
        made = [("destination_xml", own), ("migrate_uri", f"tcp://{arrival.address}")]
        if not arrival.shared:
            made += [("migrate_disks", name) for name in running_domain.disks(own)]
        self.arrival = arrival
        return (
            rpc.strings(made) + rpc.opaque(description.cookie(cookie, server)) + rpc.number(flags)
        )

    def _finish(self, reader: Reader) -> bytes:
        reader.strings()
        cookie, flags, cancelled = reader.opaque(), reader.number(), reader.number()
        if self.arrival is None:
            raise Refused("the end of what was not begun on this connection")
        _check_flags(self.arrival, flags)
        server = self.arrival.server
        made = rpc.strings([("destination_name", domain_name(server))])
        return (
            made
            + rpc.opaque(description.cookie(cookie, server))
            + rpc.number(flags)
            + rpc.number(int(cancelled != 0))
        )


def _check_flags(arrival: Arrival, flags: int) -> None:
    copies = not arrival.shared and bool(running_domain.disks(arrival.xml))
    unchecked = not copies or bool(volume_xml.found(arrival.xml))
    needed = ALWAYS | ENCRYPTED * arrival.encrypted | WITH_DISKS * copies
    allowed = needed | PAUSED | AUTO_CONVERGE | POST_COPY | ENCRYPTED | UNCHECKED * unchecked
    if flags & needed != needed or flags & ~allowed:
        raise Refused(
            f"a migration with flags {flags:#x}, where {needed:#x} are needed and {allowed:#x} possible"
        )


def _empty(reader: Reader) -> bytes:
    return b""


def _feature(reader: Reader) -> bytes:
    feature = reader.number()
    if feature > MOST_FEATURE:
        raise Refused(f"feature {feature}")
    return rpc.number(feature)
