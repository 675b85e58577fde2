# SPDX-License-Identifier: Apache-2.0
"""Consoles of guests in memory.

A VNC console sends only its version. A SPICE console and a serial console send nothing by
themselves. All return each byte that they receive, and end when the guest stops.
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
        """Open a console of the guest, and return the socket of the client.

        A thread serves the console until the client closes the socket or the guest ends.
        """
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
        """End all open consoles of the guest, which has stopped or left this host."""
        with self._lock:
            for owner, far in self._open:
                if owner == server:
                    far.shutdown(socket.SHUT_RDWR)

    def _echo(self, server: str, far: socket.socket, data: bytes) -> None:
        try:
            far.sendall(data)
            while data := far.recv(65536):
                far.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # The client has closed its side.
            data = b""
        with self._lock:
            self._open.remove((server, far))
            far.close()
