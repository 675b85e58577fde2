# SPDX-License-Identifier: Apache-2.0
"""The service that sends files of this host's guests to agents of other hosts.

``assembly.make_transfer`` creates the service. ``start`` returns "address:port", which goes into
the inventory's ``facts["transfer"]``. The driver decides which files may be read: ``parts`` and
``read_part`` get the secret of the request, and a requested name is only compared with names of the
driver. The service stores no state, so killing it loses nothing.

Invariant: a client without a valid secret reads no file, and occupies a thread for at most some
twenty seconds. Other clients are served while they take each frame in time.
"""

from __future__ import annotations

import contextlib
import json
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
from common.service.log import get_logger
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

log = get_logger(__name__)
#: Limits of connections that are sent files, and of connections without a valid secret so far.
MAX_READERS, MAX_UNPROVED = 16, 32
#: Seconds between two frames while data before the requested start is skipped.
ALIVE_SECONDS = 5.0
#: First byte of a TLS connection.
TLS_HANDSHAKE = b"\x16"
#: Time for a client to read the reason of a refusal.
DRAIN_TIMEOUT_SECONDS = 1.0


class OfferedFiles(Protocol):
    """The methods of a driver that the service uses. ``Driver`` describes them."""

    def parts(self, server: str, secret: str) -> list[Part]: ...
    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]: ...


class TransferService:
    """The listener for file transfers.

    Args:
        driver: Provides the offered files.
        address: Address to listen on.
        port: Port to listen on. 0 means any free port.
        rate: Limit in MiB a second for all readers together. 0 means no limit.
        tls: Certificates, or None for plain connections.
        readers: Limit of connections that are sent files.
        strangers: Limit of connections without a valid secret so far.
        request_seconds: Time for the TLS handshake, and the same again for the request.
        frame_seconds: Time for sending a frame.

    Raises:
        OSError: The address or port cannot be used.
    """

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
        """Start the thread that accepts connections, and return the service's "address:port"."""
        threading.Thread(target=self._listen, name="transfer", daemon=True).start()
        return self._address

    def close(self) -> None:
        """Stop listening and shut down all connections.

        Readers resume when the next agent listens.
        """
        self._closed.set()
        # Wakes the thread that accepts connections.
        _shut(self._listener)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                _shut(connection)

    # --- Threads ---
    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                # For example, the process has no free file descriptor. This may be temporary.
                if not self._closed.wait(0.1):
                    log.warning(
                        "a connection for a file transfer cannot be accepted", problem=error
                    )
                continue
            number = self._unproved.add(connection, peer)
            threading.Thread(
                target=self._serve,
                args=(connection, str(peer[0]), number),
                name="transfer-reader",
                daemon=True,
            ).start()

    def _serve(self, connection: socket.socket, peer: str, number: int) -> None:
        """Serve one connection and close it. Runs in a thread. A failure is logged.

        ``number`` identifies the connection among those without a valid secret so far.
        """
        with contextlib.ExitStack() as stranger:
            stranger.callback(self._unproved.remove, number)
            try:
                connection.settimeout(self._request_seconds)
                connection = self._wrap_tls(connection)
                with self._lock:
                    self._open.add(connection)
                if isinstance(connection, ssl.SSLSocket):
                    connection.do_handshake()
                if not self._closed.is_set():
                    self._answer(connection, peer, stranger.close)
            except (TransferInterrupted, TransferCorrupted, OSError, ValueError) as problem:
                log.warning("a transfer ended early", peer=peer, problem=problem)
            finally:
                _let_read(connection)
                with self._lock:
                    self._open.discard(connection)
                connection.close()

    def _wrap_tls(self, connection: socket.socket) -> socket.socket:
        """Wrap the connection for TLS. The caller makes the handshake.

        If this service has no TLS files, the connection is returned unchanged.

        Raises:
            TransferInterrupted: The client does not use TLS. A frame with this refusal was sent.
            OSError: No byte arrived in time, or the TLS files cannot be used.
            ValueError: The TLS files cannot be used.
        """
        if self._tls is None:
            return connection
        if connection.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
            # A client without TLS understands only a frame as the reason of the refusal.
            Frames(connection).send(
                FAILURE,
                data=json.dumps(
                    _failure_payload(TransferCorrupted("this host sends files over TLS only"))
                ).encode(),
            )
            raise TransferInterrupted("the client does not use TLS")
        return self._tls.for_server().wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _answer(self, connection: socket.socket, peer: str, is_known: Callable[[], None]) -> None:
        """Read the request and send the response. A failure is logged, and sent as a frame.

        Args:
            connection: The connection, after the TLS handshake.
            peer: Address of the client, for the log.
            is_known: Called once the secret of the request has been accepted.

        Raises:
            TransferInterrupted: The connection ended, the client was too slow, or the service was
                closed.
            TransferCorrupted: TLS failed while the failure was sent.
        """
        frames = Frames(connection, self._frame_seconds)
        try:
            request = receive_request(connection, self._request_seconds)
            parts = self._driver.parts(request.server, request.secret)
            is_known()
            if request.name:
                log.info(
                    "a file of a server is sent",
                    file=request.name,
                    server=request.server,
                    peer=peer,
                )
            with self._turn():
                self._give(frames, request, parts)
        except TransferInterrupted:
            raise
        except Exception as problem:
            log.warning(
                "a transfer failed",
                peer=peer,
                kind=type(problem).__name__,
                problem=problem,
                exc_info=not isinstance(problem, (TransferCorrupted, errors.Problem, VerbFailed)),
            )
            frames.send(FAILURE, data=json.dumps(_failure_payload(problem)).encode())

    def _give(self, frames: Frames, request: TransferRequest, parts: list[Part]) -> None:
        if not request.name:
            frames.send(LIST, data=json.dumps([asdict(part) for part in parts]).encode())
            return
        sizes = {part.name: part.size for part in parts}
        if request.name not in sizes:
            raise errors.NotFound(
                f"Server {request.server} offers no file {request.name[:80]!r} on this host."
            )
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
            raise errors.Unavailable(
                "the source host serves too many transfers; the destination repeats the request later"
            )
        try:
            yield
        finally:
            self._readers.release()


