# SPDX-License-Identifier: Apache-2.0
"""Buffer a response for a slow client, without a thread.

gunicorn writes to the buffer as to a socket, in the thread that builds the response. The thread of
the sockets sends the rest. Thread-safe.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable

from common.security.tls_socket import TlsSocket

#: Small writes are collected up to this size.
GATHERED_BYTES = 64 * 1024
ClientSocket = socket.socket | TlsSocket
#: With more buffered bytes the response pauses.
FULL_BYTES = 1024 * 1024


class ResponseBuffer:
    """The responses of one connection.

    Args:
        sock: The socket.
        wait: Called in any thread when data begins to wait for the client.
    """

    def __init__(self, sock: ClientSocket, wait: Callable[[], None]) -> None:
        self._sock, self._wait = sock, wait
        self._lock = threading.Lock()
        self._gathered: list[bytes] = []
        self._unsent: deque[memoryview] = deque()
        self._size = 0
        #: Number of buffered bytes, and of sent bytes.
        self.held = self.sent = 0
        self.is_broken = False

    def sendall(self, data: bytes) -> None:
        """Collect data, and send ``GATHERED_BYTES`` or more at once. gunicorn calls this.

        Raises:
            BrokenPipeError: An earlier call found that the client has disconnected, or the
                connection was dropped.
        """
        if self.is_broken:
            raise BrokenPipeError(errno.EPIPE, "the client has gone")
        self._gathered.append(data)
        self._size += len(data)
        if self._size >= GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the collected data, and buffer the data that the socket does not accept.

        If no other data is waiting, call ``wait`` for the buffered data.
        """
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
        """Discard the data that waits for the client, and let ``sendall`` raise BrokenPipeError."""
        with self._lock:
            self.is_broken = True
            self._unsent.clear()
            self.held = 0

    def push(self) -> bool:
        """Send buffered data. Return True if no data is left, or if the connection is broken.

        If the connection is broken, the data is discarded and ``is_broken`` is set.
        """
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
