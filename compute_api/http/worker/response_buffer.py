# SPDX-License-Identifier: Apache-2.0
"""A response on its way to the client: what the socket does not take at once waits here, without a
thread.

gunicorn writes to it as to a socket, in the thread that makes the response; the thread that has the
sockets sends the rest. Thread-safe."""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable

from common.security.tls_socket import TlsSocket

GATHERED_BYTES = 64 * 1024  #: bytes that are sent together
ClientSocket = socket.socket | TlsSocket
FULL_BYTES = 1024 * 1024  #: bytes above which whoever makes the answer shall pause


class ResponseBuffer:
    """Of one connection. ``wait`` is called, in any thread, when something begins to wait for the
    client."""

    def __init__(self, sock: ClientSocket, wait: Callable[[], None]) -> None:
        self._sock, self._wait = sock, wait
        self._lock = threading.Lock()
        self._gathered: list[bytes] = []
        self._unsent: deque[memoryview] = deque()
        self._size = 0
        self.held = self.sent = 0  #: bytes that wait; bytes that went
        self.is_broken = False

    def sendall(self, data: bytes) -> None:
        """Called by gunicorn. Raises BrokenPipeError when the client has gone."""
        if self.is_broken:
            raise BrokenPipeError(errno.EPIPE, "the client has gone")
        self._gathered.append(data)
        self._size += len(data)
        if self._size >= GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what was gathered; what does not go at once waits."""
        data, self._gathered, self._size = b"".join(self._gathered), [], 0
        with self._lock:
            is_first = not self._unsent
            if data:
                self._unsent.append(memoryview(data))
                self.held += len(data)
            if not is_first or self._send():
                return
        self._wait()

    def drop(self) -> None:
        """Nothing more is sent; for good."""
        with self._lock:
            self.is_broken = True
            self._unsent.clear()
            self.held = 0

    def push(self) -> bool:
        """Send what waits; has all gone?"""
        with self._lock:
            return self._send()

    def _send(self) -> bool:
        try:
            while self._unsent:
                count = self._sock.send(self._unsent[0])
                self.sent, self.held = self.sent + count, self.held - count
                if count < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][count:]
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.is_broken = True
            self._unsent.clear()
            self.held = 0
        return True
