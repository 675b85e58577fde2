# SPDX-License-Identifier: Apache-2.0
"""Consoles of guests in memory: a VNC server that sends only its version, a SPICE server that sends
nothing, and a terminal.

All send back each byte that they get, and end when the guest stops.
"""

from __future__ import annotations

import socket
import threading

from compute_agent.virt.driver import VNC

GREETING = {VNC: b"RFB 003.008\n"}


class EchoConsoles:
    """The open consoles of one host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[str, socket.socket]] = []

    def open(self, server: str, kind: str) -> socket.socket:
        """The near side of a new one."""
        near, far = socket.socketpair()
        with self._lock:
            self._open.append((server, far))
        threading.Thread(
            target=self._echo,
            args=(server, far, GREETING.get(kind, b"")),
            name="memory-console",
            daemon=True,
        ).start()
        return near

    def end(self, server: str) -> None:
        """The guest stopped."""
        with self._lock:
            for whose, far in self._open:
                if whose == server:
                    far.shutdown(socket.SHUT_RDWR)

    def _echo(self, server: str, far: socket.socket, data: bytes) -> None:
        try:
            far.sendall(data)
            while data := far.recv(65536):
                far.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            data = b""  # the near side was closed: it has heard enough
        with self._lock:
            self._open.remove((server, far))
            far.close()
