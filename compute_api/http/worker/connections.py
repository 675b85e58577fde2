# SPDX-License-Identifier: Apache-2.0
"""The client connections of a process. A single thread handles all of them without blocking.

A request gets a worker thread after its last byte has arrived, or when its body exceeds the buffer.
The thread writes the response to a buffer and is then free again. A slow client is disconnected at
a deadline. If there are too many connections, the address with the most connections loses the
longest waiting connection, so that a new client always gets a connection.
"""

from __future__ import annotations

import contextlib
import errno
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
from common.service.log import get_logger
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.request_buffer import RequestBuffer
from compute_api.http.worker.response_buffer import FULL_BYTES, ClientSocket, ResponseBuffer

log = get_logger(__name__)
#: Connections to accept and bytes to read before other connections get their turn.
ACCEPT_BATCH, READ_BYTES = 64, 256 * 1024
#: Time for which input of a client is read and discarded after the last response.
LINGER_SECONDS = 2.0
#: File descriptors reserved for other uses than clients.
SPARE_DESCRIPTORS = 256
#: Errors of accept if the process or the machine has too many open files.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionPhase(Enum):
    """The event that a connection waits for."""

    IDLE = "the first byte of a request"
    HEAD = "the end of its head"
    BODY = "the end of its body"
    TURN = "its turn to stream a body"
    ANSWER = "the answer, or the client to take it"
    LINGER = "the client to hang up"


class ClientConnection:
    """A connection, which belongs to the thread of ``ClientConnections``.

    While a response is built, ``incoming``, ``answer`` and ``admission`` belong to the worker
    thread.

    Attributes:
        key: Listener and address of the client, under which connections are counted.
        since: Begin of the body, or of the wait until the client takes data. 0: not waiting.
        from_byte: Number of bytes that were sent before ``since``.
        held: Buffered bytes of request and response.
        answer: The ``PendingResponse``.
        admission: The request's ``fair_share.Admission``.
        is_given: The response is completely in ``out``.
        is_paused: The response continues when the client has taken more data.
        has_ended: The client sends no more data, but may still read.
        is_last: The connection is closed after this response.
    """

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
        self.answer: Any = None
        self.admission: Any = None
        self.stream: BodyStream | None = None
        self.is_given = self.is_paused = self.has_ended = self.is_last = False


