# SPDX-License-Identifier: Apache-2.0
"""Databases that fail on demand: a COMMIT that nobody answers, and a wire to a real server that
breaks or freezes.

Used by the tests of the store and of those who write with it. ``unanswered`` replaces no code of
ours: it stands between SQLAlchemy and the driver.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa

from common.store.engine import Store


@contextmanager
def unanswered(store: Store, *, committed: bool = True, after: int = 0) -> Iterator[list[bool]]:
    """One COMMIT on this store loses its connection, after it was carried out or before; ``after``
    so many that are answered. Yields what was lost."""
    lost: list[bool] = []
    answered: list[bool] = []
    dialect = store.engine.dialect
    real = dialect.do_commit

    def commit(connection: Any) -> None:
        if lost or len(answered) < after:
            answered.append(True)
            return real(connection)
        lost.append(committed)
        if committed:
            real(connection)
        raise sa.exc.OperationalError(
            "COMMIT", {}, Exception(2013, "Lost connection"), connection_invalidated=True
        )

    dialect.do_commit = commit  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        dialect.do_commit = real  # type: ignore[method-assign]


class Wire:
    """A way to a server on this machine. ``freeze``: nothing comes through any more, and nobody is
    told; ``cut``: all connections are ended; ``lead_to``: new ones are to another server.
    ``cut_at``: words of a client after whose answer its connection is cut, once. ``asked``: what
    clients have sent so far, in pieces."""

    def __init__(self, url: str) -> None:
        self._to = sa.make_url(url)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = self._to.set(host="127.0.0.1", port=self._door.getsockname()[1])
        self.cut_at: bytes | None = None
        self.asked = 0
        self._open, self._sockets = threading.Event(), set[socket.socket]()
        self._open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def cut(self) -> None:
        while self._sockets:
            _shut(self._sockets.pop())

    def lead_to(self, url: str) -> None:
        self._to = sa.make_url(url)

    def close(self) -> None:
        self._door.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((str(self._to.host), int(self._to.port or 0)))
            except OSError:
                client.close()  # nobody listens there just now
                continue
            last = threading.Event()
            for one, other, asks in ((client, server, True), (server, client, False)):
                self._sockets.add(one)
                threading.Thread(
                    target=self._carry, args=(one, other, asks, last), daemon=True
                ).start()

    def _carry(
        self, one: socket.socket, other: socket.socket, asks: bool, last: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                self.asked += asks
                self._open.wait()
                if asks and self.cut_at is not None and self.cut_at in data:
                    self.cut_at = None
                    last.set()
                elif not asks and last.is_set():
                    break
                other.sendall(data)
        _shut(one)
        _shut(other)


def _shut(end: socket.socket) -> None:
    """Nobody waits there any longer."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