class TransferRateLimit:
    """A limit of bytes a second for all readers together. 0 means no limit. Thread-safe."""

    def __init__(self, bytes_a_second: int, closed: threading.Event) -> None:
        self._rate, self._closed = bytes_a_second, closed
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent. Without a limit, return at once.

        Raises:
            TransferInterrupted: The service was closed.
        """
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._paid_until)
            self._paid_until = begin + count / self._rate
        if self._closed.wait(begin - now):
            raise TransferInterrupted("this host's transfer service was closed")


def _closable(data: Iterator[tuple[int, bytes]]) -> Generator[tuple[int, bytes], None, None]:
    """Wrap an iterator of a driver, so that closing the generator ends the reading."""
    yield from data


def _failure_payload(problem: Exception) -> dict[str, object]:
    """Return a failure as JSON for the client: its kind ("unavailable" or "refused"), and its text.

    The text of an unexpected exception is replaced, because it may contain details of this host.
    """
    if isinstance(problem, errors.Unavailable):
        return {"kind": "unavailable", "text": problem.text}
    if isinstance(problem, (TransferCorrupted, errors.Problem, VerbFailed)):
        return {"kind": "refused", "text": str(problem)}
    return {"kind": "refused", "text": "the source host failed unexpectedly; see its log"}


def _let_read(connection: socket.socket) -> None:
    """Let the client read the last frame before the connection is closed.

    Nothing more can be sent. Wait for data or the end from the client, at most
    ``DRAIN_TIMEOUT_SECONDS``.

    Why: closing a connection with unread data resets it, and the last frame would be lost.
    """
    try:
        connection.settimeout(DRAIN_TIMEOUT_SECONDS)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(MEBIBYTE)
    except (OSError, ValueError) as error:
        log.debug("a transfer's other side had closed before", problem=error)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a transfer's other side had closed before")