class ClientConnections:
    """All connections of a process.

    Args:
        selector: The selector of the thread.
        config: The configuration of gunicorn.
        limits: The limits of clients.
        defer: Runs a function later in the thread of the connections. Called in any thread.
        begin: Hands a complete request to a worker thread.
        go_on: Hands a response with room in its buffer to a worker thread.
        refuse: Builds an error response from status and text.
        secure: Wraps a socket with TLS, or None for plain text.
    """

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
        self._most = min(limits.max_connections, _raise_descriptor_limit() - SPARE_DESCRIPTORS)
        self._clients: dict[Hashable, dict[ClientConnection, None]] = {}
        self._count = self._held = 0
        #: Number of streamed bodies by address.
        self._streaming: Counter[Hashable] = Counter()
        self._turns: list[ClientConnection] = []
        self._next_check = 0.0
        self.is_ending = False

    def __len__(self) -> int:
        return self._count

    # --- New connections ---
    def accept(self, listener: socket.socket, tag: Hashable = None) -> None:
        """Accept waiting connections of a listener, at most ``ACCEPT_BATCH``.

        At a limit of connections or file descriptors, a connection without a running response is
        dropped.

        Args:
            listener: The listening socket.
            tag: The address of the listener. Clients of several listeners are counted separately.
        """
        for _ in range(ACCEPT_BATCH):
            try:
                sock, peer = listener.accept()
            except OSError as problem:
                if problem.errno in _FULL and not self._make_room(self._find_heaviest(len), None):
                    log.warning("a connection cannot be accepted", problem=problem)
                return
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._add(
                    ClientConnection(self._secure(sock) if self._secure else sock, peer, tag, self)
                )
            except (OSError, ValueError) as problem:
                log.warning("TLS cannot be set up for a connection", problem=problem)
                sock.close()

    def _add(self, client: ClientConnection) -> None:
        of_address = self._clients.setdefault(client.key, {})
        of_address[client] = None
        self._count += 1
        client.deadline = time.monotonic() + self.limits.head_seconds
        self.selector.register(client.sock, client.events, partial(self._handle_event, client))
        if len(of_address) > self.limits.max_connections_per_address:
            self._make_room(of_address, client)
        elif self._count > self._most:
            self._make_room(self._find_heaviest(len), client)

    def _make_room(
        self, clients: Iterable[ClientConnection], newest: ClientConnection | None
    ) -> bool:
        """Drop the first of ``clients`` without a response in progress, else ``newest``.

        Args:
            clients: Connections of one address, the longest waiting first.
            newest: The connection that was just accepted, or None.

        Returns:
            True if a connection was dropped.
        """
        for client in clients:
            if client.phase is not ConnectionPhase.ANSWER and client is not newest:
                self.drop(client)
                return True
        if newest is not None:
            self.drop(newest)
        return newest is not None

    def _find_heaviest(
        self, weight: Callable[[dict[ClientConnection, None]], int]
    ) -> list[ClientConnection]:
        heaviest: dict[ClientConnection, None] = (
            max(self._clients.values(), key=weight) if self._clients else {}
        )
        return list(heaviest)

    # --- Input ---
    def _handle_event(self, client: ClientConnection, sock: socket.socket) -> None:
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
        if client.phase is ConnectionPhase.LINGER:
            if not data:
                self.drop(client)
            return
        if not data:
            self._handle_end(client)
            return
        arrived += data
        self._account(client)
        if not client.is_open:
            return
        if client.phase is not ConnectionPhase.ANSWER:
            self._advance(client)
        elif len(arrived) > READ_BYTES:
            self._listen(client, 0)

    def _handle_end(self, client: ClientConnection) -> None:
        """Handle the end of the client's data.

        A request with an incomplete body starts with the data that has arrived. A running response
        continues, because the client may still read. In other phases the connection is dropped.
        """
        client.has_ended = True
        if client.phase is ConnectionPhase.BODY:
            client.incoming.cut()
            self._start(client)
        elif client.phase is ConnectionPhase.ANSWER:
            self._listen(client, 0)
        else:
            self.drop(client)

    def _advance(self, client: ClientConnection) -> None:
        """Parse the data that has arrived, update the deadline, and start a complete request.

        A request whose body exceeds the buffer starts too. An invalid request is refused.
        """
        incoming = client.incoming
        had_head = incoming.request is not None
        try:
            is_whole = incoming.advance()
        except (ParseException, OSError, StopIteration) as problem:
            self._refuse_invalid(client, problem)
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
            if not self._can_stream(client):
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

    def _can_stream(self, client: ClientConnection) -> bool:
        most_per_address = self.limits.max_streams_per_address or self.limits.max_streams
        return (
            self._streaming.total() < self.limits.max_streams
            and self._streaming[client.key] < most_per_address
        )

    def _refuse_invalid(self, client: ClientConnection, problem: Exception) -> None:
        status = {
            "LimitRequestLine": 414,
            "LimitRequestHeaders": 431,
            "ExpectationFailed": 417,
        }.get(type(problem).__name__, 400)
        self.refuse(client, status, f"{str(problem)[:200]}.")

    def refuse(self, client: ClientConnection, status: int, text: str) -> None:
        """Send an error response, and read no more requests from this connection.

        The connection is closed when the client closes, or by ``close_late`` after
        ``LINGER_SECONDS``.
        """
        with contextlib.suppress(BrokenPipeError):
            client.out.sendall(self._refuse(status, text))
            client.out.flush()
        client.phase, client.deadline = (
            ConnectionPhase.LINGER,
            time.monotonic() + LINGER_SECONDS,
        )
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        client.incoming.arrived.clear()
        self._listen(client, selectors.EVENT_READ)

    # --- Responses ---
    def wait_for(self, client: ClientConnection) -> None:
        """Send buffered data without blocking. While response data remains, listen for room.

        Data that the client takes extends the deadline, after which ``close_late`` drops the
        connection. A paused response continues when the buffer has room. After a complete response
        is sent, the connection is closed or prepared for the next request.
        """
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
            sent_bytes = client.out.sent - client.from_byte
            client.deadline = (
                client.since
                + self.limits.stall_timeout_seconds
                + sent_bytes / self.limits.bytes_per_second
            )
            self._listen(client, client.events | selectors.EVENT_WRITE)
        if client.is_paused and client.out.held < FULL_BYTES:
            client.is_paused = False
            client.deadline = float("inf") if is_done else client.deadline
            self._go_on(client)
        elif is_done and client.is_given:
            self._complete(client)

    def pause_answer(self, client: ClientConnection) -> None:
        """Pause the response until the buffer has room, and then call ``go_on``."""
        client.is_paused = True
        self.wait_for(client)

    def finish_answer(self, client: ClientConnection, is_last: bool) -> None:
        """Note that the whole response is in ``out``, and send the rest of the data.

        After a request with a streamed body, the next request that waits to stream starts.

        Args:
            client: The connection.
            is_last: Close the connection after this response.
        """
        if client.stream is not None:
            client.stream.close()
            self._streaming[client.key] -= 1
            # This drops addresses with the count 0.
            self._streaming += Counter()
            if following := next(filter(self._can_stream, self._turns), None):
                self._turns.remove(following)
                self._start(following)
        client.answer, client.is_given, client.is_last = None, True, client.is_last or is_last
        self.wait_for(client)

    def _complete(self, client: ClientConnection) -> None:
        """Close the connection after its last response, or else prepare for the next request.

        Called after the client has all data, or after the connection broke.
        """
        if (
            client.is_last
            or client.out.is_broken
            or (not client.incoming.arrived and (client.has_ended or self.is_ending))
        ):
            self._hang_up(client)
            return
        of_address = self._clients[client.key]
        # The order is that of the last use.
        of_address[client] = of_address.pop(client)
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
            ConnectionPhase.LINGER,
            time.monotonic() + LINGER_SECONDS,
        )
        client.incoming.arrived.clear()
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        self._listen(client, selectors.EVENT_READ)

    # --- End of connections ---
    def close_late(self) -> None:
        """Drop the connections that missed their deadline.

        An incomplete request first gets status 408. The thread calls this often, but the check runs
        at most once a second, or ten times a second while the process ends.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + (0.1 if self.is_ending else 1.0)
        for client in [
            client
            for of_address in self._clients.values()
            for client in of_address
            if client.deadline < now
        ]:
            if client.phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
                self.refuse(client, 408, "The request did not come in time.")
            else:
                self.drop(client)

    def end(self) -> None:
        """Begin to close all connections, because the process ends.

        A connection whose request is being answered is closed after the response, or after the
        response to a further request that has arrived. Because a request may be in transit, other
        connections get ``LINGER_SECONDS`` at most. The start of a request, or data of a body,
        extends this time.
        """
        self.is_ending, self._next_check = True, 0.0
        for of_address in self._clients.values():
            for client in of_address:
                if client.phase is not ConnectionPhase.ANSWER:
                    client.deadline = min(client.deadline, time.monotonic() + LINGER_SECONDS)

    def drop(self, client: ClientConnection) -> None:
        """Close the connection in any phase. Repeated calls have no effect.

        A paused response is given to a thread once more, which fails and releases its resources.
        """
        if not client.is_open:
            return
        client.is_open = False
        if client.events:
            self.selector.unregister(client.sock)
        of_address = self._clients[client.key]
        del of_address[client]
        if not of_address:
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
            # The thread that builds the response then gets BrokenPipeError.
            self._go_on(client)

    def _listen(self, client: ClientConnection, events: int) -> None:
        if events == client.events or not client.is_open:
            return
        handler = partial(self._handle_event, client)
        if not events:
            self.selector.unregister(client.sock)
        elif client.events:
            self.selector.modify(client.sock, events, handler)
        else:
            self.selector.register(client.sock, events, handler)
        client.events = events

    def _account(self, client: ClientConnection) -> None:
        held = len(client.incoming.arrived) + client.out.held
        self._held, client.held = self._held + held - client.held, held
        if self._held > self.limits.max_held_bytes and held:
            heavy = self._find_heaviest(lambda own: sum(each.held for each in own))
            self.drop(max(heavy, key=lambda each: each.held))


class BodyStream:
    """The rest of a request body that exceeds the buffer, read by the worker thread."""

    def __init__(self, sock: ClientSocket, limits: ClientLimits) -> None:
        self._sock, self._limits = sock.dup(), limits
        self._began_at, self._read = time.monotonic(), 0

    def read(self) -> bytes:
        """Wait for the next bytes, and return them. Return b"" at the end of the client's data.

        Raises:
            OSError: The client is too slow, or the connection is broken.
        """
        end = (
            self._began_at
            + self._limits.stall_timeout_seconds
            + self._read / self._limits.bytes_per_second
        )
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while selector.select(
                max(0.0, min(self._limits.stall_timeout_seconds, end - time.monotonic()))
            ):
                # With TLS, the socket may be readable before a whole record has arrived.
                with contextlib.suppress(BlockingIOError):
                    data: bytes = self._sock.recv(READ_BYTES)
                    self._read += len(data)
                    return data
        raise TimeoutError("the rest of the request body did not come in time")

    def close(self) -> None:
        """Close the duplicate of the socket."""
        self._sock.close()


def _raise_descriptor_limit() -> int:
    """Raise the process's limit of open files to the hard limit, and return the limit.

    Without a hard limit, return about a million.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
