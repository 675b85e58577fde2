# SPDX-License-Identifier: Apache-2.0
"""The process between another host's libvirtd and this host's, while a guest is expected from
there.

Started by ``records``. It listens over TLS, takes whose certificate names the source of an expected
guest, hands what ``filter`` lets through to the local libvirtd, and its answers back; and it tells
the source whether the guest is here. A connection ends with its guest's record. When the input of
the process ends, it stops listening; it ends with its last connection, so that an agent that is
killed or started anew breaks no migration. Must stay true: whoever proves nothing has a connection
for ``HANDSHAKE_SECONDS``, and nobody else's slowness holds a thread for long; what is refused is
counted and logged, and closes the connection.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.security.tls_socket import TlsSocket
from common.security.unproved import origin, to_shed
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

log = logging.getLogger(__name__)
#: For proving itself; for a packet that was begun, in each direction; until a connection says which
#: guest it is about.
HANDSHAKE_SECONDS, PACKET_SECONDS, NAME_SECONDS = 10.0, 30.0, 60.0
LOOK_EVERY, BIND_SECONDS = 0.25, 3.0
MOST_CONNECTIONS, CHUNK = 32, 64 << 10
LOG_EVERY = 1.0  #: seconds between two lines about what was refused
#: What libvirt's servers say once they have accepted a client's certificate.
WELCOME = b"\1"
#: What is told of a guest.
ABSENT, ARRIVING, HERE = b"absent", b"arriving", b"here"
Side = socket.socket | TlsSocket


class Proxy:
    """``find(server)``: ABSENT, ARRIVING or HERE. The times are those of this module unless tests
    are quicker. Raises OSError when it cannot listen."""

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
        self.handshake, self.packet, self.name, self._look_every = handshake, packet, name, look
        self.records = Records(Path(settings.folder))
        self.refused, self._log_at = 0, 0.0
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._listener = _listening(settings.address, settings.port, bind)
        self.port = int(self._listener.getsockname()[1])
        self._drains = threading.Event()

    def serve(self) -> None:
        """Until ``drain`` was called and the last connection is over."""
        threading.Thread(target=self._listen, name="incoming-listens", daemon=True).start()
        while not (self._drains.wait(self._look_every) and not self._open):
            with self._lock:
                connections = list(self._open)
            for connection in connections:
                connection.look(time.monotonic())
            if self._drains.is_set():
                time.sleep(self._look_every)

    def drain(self) -> None:
        """Nobody new is taken."""
        self._drains.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def refuse(self, peer: str, why: object) -> None:
        """Count and log."""
        now = time.monotonic()
        with self._lock:
            self.refused += 1
            was_logged, self._log_at = self._log_at > now, max(self._log_at, now + LOG_EVERY)
        if not was_logged:
            log.warning(
                "incoming migrations: what %s wants is refused (%d so far): %s",
                peer,
                self.refused,
                why,
            )

    def _listen(self) -> None:
        while not self._drains.is_set():
            try:
                plain, peer = self._listener.accept()
            except OSError as problem:
                if not self._drains.is_set():
                    log.warning("incoming migrations: no connection could be accepted: %s", problem)
                    self._drains.wait(LOOK_EVERY)
                continue
            connection = _Connection(self, plain, str(peer[0]))
            with self._lock:
                full = len(self._open) >= MOST_CONNECTIONS
                if full and (unproved := [one for one in self._open if not one.is_proved]):
                    # Silent connections keep no host out.
                    peers = {one: origin(one.peer) for one in unproved}
                    late = to_shed(sorted(unproved, key=lambda one: one.began), peers)
                    late.end(f"{MOST_CONNECTIONS} connections are open")
                    self._open.discard(late)
                    full = False
                if full:
                    plain.close()
                else:
                    self._open.add(connection)
            if full:
                self.refuse(str(peer[0]), f"{MOST_CONNECTIONS} connections are open")
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
                "incoming migrations: the connection of %s ended unexpectedly", connection.peer
            )
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)


class _Connection:
    """One of another host's. Its times are kept by whoever calls ``look``, so that its sockets may
    block."""

    def __init__(self, proxy: Proxy, plain: socket.socket, peer: str) -> None:
        self.peer, self.began, self.is_proved = peer, time.monotonic(), False
        self._proxy, self._plain = proxy, plain
        self._client: Side = plain
        self._local: socket.socket | None = None
        self._names: frozenset[str] = frozenset()
        self._filter = Filter(self._expected, proxy.settings.name)
        self._name_by = time.monotonic() + proxy.name
        #: When what it does now must be done; none: it may wait.
        self._read_by: float | None = time.monotonic() + proxy.handshake
        self._sent_by: float | None = None
        #: Why it was ended, if for a fault of the other side's.
        self.is_over = ""

    def run(self) -> None:
        """Raises Refused, Malformed, OSError."""
        self._prove()
        self._read_by = None
        first = self._receive()
        if first is None:
            return
        if Packet.read(first).program == QUESTION:
            self._answer(Packet.read(first))
            return
        self._local = _connected(self._proxy.settings.socket)
        back = threading.Thread(
            target=self._bring_back, args=(self._local,), name="incoming-back", daemon=True
        )
        back.start()
        try:
            packet: bytes | None = first
            while packet is not None:
                self._local.sendall(self._filter.passed(packet))
                packet = self._receive()
        finally:
            _shut(self._local)
            back.join()

    def look(self, now: float) -> None:
        """End it when its time is over, or its guest is not expected any more."""
        arrival = self._filter.arrival
        if (self._read_by is not None and now > self._read_by) or (
            self._sent_by is not None and now > self._sent_by
        ):
            self.end("it is too slow")
        elif arrival is None and now > self._name_by:
            self.end("it does not say what it is about")
        elif arrival is not None and not _is_same(self._expected(arrival.server), arrival):
            self.end("")

    def close(self) -> None:
        for side in (self._client, self._plain, self._local):
            if side is not None:
                with contextlib.suppress(OSError):
                    side.close()

    def end(self, why: str) -> None:
        """End it; ``why``: the fault of the other side, if there is one."""
        self.is_over = self.is_over or why
        _shut(self._client)

    def _prove(self) -> None:
        """Who is there, and whether anybody is expected from them."""
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._proxy.settings.tls
        if tls is None:
            self._names = frozenset([_address(self.peer)])
        else:
            context = tls.for_server()
            # libvirt's client takes nothing but the welcome for the first that it reads
            context.num_tickets = 0
            secured = TlsSocket(self._plain, context)
            self._client = secured
            secured.handshake()
            self._names = frozenset(_address(name) for name in secured.names())
        if not any(_address(one.source) in self._names for one in self._proxy.records.all()):
            raise Refused(f"nothing is expected from {', '.join(sorted(self._names)) or 'nobody'}")
        self.is_proved = True
        if tls is not None:
            self._send(WELCOME)

    def _expected(self, server: str) -> Arrival | None:
        found = self._proxy.records.find(server)
        return found if found is not None and _address(found.source) in self._names else None

    def _receive(self) -> bytes | None:
        """The next packet; None at the end."""
        begun = self._client.recv(1)
        if not begun:
            return None
        self._read_by = time.monotonic() + self._proxy.packet
        data = bytearray(begun + self._exactly(NUMBER.size - 1))
        length = int(NUMBER.unpack(data)[0])
        if not rpc.HEADER.size <= length <= MOST:
            raise Refused(f"a packet of {length} bytes")
        data += self._exactly(rpc.HEADER.size - len(data))
        if length > MOST_PLAIN and not Filter.may_be_long(rpc.HEADER.unpack(data)):
            raise Refused(f"a packet of {length} bytes")
        data += self._exactly(length - len(data))
        self._read_by = None
        return bytes(data)

    def _exactly(self, length: int) -> bytes:
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

    def _bring_back(self, local: socket.socket) -> None:
        """The thread of what the local libvirtd says."""
        try:
            while data := local.recv(CHUNK):
                self._send(data)
        except OSError as problem:
            log.info("incoming migrations: %s takes no more answers: %s", self.peer, problem)
        _shut(self._client)

    def _answer(self, asked: Packet) -> None:
        reader = Reader(asked.body)
        server = reader.opaque().decode(errors="replace")
        reader.end()
        if self._expected(server) is None:
            raise Refused(f"domain {server[:40]!r} is not expected from this host")
        self._send(asked.reply(rpc.opaque(self._proxy.find(server))).written())


def _is_same(now: Arrival | None, then: Arrival) -> bool:
    return now is not None and (now.fence, now.source) == (then.fence, then.source)


def _address(name: str) -> str:
    """A name in one way of writing it."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()


def _connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def _listening(address: str, port: int, seconds: float) -> socket.socket:
    """Where the proxy of the last agent may still listen for a moment."""
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


def _finder(uri: str) -> Callable[[str], bytes]:
    def find(server: str) -> bytes:
        # what it loads is seldom needed
        from compute_agent.virt.libvirt.domains.connection import Connection

        libvirt = Connection(uri)
        try:
            found = libvirt.find(server)
        finally:
            libvirt.close()
        if found is not None and found.is_incoming:
            return ARRIVING
        return HERE if found is not None and found.active else ABSENT

    return find


def main(settings: str) -> None:
    """The process: says on its output that it listens, or why not."""
    start_log()
    for number in (signal.SIGTERM, signal.SIGINT):
        # a service manager stops all at once; this ends as said above
        signal.signal(number, signal.SIG_IGN)
    read = Settings.read(settings)
    try:
        proxy = Proxy(read, _finder(read.uri))
    except OSError as problem:
        print(problem, flush=True)
        return
    print(READY, flush=True)

    def drain() -> None:
        sys.stdin.buffer.read()
        proxy.drain()

    threading.Thread(target=drain, name="incoming-drains", daemon=True).start()
    proxy.serve()
