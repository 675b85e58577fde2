# SPDX-License-Identifier: Apache-2.0
"""The transfer service of an agent: gives the files of this host's guests to the agents that may
have them.

``compute_agent.service`` makes one beside its driver: ``TransferService(driver, address, port,
rate=..., tls=...)``, tls from ``tls.load``. ``start()`` returns "address:port", which goes into
the inventory's ``facts["transfer"]``; ``close()`` ends it. What may be read is the driver's to say:
``parts`` and ``read_part`` are asked with the secret that came, and a name is only ever compared
with theirs. It keeps nothing, so that killing it loses nothing. Must stay true: whoever does not
say a right secret reads nothing and holds a thread for some twenty seconds at most; whoever does is
sent on only as long as they take each frame in its time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import Protocol

from common.domain import errors
from common.security.tls import Tls
from common.security.unproved import Unproved
from compute_agent.transfer.frames import (
    DATA,
    END,
    FAILURE,
    FRAME_TIMEOUT_SECONDS,
    LIST,
    MEBIBYTE,
    REQUEST_TIMEOUT_SECONDS,
    Frames,
    TransferCorrupted,
    TransferInterrupted,
    TransferRequest,
    receive_request,
)
from compute_agent.verb_context import Part, VerbFailed

log = logging.getLogger(__name__)
#: connections that have proved their right, and that have not yet
MAX_READERS, MAX_UNPROVED = (
    16,
    32,
)
ALIVE_SECONDS = 5.0  #: between two frames while what the reader has already is skipped
TLS_HANDSHAKE = b"\x16"  #: how whoever speaks TLS begins
DRAIN_TIMEOUT_SECONDS = 1.0  #: for the other side to read why it is refused


class OfferedFiles(Protocol):
    """What it needs of a driver; see there."""

    def parts(self, server: str, secret: str) -> list[Part]: ...
    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]: ...


class TransferService:
    """``address`` and ``port`` (0: a free one) are where it listens; ``rate``: most MiB a second
    for all readers together, 0: no limit. ``request_seconds`` are for the handshake of TLS, and
    once more for the request; ``frame_seconds`` for taking a frame. Raises OSError when it cannot
    listen there."""

    def __init__(
        self,
        driver: OfferedFiles,
        address: str,
        port: int = 0,
        *,
        rate: int = 0,
        tls: Tls | None = None,
        readers: int = MAX_READERS,
        strangers: int = MAX_UNPROVED,
        request_seconds: float = REQUEST_TIMEOUT_SECONDS,
        frame_seconds: float = FRAME_TIMEOUT_SECONDS,
    ) -> None:
        self._driver, self._tls = driver, tls
        self._request_seconds, self._frame_seconds = request_seconds, frame_seconds
        self._closed = threading.Event()
        self._rate = TransferRateLimit(rate * MEBIBYTE, self._closed)
        self._readers, self._unproved = threading.BoundedSemaphore(readers), Unproved(strangers)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=strangers)
        self._listener.settimeout(1.0)
        shown = f"[{address}]" if family == socket.AF_INET6 else address
        self.port: int = self._listener.getsockname()[1]
        self._address = f"{shown}:{self.port}"

    def start(self) -> str:
        """Listen; returns where."""
        threading.Thread(target=self._listen, name="transfer", daemon=True).start()
        return self._address

    def close(self) -> None:
        """Cut all connections; who reads will ask the next service for the rest."""
        self._closed.set()
        _shut(self._listener)  # wakes who accepts
        self._listener.close()
        with self._lock:
            for connection in self._open:
                _shut(connection)

    # --- the threads ---
    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed.wait(0.1):  # out of descriptors, say: it passes
                    log.warning("no connection for a transfer could be accepted: %s", error)
                continue
            number = self._unproved.add(connection, peer)
            threading.Thread(
                target=self._serve,
                args=(connection, str(peer[0]), number),
                name="transfer-reader",
                daemon=True,
            ).start()

    def _serve(self, connection: socket.socket, peer: str, number: int) -> None:
        """The thread of a connection."""
        with contextlib.ExitStack() as stranger:
            stranger.callback(self._unproved.remove, number)
            try:
                connection.settimeout(self._request_seconds)
                connection = self._wrapped(connection)
                with self._lock:
                    self._open.add(connection)
                if isinstance(connection, ssl.SSLSocket):
                    connection.do_handshake()
                if not self._closed.is_set():
                    self._answer(connection, peer, stranger.close)
            except (TransferInterrupted, TransferCorrupted, OSError, ValueError) as problem:
                log.warning("a transfer to %s ended: %s", peer, problem)
            finally:
                _let_read(connection)
                with self._lock:
                    self._open.discard(connection)
                connection.close()

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        """With TLS: one that will speak it, once the other side has shown a certificate of our
        authority."""
        if self._tls is None:
            return connection
        if connection.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
            # TLS has no words for who does not speak it, and a connection that just ends says
            # nothing.
            Frames(connection).send(
                FAILURE,
                data=json.dumps(
                    _failure_payload(TransferCorrupted("files are given over TLS only"))
                ).encode(),
            )
            raise TransferInterrupted("it does not speak TLS")
        return self._tls.for_server().wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _answer(self, connection: socket.socket, peer: str, is_known: Callable[[], None]) -> None:
        """Read the request and answer it; a failure is an answer too."""
        frames = Frames(connection, self._frame_seconds)
        try:
            request = receive_request(connection, self._request_seconds)
            parts = self._driver.parts(request.server, request.secret)
            is_known()
            if request.name:
                log.info("%r of server %s goes to %s", request.name, request.server, peer)
            with self._turn():
                self._give(frames, request, parts)
        except TransferInterrupted:
            raise
        except Exception as problem:
            log.warning(
                "a transfer to %s failed: %r",
                peer,
                problem,
                exc_info=not isinstance(problem, (TransferCorrupted, errors.Problem, VerbFailed)),
            )
            frames.send(FAILURE, data=json.dumps(_failure_payload(problem)).encode())

    def _give(self, frames: Frames, request: TransferRequest, parts: list[Part]) -> None:
        if not request.name:
            frames.send(LIST, data=json.dumps([asdict(part) for part in parts]).encode())
            return
        sizes = {part.name: part.size for part in parts}
        if request.name not in sizes:
            raise errors.NotFound("The server has no such file.")
        sent_at = time.monotonic()
        data = self._driver.read_part(request.server, request.secret, request.name)
        with contextlib.closing(_closable(data)) as pieces:
            for offset, piece in pieces:
                skipped = min(max(0, request.start - offset), len(piece))
                if skipped < len(piece) or time.monotonic() - sent_at > ALIVE_SECONDS:
                    self._rate.take(len(piece) - skipped)
                    frames.send(DATA, offset + skipped, piece[skipped:])
                    sent_at = time.monotonic()
        frames.send(END, sizes[request.name])

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._readers.acquire(blocking=False):
            raise errors.Unavailable("too many files are read from the other host; wait")
        try:
            yield
        finally:
            self._readers.release()


class TransferRateLimit:
    """At most so many bytes a second (0: any number), whoever takes them. Thread-safe."""

    def __init__(self, bytes_a_second: int, closed: threading.Event) -> None:
        self._rate, self._closed = bytes_a_second, closed
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def take(self, count: int) -> None:
        """Wait until it is their turn. Raises TransferInterrupted when the service is closed
        meanwhile."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._paid_until)
            self._paid_until = begin + count / self._rate
        if self._closed.wait(begin - now):
            raise TransferInterrupted("the service was closed")


def _closable(data: Iterator[tuple[int, bytes]]) -> Generator[tuple[int, bytes], None, None]:
    """Closing it ends the reading, whatever kind of iterator a driver gives."""
    yield from data


def _failure_payload(problem: Exception) -> dict[str, object]:
    """A failure for the other side: what kind it is, and its text if that is public."""
    if isinstance(problem, errors.Unavailable):
        return {"kind": "unavailable", "text": problem.text}
    if isinstance(problem, (TransferCorrupted, errors.Problem, VerbFailed)):
        return {"kind": "refused", "text": str(problem)}
    return {"kind": "refused", "text": "the other host failed unexpectedly; its log says more"}


def _let_read(connection: socket.socket) -> None:
    """Closed over bytes that nobody has read, a connection would be reset, and what we said last be
    lost with it."""
    try:
        connection.settimeout(DRAIN_TIMEOUT_SECONDS)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(MEBIBYTE)
    except (OSError, ValueError) as error:
        log.debug("a transfer's other side had closed before: %s", error)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a transfer's other side had closed before")
