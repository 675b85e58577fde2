# SPDX-License-Identifier: Apache-2.0
"""The proxy process between another host's libvirtd and this host's.

Started by ``records`` while a guest is expected. The proxy listens over TLS and accepts the hosts
from which guests are expected, by their certificates. After ``filter`` has rewritten a call, the
proxy forwards the call to the local libvirtd and returns the answer. The proxy also answers the
source's question whether the guest is here.

A connection ends when the guest's record is removed. When the process's standard input ends, the
proxy stops listening and exits after the last connection. Therefore a restart of the agent breaks
no migration.

Invariant: an unauthenticated peer has a connection for at most ``HANDSHAKE_SECONDS``, and no slow
peer holds a thread for long. A refusal is counted, logged, and closes the connection.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.security.tls_socket import TlsSocket
from common.security.unproved import origin, to_shed
from common.service.log import get_logger
from common.service.log import start as start_log
from compute_agent.virt.libvirt.migration.incoming import rpc
from compute_agent.virt.libvirt.migration.incoming.filter import MOST, MOST_PLAIN, Filter, Refused
from compute_agent.virt.libvirt.migration.incoming.records import READY, Arrival, Records, Settings
from compute_agent.virt.libvirt.migration.incoming.rpc import (
    NUMBER,
    QUESTION,
    Malformed,
    Packet,
    Reader,
)

log = get_logger(__name__)
#: Time limits for the handshake, for one packet in either direction, and for a connection to name a
#: guest.
HANDSHAKE_SECONDS, PACKET_SECONDS, NAME_SECONDS = 10.0, 30.0, 60.0
LOOK_EVERY, BIND_SECONDS = 0.25, 3.0
MOST_CONNECTIONS, CHUNK = 32, 64 << 10
#: Minimum seconds between two log lines about refusals.
LOG_EVERY = 1.0
#: The byte that libvirt's servers send when they have accepted a client's certificate.
WELCOME = b"\1"
#: Answers to the question whether a guest is here.
ABSENT, ARRIVING, HERE = b"absent", b"arriving", b"here"
Side = socket.socket | TlsSocket


class Proxy:
    """Listens for other hosts and serves their connections.

    Args:
        settings: Address, certificates, and the local libvirtd.
        find: Returns ABSENT, ARRIVING or HERE for the guest of a server on this host.
        handshake: Limit of the handshake in seconds. Tests shorten this and the other times.
        packet: Limit of one packet in either direction, in seconds.
        name: Limit in seconds until a connection names a guest.
        bind: Seconds for which the proxy waits for a port in use.
        look: Seconds between two checks of the limits.

    Raises:
        OSError: The port is not available.
    """

    def __init__(
        self,
        settings: Settings,
        find: Callable[[str], bytes],
        *,
        handshake: float = HANDSHAKE_SECONDS,
        packet: float = PACKET_SECONDS,
        name: float = NAME_SECONDS,
        bind: float = BIND_SECONDS,
        look: float = LOOK_EVERY,
    ) -> None:
        self.settings, self.find = settings, find
        self.handshake, self.packet, self.name, self._poll_seconds = handshake, packet, name, look
        self.records = Records(Path(settings.folder))
        self.refused, self._log_at = 0, 0.0
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._listener = _listen_at(settings.address, settings.port, bind)
        self.port = int(self._listener.getsockname()[1])
        self._drains = threading.Event()

    def serve(self) -> None:
        """Serve connections until ``drain`` was called and the last connection has ended."""
        threading.Thread(target=self._listen, name="incoming-listens", daemon=True).start()
        while not (self._drains.wait(self._poll_seconds) and not self._open):
            with self._lock:
                connections = list(self._open)
            for connection in connections:
                connection.look(time.monotonic())
            if self._drains.is_set():
                time.sleep(self._poll_seconds)

    def drain(self) -> None:
        """Stop accepting connections. Open connections continue."""
        self._drains.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def refuse(self, peer: str, reason: object) -> None:
        """Count a refusal, and log it unless one was logged in the last ``LOG_EVERY`` seconds."""
        now = time.monotonic()
        with self._lock:
            self.refused += 1
            was_logged = self._log_at > now
            if not was_logged:
                self._log_at = now + LOG_EVERY
        if not was_logged:
            log.warning(
                "a request for an incoming migration is refused",
                peer=peer,
                count=self.refused,
                problem=reason,
            )

    def _listen(self) -> None:
        while not self._drains.is_set():
            try:
                plain, peer = self._listener.accept()
            except OSError as problem:
                if not self._drains.is_set():
                    log.warning(
                        "a connection for an incoming migration cannot be accepted", problem=problem
                    )
                    self._drains.wait(LOOK_EVERY)
                continue
            connection = _Connection(self, plain, str(peer[0]))
            with self._lock:
                is_full = len(self._open) >= MOST_CONNECTIONS
                if is_full and (
                    unproved := [candidate for candidate in self._open if not candidate.is_proved]
                ):
                    # Unauthenticated connections must not keep other hosts out.
                    peers = {candidate: origin(candidate.peer) for candidate in unproved}
                    shed = to_shed(sorted(unproved, key=lambda candidate: candidate.began), peers)
                    shed.end(f"all {MOST_CONNECTIONS} connections are in use")
                    self._open.discard(shed)
                    is_full = False
                if is_full:
                    plain.close()
                else:
                    self._open.add(connection)
            if is_full:
                self.refuse(str(peer[0]), f"all {MOST_CONNECTIONS} connections are in use")
            else:
                threading.Thread(
                    target=self._serve, args=(connection,), name="incoming", daemon=True
                ).start()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.run()
            if connection.is_over:
                raise Refused(connection.is_over)
        except (Refused, Malformed) as problem:
            self.refuse(connection.peer, problem)
        except (OSError, ValueError) as problem:
            self.refuse(connection.peer, f"the connection broke: {problem}")
        except Exception:
            log.exception(
                "a connection for an incoming migration ended unexpectedly", peer=connection.peer
            )
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)


class _Connection:
    """A connection of another host.

    ``Proxy.serve`` calls ``look``, which enforces the time limits. Therefore the sockets may block.
    """

    def __init__(self, proxy: Proxy, plain: socket.socket, peer: str) -> None:
        self.peer, self.began, self.is_proved = peer, time.monotonic(), False
        self._proxy, self._plain = proxy, plain
        self._client: Side = plain
        self._local: socket.socket | None = None
        self._names: frozenset[str] = frozenset()
        self._filter = Filter(self._find_expected, proxy.settings.name)
        self._name_by = time.monotonic() + proxy.name
        #: The time by which the current read must end. None: no limit.
        self._read_by: float | None = time.monotonic() + proxy.handshake
        self._sent_by: float | None = None
        #: Why this host ended the connection, or "" if the peer is not at fault.
        self.is_over = ""

    def run(self) -> None:
        """Authenticate the peer, and serve the connection until the end.

        Raises:
            Refused: The peer is not an expected source, or may not make this call.
            Malformed: The peer does not speak the protocol.
            OSError: The TLS handshake failed, the connection broke, or the local libvirtd cannot be
                reached.
        """
        self._authenticate()
        self._read_by = None
        first = self._receive()
        if first is None:
            return
        if Packet.read(first).program == QUESTION:
            self._answer(Packet.read(first))
            return
        self._local = _connect(self._proxy.settings.socket)
        answers = threading.Thread(
            target=self._return_answers, args=(self._local,), name="incoming-back", daemon=True
        )
        answers.start()
        try:
            packet: bytes | None = first
            while packet is not None:
                self._local.sendall(self._filter.rewrite(packet))
                packet = self._receive()
        finally:
            _shut(self._local)
            answers.join()

    def look(self, now: float) -> None:
        """End the connection if a time limit has passed or the guest is not expected any more."""
        arrival = self._filter.arrival
        if (self._read_by is not None and now > self._read_by) or (
            self._sent_by is not None and now > self._sent_by
        ):
            self.end("the peer did not send or receive a packet within the time limit")
        elif arrival is None and now > self._name_by:
            self.end("the peer did not name a guest within the time limit")
        elif arrival is not None and not _is_same(self._find_expected(arrival.server), arrival):
            self.end("")

    def close(self) -> None:
        for side in (self._client, self._plain, self._local):
            if side is not None:
                with contextlib.suppress(OSError):
                    side.close()

    def end(self, fault: str) -> None:
        """Close the connection from another thread, so that ``run`` ends.

        Args:
            fault: The reason, if the proxy should count and log a refusal, else "".
        """
        self.is_over = self.is_over or fault
        _shut(self._client)

    def _authenticate(self) -> None:
        """Authenticate the peer by its certificate, or by its address without TLS.

        With TLS, send the welcome byte that libvirt's clients expect.

        Raises:
            Refused: No guest is expected from this peer.
            OSError: The TLS handshake failed.
        """
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._proxy.settings.tls
        if tls is None:
            self._names = frozenset([_normalize_address(self.peer)])
        else:
            context = tls.for_server()
            # libvirt's client expects the welcome byte before any session ticket.
            context.num_tickets = 0
            secured = TlsSocket(self._plain, context)
            self._client = secured
            secured.handshake()
            self._names = frozenset(_normalize_address(name) for name in secured.names())
        if not any(
            _normalize_address(arrival.source) in self._names
            for arrival in self._proxy.records.all()
        ):
            raise Refused(
                f"no guest is expected from {', '.join(sorted(self._names)) or 'a peer without a name'}"
            )
        self.is_proved = True
        if tls is not None:
            self._send(WELCOME)

    def _find_expected(self, server: str) -> Arrival | None:
        arrival = self._proxy.records.find(server)
        return (
            arrival
            if arrival is not None and _normalize_address(arrival.source) in self._names
            else None
        )

    def _receive(self) -> bytes | None:
        """Return the next packet, or None at the end of the connection.

        Raises:
            Refused: The packet is longer than permitted or shorter than a header.
            Malformed: The connection ended in the middle of the packet.
            OSError: The connection broke.
        """
        first_byte = self._client.recv(1)
        if not first_byte:
            return None
        self._read_by = time.monotonic() + self._proxy.packet
        data = bytearray(first_byte + self._read_exactly(NUMBER.size - 1))
        length = int(NUMBER.unpack(data)[0])
        if not rpc.HEADER.size <= length <= MOST:
            raise Refused(f"a packet has {length} bytes, more than permitted or less than a header")
        data += self._read_exactly(rpc.HEADER.size - len(data))
        if length > MOST_PLAIN and not Filter.may_be_long(rpc.HEADER.unpack(data)):
            raise Refused(f"a packet has {length} bytes, more than permitted for this call")
        data += self._read_exactly(length - len(data))
        self._read_by = None
        return bytes(data)

    def _read_exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            read = self._client.recv(min(CHUNK, length - len(data)))
            if not read:
                raise Malformed("the connection ended in the middle of a packet")
            data += read
        return bytes(data)

    def _send(self, data: bytes) -> None:
        self._sent_by = time.monotonic() + self._proxy.packet
        self._client.sendall(data)
        self._sent_by = None

    def _return_answers(self, local: socket.socket) -> None:
        """Copy answers from the local libvirtd to the peer until either side ends.

        Then shut the peer's connection down. Runs in a thread.
        """
        try:
            while data := local.recv(CHUNK):
                self._send(data)
        except OSError as problem:
            log.info(
                "no answer can be sent to the source of an incoming migration",
                peer=self.peer,
                problem=problem,
            )
        _shut(self._client)

    def _answer(self, packet: Packet) -> None:
        reader = Reader(packet.body)
        server = reader.opaque().decode(errors="replace")
        reader.end()
        if self._find_expected(server) is None:
            raise Refused(f"domain {server[:40]!r} is not expected from this host")
        self._send(packet.reply(rpc.opaque(self._proxy.find(server))).to_bytes())


def _is_same(now: Arrival | None, then: Arrival) -> bool:
    return now is not None and (now.fence, now.source) == (then.fence, then.source)


def _normalize_address(name: str) -> str:
    """Return a host name in lower case, or an IP address in normal form without brackets."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _listen_at(address: str, port: int, seconds: float) -> socket.socket:
    """Return a socket that listens at this address and port.

    If the port is in use, for example by the previous agent's proxy, retry for ``seconds``.

    Raises:
        OSError: The port is not available.
    """
    family, deadline = (
        socket.AF_INET6 if ":" in address else socket.AF_INET,
        time.monotonic() + seconds,
    )
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=MOST_CONNECTIONS)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_EVERY)


