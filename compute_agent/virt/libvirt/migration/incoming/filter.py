# SPDX-License-Identifier: Apache-2.0
"""The filter for calls of another host's libvirtd to the local libvirtd.

Called by ``proxy`` with each packet of a connection. Each call is parsed completely and written
anew. Permitted are the calls that begin and end a migration, for one expected guest. The rewritten
calls have this host's own description, address and disks of the guest. The numbers are libvirt's
(remote_protocol.x, libvirt-domain.h) and stay the same in all releases.

Invariant: every forwarded byte was written here. Every other call is Refused.
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

#: Numbers of libvirt's procedures.
OPEN, CLOSE, SUPPORTS_FEATURE, AUTH_LIST, AUTH_POLKIT = 1, 2, 60, 66, 70
PREPARE, FINISH, WATCH_CLOSE, UNWATCH_CLOSE = 303, 306, 360, 361
PING, PONG = 1, 2
#: Flags of a migration. ALWAYS has those of every migration: live, peer to peer, persist at the
#: destination, undefine at the source. The next line has optional flags, and the last line the
#: flags that depend on the disks and on QEMU's encryption.
ALWAYS = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4
PAUSED, AUTO_CONVERGE, POST_COPY = 1 << 5, 1 << 13, 1 << 15
WITH_DISKS, UNCHECKED, ENCRYPTED = 1 << 7, 1 << 9, 1 << 16
#: Bytes of a packet: of packets with domain descriptions, and of all others.
MOST, MOST_PLAIN = 1 << 20, 4096
MOST_FEATURE = 63


class Refused(Exception):
    """A call that is not permitted. The text is for this host's log."""


class Filter:
    """Rewrites the calls of one connection.

    Args:
        expected: Returns the record of a server, or None if the connected host may not send this
            server.
        uri: The URI under which the local libvirtd is opened.
    """

    def __init__(self, expected: Callable[[str], Arrival | None], uri: str) -> None:
        self._find_expected, self._uri = expected, uri
        #: The record of the guest that the first migration call named. None before that call.
        self.arrival: Arrival | None = None
        self._calls = {
            AUTH_LIST: _rewrite_without_arguments,
            AUTH_POLKIT: _rewrite_without_arguments,
            OPEN: self._rewrite_open,
            SUPPORTS_FEATURE: _rewrite_feature,
            WATCH_CLOSE: _rewrite_without_arguments,
            UNWATCH_CLOSE: _rewrite_without_arguments,
            PREPARE: self._rewrite_prepare,
            FINISH: self._rewrite_finish,
            CLOSE: _rewrite_without_arguments,
        }

    @staticmethod
    def may_be_long(header: tuple[int, ...]) -> bool:
        """Return True if a packet with this header may have more than ``MOST_PLAIN`` bytes.

        ``header`` has the numbers of ``rpc.HEADER``.
        """
        return header[1] == REMOTE and header[3] in (PREPARE, FINISH)

    def rewrite(self, data: bytes) -> bytes:
        """Return the packet to send to the local libvirtd in place of the packet ``data``.

        Raises:
            Refused: The packet is malformed, or the call is not permitted.
        """
        try:
            packet = Packet.read(data)
            return self._rewrite(packet)
        except (rpc.Malformed, description.Unfit) as problem:
            raise Refused(str(problem)) from problem

    def _rewrite(self, packet: Packet) -> bytes:
        if packet.version != VERSION or packet.status != OK:
            raise Refused(f"the packet has version {packet.version}, status {packet.status}")
        if (packet.program, packet.kind) == (KEEPALIVE, MESSAGE):
            if packet.procedure not in (PING, PONG) or packet.body:
                raise Refused("the keepalive message is not valid")
            return Packet(KEEPALIVE, packet.procedure, MESSAGE, packet.serial).to_bytes()
        if (packet.program, packet.kind) != (REMOTE, CALL) or packet.procedure not in self._calls:
            raise Refused(
                f"the call is not permitted: program {packet.program:#x}, procedure {packet.procedure}, kind "
                f"{packet.kind}"
            )
        reader = Reader(packet.body)
        body = self._calls[packet.procedure](reader)
        reader.end()
        return Packet(REMOTE, packet.procedure, CALL, packet.serial, body).to_bytes()

    def _rewrite_open(self, reader: Reader) -> bytes:
        reader.optional()
        if reader.number():
            raise Refused("the call opens libvirt with flags")
        return rpc.number(1) + rpc.opaque(self._uri.encode()) + rpc.number(0)

    def _rewrite_prepare(self, reader: Reader) -> bytes:
        descriptions, cookie, flags = (
            reader.strings().get("destination_xml", []),
            reader.opaque(),
            reader.number(),
        )
        if len(descriptions) != 1:
            raise Refused("the migration does not have exactly one parameter destination_xml")
        server = description.uuid_of(descriptions[0])
        arrival = self._find_expected(server)
        if arrival is None or (self.arrival is not None and self.arrival.server != server):
            raise Refused(f"domain {server[:40]!r} is not expected from this host")
        _check_flags(arrival, flags)
        own_xml = description.domain(arrival.xml, descriptions[0], server, arrival.fence)
        parameters = [("destination_xml", own_xml), ("migrate_uri", f"tcp://{arrival.address}")]
        if not arrival.shared:
            parameters += [("migrate_disks", name) for name in running_domain.disks(own_xml)]
        self.arrival = arrival
        return (
            rpc.strings(parameters)
            + rpc.opaque(description.cookie(cookie, server))
            + rpc.number(flags)
        )

    def _rewrite_finish(self, reader: Reader) -> bytes:
        reader.strings()
        cookie, flags, cancelled = reader.opaque(), reader.number(), reader.number()
        if self.arrival is None:
            raise Refused("the call ends a migration that was not begun on this connection")
        _check_flags(self.arrival, flags)
        server = self.arrival.server
        parameters = rpc.strings([("destination_name", domain_name(server))])
        return (
            parameters
            + rpc.opaque(description.cookie(cookie, server))
            + rpc.number(flags)
            + rpc.number(int(cancelled != 0))
        )


def _check_flags(arrival: Arrival, flags: int) -> None:
    copies = not arrival.shared and bool(running_domain.disks(arrival.xml))
    unchecked = not copies or bool(volume_xml.find_disks(arrival.xml))
    needed = ALWAYS | ENCRYPTED * arrival.encrypted | WITH_DISKS * copies
    allowed = needed | PAUSED | AUTO_CONVERGE | POST_COPY | ENCRYPTED | UNCHECKED * unchecked
    if flags & needed != needed or flags & ~allowed:
        raise Refused(
            f"the migration of server {arrival.server} has the flags {flags:#x}; {needed:#x} are required and "
            f"{allowed:#x} permitted"
        )


def _rewrite_without_arguments(reader: Reader) -> bytes:
    return b""


def _rewrite_feature(reader: Reader) -> bytes:
    feature = reader.number()
    if feature > MOST_FEATURE:
        raise Refused(f"the call queries the unknown feature {feature}")
    return rpc.number(feature)
