# SPDX-License-Identifier: Apache-2.0
"""A TLS connection that one thread may read while another writes, and that a selector may watch.

OpenSSL allows neither of Python's own socket: its connection must not be used by two threads at a
time, and no thread that waits may keep it. Here each call has it for a moment, and waits outside.
The handshake is made by the first call that needs it, or by ``handshake``.
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
    """``plain`` is its own from now on. ``name``: whom a client has dialled, and verifies; none: a
    server."""

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
    def proved(
        cls, plain: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> TlsSocket:
        """One whose handshake is made; it is closed where that fails. Raises OSError."""
        made = cls(plain, context, name)
        try:
            made.handshake()
        except OSError:
            made.close()
            raise
        return made

    def handshake(self) -> None:
        """Raises OSError: the other side cannot be proved, or does not answer in time."""
        self._when_possible(lambda: self._sock.do_handshake())

    def names(self) -> list[str]:
        """What the other side's certificate names: addresses and names; none when it has shown
        none."""
        shown: Any = self._sock.getpeercert() or {}
        return [
            value
            for kind, value in shown.get("subjectAltName", ())
            if kind in ("IP Address", "DNS")
        ]

    def recv(self, size: int) -> bytes:
        """As of a socket: empty at the end; BlockingIOError or TimeoutError when there is
        nothing."""
        return self._when_possible(lambda: self._sock.recv(size))

    def send(self, data: bytes | memoryview) -> int:
        """As of a socket."""
        return self._when_possible(lambda: self._sock.send(data))

    def sendall(self, data: bytes) -> None:
        """As of a socket."""
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
                raise BlockingIOError("not now")
            self._await(events, end)

    def _await(self, events: int, end: float | None) -> None:
        if (number := self._sock.fileno()) < 0:
            raise OSError("it was closed")
        poll = select.poll()
        poll.register(number, events)
        if not poll.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError("timed out")

    def settimeout(self, seconds: float | None) -> None:
        """As of a socket; 0: it never waits."""
        self._timeout = seconds

    def setblocking(self, waits: bool) -> None:
        """As of a socket."""
        self._timeout = None if waits else 0.0

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As of a socket."""
        self._sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        """As of a socket."""
        return self._sock.fileno()

    def dup(self) -> Watched:
        """The same connection, whose number stays its own when this one is closed."""
        return Watched(self)

    def shutdown(self, how: int) -> None:
        """As of a socket; whoever waits for it in another thread is woken."""
        socket.socket.shutdown(self._sock, how)  # Python's of TLS would go on in plain text

    def close(self) -> None:
        """As of a socket."""
        with self._lock:
            self._sock.close()


class Watched:
    """For who reads a connection that somebody else may close."""

    def __init__(self, secured: TlsSocket) -> None:
        self._bare, self.recv = socket.socket(fileno=socket.dup(secured.fileno())), secured.recv
        self.fileno, self.close = self._bare.fileno, self._bare.close
