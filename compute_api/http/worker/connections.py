# SPDX-License-Identifier: Apache-2.0
"""The connections of a process: one thread has all of them and waits for none.

A request gets a thread when it is whole, and its answer leaves the thread. A slow client is
disconnected at its deadline. Where there are too many connections, the address with the most loses
the one that has waited longest, so that a new client always gets in."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from functools import partial
from typing import Any

from gunicorn.config import Config
from gunicorn.http.errors import ParseException

from common.security.tls_socket import TlsSocket
from common.security.unproved import origin
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.request_buffer import RequestBuffer
from compute_api.http.worker.response_buffer import FULL_BYTES, ClientSocket, ResponseBuffer

log = logging.getLogger(__name__)
# connections accepted, bytes read, before others have their turn
ACCEPT_BATCH, READ_BYTES = (
    64,
    256 * 1024,
)
LINGER_SECONDS = 2.0  # seconds for who still sends what nobody reads
SPARE_DESCRIPTORS = 256  # file descriptors that are no client's
#: What accept says when the process or the machine has too many open files.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionPhase(Enum):
    """What a connection waits for."""

    IDLE = "the first byte of a request"
    HEAD = "the end of its head"
    BODY = "the end of its body"
    TURN = "its turn to stream a body"
    ANSWER = "the answer, or the client to take it"
    LINGER_SECONDS = "the client to hang up"


class ClientConnection:
    """One connection. Belongs to the thread of ``ClientConnections``; ``incoming`` and ``answer``
    to who answers it meanwhile."""

    def __init__(
        self, sock: ClientSocket, peer: object, tag: Hashable, clients: ClientConnections
    ) -> None:
        self.sock, self.peer, self.tag = sock, peer, tag
        self.key = (tag, origin(peer))
        self.incoming = RequestBuffer(clients.config, peer, clients.limits.max_body_bytes)
        self.out = ResponseBuffer(sock, partial(clients.defer, clients.wait_for, self))
        self.phase, self.deadline, self.since, self.from_byte = ConnectionPhase.IDLE, 0.0, 0.0, 0
        self.events = selectors.EVENT_READ
        self.held, self.is_open = 0, True
        self.answer: Any = None  #: for who answers
        self.admission: Any = None  #: the request's ``fair_share.Admission``, for who answers
        self.stream: BodyStream | None = None
        self.is_given = self.is_paused = self.has_ended = self.is_last = False


class ClientConnections:
    """``begin`` is called with a request that is whole, ``go_on`` with an answer that has room
    again; both hand it to a thread. ``refuse`` words an error; ``defer`` runs a function in this
    thread; ``secure`` makes of a connection one that speaks TLS."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        config: Config,
        limits: ClientLimits,
        defer: Callable[..., None],
        begin: Callable[[ClientConnection], None],
        go_on: Callable[[ClientConnection], None],
        refuse: Callable[[int, str], bytes],
        secure: Callable[[socket.socket], TlsSocket] | None = None,
    ) -> None:
        self._secure = secure
        self.selector, self.config, self.limits, self.defer = selector, config, limits, defer
        self._begin, self._go_on, self._refuse = begin, go_on, refuse
        self._most = min(limits.max_connections, _descriptors() - SPARE_DESCRIPTORS)
        self._clients: dict[Hashable, dict[ClientConnection, None]] = {}
        self._count = self._held = 0
        self._streaming: Counter[Hashable] = Counter()  # by address
        self._turns: list[ClientConnection] = []
        self._next_check = 0.0
        self.is_ending = False

    def __len__(self) -> int:
        return self._count

    # --- coming ---
    def accept(self, listener: socket.socket, tag: Hashable = None) -> None:
        """Take who knocks."""
        for _ in range(ACCEPT_BATCH):
            try:
                sock, peer = listener.accept()
            except OSError as problem:
                if problem.errno in _FULL and not self._make_room(self._heaviest(len), None):
                    log.warning("no connection can be accepted: %s", problem)
                return
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._add(
                    ClientConnection(self._secure(sock) if self._secure else sock, peer, tag, self)
                )
            except (OSError, ValueError) as problem:
                log.warning("no TLS is spoken: %s", problem)
                sock.close()

    def _add(self, client: ClientConnection) -> None:
        own = self._clients.setdefault(client.key, {})
        own[client] = None
        self._count += 1
        client.deadline = time.monotonic() + self.limits.head_seconds
        self.selector.register(client.sock, client.events, partial(self._happened, client))
        if len(own) > self.limits.max_connections_per_address:
            self._make_room(own, client)
        elif self._count > self._most:
            self._make_room(self._heaviest(len), client)

    def _make_room(
        self, clients: Iterable[ClientConnection], newest: ClientConnection | None
    ) -> bool:
        """Drop who has waited longest without anything in hand, or else the newest."""
        for client in clients:
            if client.phase is not ConnectionPhase.ANSWER and client is not newest:
                self.drop(client)
                return True
        if newest is not None:
            self.drop(newest)
        return newest is not None

    def _heaviest(
        self, weight: Callable[[dict[ClientConnection, None]], int]
    ) -> list[ClientConnection]:
        heaviest: dict[ClientConnection, None] = (
            max(self._clients.values(), key=weight) if self._clients else {}
        )
        return list(heaviest)

    # --- what sockets say ---
    def _happened(self, client: ClientConnection, sock: socket.socket) -> None:
        try:
            if client.is_open and client.events & selectors.EVENT_WRITE:
                self.wait_for(client)
            if client.is_open and client.events & selectors.EVENT_READ:
                self._read(client)
        except Exception:
            log.exception("a client's connection failed unexpectedly")
            self.drop(client)

    def _read(self, client: ClientConnection) -> None:
        try:
            data = client.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.drop(client)
            return
        arrived = client.incoming.arrived
        if client.phase is ConnectionPhase.LINGER_SECONDS:
            if not data:
                self.drop(client)
            return
        if not data:
            self._ended(client)
            return
        arrived += data
        self._account(client)
        if not client.is_open:
            return
        if client.phase is not ConnectionPhase.ANSWER:
            self._advance(client)
        elif len(arrived) > READ_BYTES:
            self._listen(client, 0)

    def _ended(self, client: ClientConnection) -> None:
        """It sends nothing more, but may still read."""
        client.has_ended = True
        if client.phase is ConnectionPhase.BODY:
            client.incoming.cut()
            self._start(client)
        elif client.phase is ConnectionPhase.ANSWER:
            self._listen(client, 0)
        else:
            self.drop(client)

    def _advance(self, client: ClientConnection) -> None:
        """Look whether a request is whole by now."""
        incoming = client.incoming
        had_head = incoming.request is not None
        try:
            is_whole = incoming.advance()
        except (ParseException, OSError, StopIteration) as problem:
            self._refused(client, problem)
            return
        now = time.monotonic()
        if client.phase is ConnectionPhase.IDLE:
            client.phase, client.deadline = ConnectionPhase.HEAD, now + self.limits.head_seconds
        if incoming.request is not None and not had_head:
            client.phase, client.since = ConnectionPhase.BODY, now
            if incoming.request._expected_100_continue and not is_whole:
                client.out.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                client.out.flush()
            incoming.request._expected_100_continue = False
        if client.phase is ConnectionPhase.BODY:
            client.deadline = (
                client.since
                + self.limits.stall_timeout_seconds
                + len(incoming.arrived) / self.limits.bytes_per_second
            )
        if is_whole:
            self._start(client)

    def _start(self, client: ClientConnection) -> None:
        incoming = client.incoming
        if incoming.is_cut and self.limits.max_streams and not client.has_ended:
            if not self._may_stream(client):
                client.phase, client.deadline = (
                    ConnectionPhase.TURN,
                    time.monotonic() + self.limits.idle_seconds,
                )
                self._turns.append(client)
                self._listen(client, 0)
                return
            self._streaming[client.key] += 1
            self._listen(client, 0)
            client.stream = BodyStream(client.sock, self.limits)
            incoming.request.unreader.more = client.stream.read
        client.phase, client.deadline = ConnectionPhase.ANSWER, float("inf")
        client.is_last = incoming.is_cut or client.has_ended or self.is_ending
        client.is_given, client.since, client.from_byte = False, 0.0, client.out.sent
        self._begin(client)

    def _may_stream(self, client: ClientConnection) -> bool:
        each = self.limits.max_streams_per_address or self.limits.max_streams
        return (
            self._streaming.total() < self.limits.max_streams and self._streaming[client.key] < each
        )

    def _refused(self, client: ClientConnection, problem: Exception) -> None:
        status = {
            "LimitRequestLine": 414,
            "LimitRequestHeaders": 431,
            "ExpectationFailed": 417,
        }.get(type(problem).__name__, 400)
        self.refuse(client, status, f"{str(problem)[:200]}.")

    def refuse(self, client: ClientConnection, status: int, text: str) -> None:
        """Say so, and hang up."""
        with contextlib.suppress(BrokenPipeError):
            client.out.sendall(self._refuse(status, text))
            client.out.flush()
        client.phase, client.deadline = (
            ConnectionPhase.LINGER_SECONDS,
            time.monotonic() + LINGER_SECONDS,
        )
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        client.incoming.arrived.clear()
        self._listen(client, selectors.EVENT_READ)

    # --- answers ---
    def wait_for(self, client: ClientConnection) -> None:
        """Send on what the client has not taken; it must take ``rate`` bytes a second."""
        if not client.is_open:
            return
        is_done = client.out.push()
        self._account(client)
        if client.phase is not ConnectionPhase.ANSWER or not client.is_open:
            return
        if is_done:
            client.since = 0.0
            self._listen(client, client.events & ~selectors.EVENT_WRITE)
        else:
            now = time.monotonic()
            if not client.since:
                client.since, client.from_byte = now, client.out.sent
            went = client.out.sent - client.from_byte
            client.deadline = (
                client.since
                + self.limits.stall_timeout_seconds
                + went / self.limits.bytes_per_second
            )
            self._listen(client, client.events | selectors.EVENT_WRITE)
        if client.is_paused and client.out.held < FULL_BYTES:
            client.is_paused = False
            client.deadline = float("inf") if is_done else client.deadline
            self._go_on(client)
        elif is_done and client.is_given:
            self._answered(client)

    def paused(self, client: ClientConnection) -> None:
        """Its answer goes on when the client has taken more of it."""
        client.is_paused = True
        self.wait_for(client)

    def finished(self, client: ClientConnection, is_last: bool) -> None:
        """All of its answer was given to ``out``."""
        if client.stream is not None:
            client.stream.close()
            self._streaming[client.key] -= 1
            self._streaming += Counter()  # drops addresses without any
            if following := next(filter(self._may_stream, self._turns), None):
                self._turns.remove(following)
                self._start(following)
        client.answer, client.is_given, client.is_last = None, True, client.is_last or is_last
        self.wait_for(client)

    def _answered(self, client: ClientConnection) -> None:
        """The client has all of the answer."""
        if (
            client.is_last
            or client.out.is_broken
            or (not client.incoming.arrived and (client.has_ended or self.is_ending))
        ):
            self._hang_up(client)
            return
        own = self._clients[client.key]
        own[client] = own.pop(client)  # the newest: it was used just now
        client.incoming.forget()
        client.phase, client.deadline = (
            ConnectionPhase.IDLE,
            time.monotonic() + self.limits.idle_seconds,
        )
        self._listen(client, selectors.EVENT_READ)
        if client.incoming.arrived:
            self._advance(client)

    def _hang_up(self, client: ClientConnection) -> None:
        if not client.incoming.is_cut or client.out.is_broken or client.has_ended:
            self.drop(client)
            return
        client.phase, client.deadline = (
            ConnectionPhase.LINGER_SECONDS,
            time.monotonic() + LINGER_SECONDS,
        )
        client.incoming.arrived.clear()
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        self._listen(client, selectors.EVENT_READ)

    # --- going ---
    def close_late(self) -> None:
        """Cut off who is late; at most once a second, as it looks at all."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + (0.1 if self.is_ending else 1.0)
        for client in [
            client for own in self._clients.values() for client in own if client.deadline < now
        ]:
            if client.phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
                self.refuse(client, 408, "The request did not come in time.")
            else:
                self.drop(client)

    def end(self) -> None:
        """Close connections without a request; an idle one may have a request on its way."""
        self.is_ending, self._next_check = True, 0.0
        for own in self._clients.values():
            for client in own:
                if client.phase is not ConnectionPhase.ANSWER:
                    client.deadline = min(client.deadline, time.monotonic() + LINGER_SECONDS)

    def drop(self, client: ClientConnection) -> None:
        """Close its connection, whatever it waits for."""
        if not client.is_open:
            return
        client.is_open = False
        if client.events:
            self.selector.unregister(client.sock)
        own = self._clients[client.key]
        del own[client]
        if not own:
            del self._clients[client.key]
        self._count -= 1
        client.out.drop()
        client.incoming.arrived.clear()
        if client in self._turns:
            self._turns.remove(client)
        self._account(client)
        client.sock.close()
        if client.is_paused:
            client.is_paused = False
            self._go_on(client)  # whoever makes the answer hears that the client has gone

    def _listen(self, client: ClientConnection, events: int) -> None:
        if events == client.events or not client.is_open:
            return
        happened = partial(self._happened, client)
        if not events:
            self.selector.unregister(client.sock)
        elif client.events:
            self.selector.modify(client.sock, events, happened)
        else:
            self.selector.register(client.sock, events, happened)
        client.events = events

    def _account(self, client: ClientConnection) -> None:
        held = len(client.incoming.arrived) + client.out.held
        self._held, client.held = self._held + held - client.held, held
        if self._held > self.limits.max_held_bytes and held:
            heavy = self._heaviest(lambda own: sum(each.held for each in own))
            self.drop(max(heavy, key=lambda each: each.held))


class BodyStream:
    """The rest of a body that is too long to be waited for, read by the thread that takes it in."""

    def __init__(self, sock: ClientSocket, limits: ClientLimits) -> None:
        self._sock, self._limits = sock.dup(), limits
        self._begun, self._read = time.monotonic(), 0

    def read(self) -> bytes:
        """The next bytes; empty: the end. Raises OSError when they do not come in time."""
        end = (
            self._begun
            + self._limits.stall_timeout_seconds
            + self._read / self._limits.bytes_per_second
        )
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while selector.select(
                max(0.0, min(self._limits.stall_timeout_seconds, end - time.monotonic()))
            ):
                # of TLS less may have come than can be read
                with contextlib.suppress(BlockingIOError):
                    data: bytes = self._sock.recv(READ_BYTES)
                    self._read += len(data)
                    return data
        raise TimeoutError("the body did not come in time")

    def close(self) -> None:
        """The body has been read, or never will be."""
        self._sock.close()


def _descriptors() -> int:
    """How many files this process may have open, after it was allowed as many as the machine lets
    it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
