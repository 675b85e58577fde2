# SPDX-License-Identifier: Apache-2.0
"""A transfer service on this machine, and a proxy that corrupts transfers, for transfer tests."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.domain import errors
from compute_agent.transfer import client, sparse
from compute_agent.transfer.service import TransferService
from compute_agent.verb_context import Part, Peer

SERVER, SECRET = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", "one-time-" + "s" * 34
MEBIBYTE = 1 << 20


class Folder:
    """The files of one server, in place of a driver. Records the names of files that are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads: list[str] = []

    def parts(self, server: str, secret: str) -> list[Part]:
        if not (server == SERVER and hmac.compare_digest(secret.encode(), SECRET.encode())):
            raise errors.Forbidden("Nothing was offered under this secret.")
        return [
            Part(file.name, file.stat().st_size, sparse.data_bytes(file))
            for file in sorted(self.path.iterdir())
        ]

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        self.reads.append(name)
        size = next(part.size for part in self.parts(server, secret) if part.name == name)
        return sparse.pieces(self.path / name, size)


class Rig:
    """A transfer service for a folder, and peers of the service."""

    def __init__(self, path: Path, **options: Any) -> None:
        path.mkdir()
        self.files = Folder(path)
        self.service = TransferService(self.files, "127.0.0.1", **options)
        self.address = self.service.start()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def peer(self, secret: str = SECRET, server: str = SERVER, **options: Any) -> Peer:
        return client.peer(self.address, server, secret, **{"silence_timeout": 0.0, **options})

    def connect(self, seconds: float = 5.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), seconds)


class Meddler:
    """A proxy between a peer and a service that can change the bytes of the service.

    ``meddle(connection number, bytes so far, piece)`` returns the piece to forward, or None to
    close the connection.
    """

    def __init__(self, port: int, meddle: Callable[[int, int, bytes], bytes | None]) -> None:
        self._port, self._meddle = port, meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._relay, args=(peer, self.connections), daemon=True).start()

    def _relay(self, peer: socket.socket, number: int) -> None:
        service = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(
            target=self._copy, args=(peer, service, lambda so_far, piece: piece), daemon=True
        ).start()
        self._copy(service, peer, lambda so_far, piece: self._meddle(number, so_far, piece))

    @staticmethod
    def _copy(
        source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes | None]
    ) -> None:
        so_far = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                changed = change(so_far, piece)
                so_far += len(piece)
                if changed is None:
                    break
                target.sendall(changed)
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def read_whole(peer: Peer, name: str, size: int) -> bytes:
    return b"".join(sparse.fill_holes(size, peer.read(name)))