def _shut(side: Side) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


def _make_finder(uri: str) -> Callable[[str], bytes]:
    def find(server: str) -> bytes:
        # Imported here because the proxy seldom needs libvirt's library.
        from compute_agent.virt.libvirt.domains.connection import Connection

        libvirt = Connection(uri)
        try:
            domain = libvirt.find(server)
        finally:
            libvirt.close()
        if domain is not None and domain.is_incoming:
            return ARRIVING
        return HERE if domain is not None and domain.active else ABSENT

    return find


def main(settings: str) -> None:
    """Run the proxy process until standard input and the last connection have ended.

    The first line of the output is ``READY``, or the reason why the proxy cannot listen. In the
    second case the function returns at once. SIGTERM and SIGINT are ignored.

    Args:
        settings: ``Settings`` as JSON.
    """
    start_log()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A service manager signals all processes of the agent. To break no migration, this process
        # ends by ``drain`` only.
        signal.signal(number, signal.SIG_IGN)
    proxy_settings = Settings.read(settings)
    try:
        proxy = Proxy(proxy_settings, _make_finder(proxy_settings.uri))
    except OSError as problem:
        print(problem, flush=True)
        return
    print(READY, flush=True)

    def drain() -> None:
        sys.stdin.buffer.read()
        proxy.drain()

    threading.Thread(target=drain, name="incoming-drains", daemon=True).start()
    proxy.serve()
