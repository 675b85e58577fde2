# SPDX-License-Identifier: Apache-2.0
"""A TLS connection that one thread may read while another writes, and that a selector may watch.

Python's own TLS socket allows neither: two threads must not use the OpenSSL connection at once, and
a thread must not hold the connection while waiting. Here each call holds the connection only
briefly and waits outside. The handshake happens in the first call that needs it, or in
``handshake``.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TlsSocket:
    """A TLS connection over the socket ``plain``, which this object takes over and closes.

    With ``name``, the name that the server's certificate must contain, this is the client's side.
    Without ``name`` this is the server's side.
    """

    def __init__(
        self, plain: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> None:
        self._timeout = plain.gettimeout()
        plain.setblocking(False)
        self._sock = context.wrap_socket(
            plain, server_side=name is None, server_hostname=name, do_handshake_on_connect=False
        )
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, plain: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> TlsSocket:
        """Return a connection after the handshake. Close the connection if the handshake fails.

        Args:
            plain: A connected socket, which the result takes over.
            context: The context of a client or of a server.
            name: The name that the server's certificate must contain. None: this is the server.

        Raises:
            OSError: The handshake failed.
        """
        connection = cls(plain, context, name)
        try:
            connection.handshake()
        except OSError:
            connection.close()
            raise
        return connection

    def handshake(self) -> None:
        """Complete the handshake.

        Raises:
            OSError: The peer cannot be verified, does not answer in time, or ends the connection.
        """
        self._when_possible(lambda: self._sock.do_handshake())

    def names(self) -> list[str]:
        """Return the addresses and names in the peer's certificate. Empty without a certificate.

        Raises:
            ValueError: The handshake is not complete.
        """
        certificate: Any = self._sock.getpeercert() or {}
        return [
            value
            for kind, value in certificate.get("subjectAltName", ())
            if kind in ("IP Address", "DNS")
        ]

    def recv(self, size: int) -> bytes:
        """Receive up to ``size`` bytes. Empty at the end of the stream.

        Raises:
            BlockingIOError: No data is available, and the timeout is 0.
            TimeoutError: No data came in time.
            OSError: The connection failed, or was closed.
        """
        return self._when_possible(lambda: self._sock.recv(size))

    def send(self, data: bytes | memoryview) -> int:
        """Send the beginning of the data, as ``socket.send`` does, and return its length.

        Raises:
            BlockingIOError: No data can be sent now, and the timeout is 0.
            TimeoutError: No data could be sent in time.
            OSError: The connection failed, or was closed.
        """
        return self._when_possible(lambda: self._sock.send(data))

    def sendall(self, data: bytes) -> None:
        """Send all data. The timeout applies to each part of the data.

        Raises:
            OSError: As for ``send``. A part of the data may have been sent.
        """
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def _when_possible(self, work: Callable[[], T]) -> T:
        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            try:
                with self._lock:
                    return work()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            if self._timeout == 0:
                raise BlockingIOError("the TLS connection is not ready")
            self._await(events, end)

    def _await(self, events: int, end: float | None) -> None:
        if (number := self._sock.fileno()) < 0:
            raise OSError("the TLS connection was closed")
        poll = select.poll()
        poll.register(number, events)
        if not poll.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError("timed out")

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of each call. 0: never wait. None: wait without limit."""
        self._timeout = seconds

    def setblocking(self, waits: bool) -> None:
        """Let each call wait without limit (True), or never (False)."""
        self._timeout = None if waits else 0.0

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the file descriptor of the connection, or -1 after ``close``."""
        return self._sock.fileno()

    def dup(self) -> Watched:
        """Return the read side of this connection, with a descriptor that survives ``close``.

        The caller closes the result.
        """
        return Watched(self)

    def shutdown(self, how: int) -> None:
        """Shut down as ``socket.shutdown`` does, and wake threads that wait for this connection."""
        # Python's method for TLS would continue in plain text.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close the socket. A TLS shutdown is not sent."""
        with self._lock:
            self._sock.close()


class Watched:
    """The read side of a connection that another thread may close."""

    def __init__(self, secured: TlsSocket) -> None:
        self._bare, self.recv = socket.socket(fileno=socket.dup(secured.fileno())), secured.recv
        self.fileno, self.close = self._bare.fileno, self._bare.close
