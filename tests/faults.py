# SPDX-License-Identifier: Apache-2.0
"""Database failures on demand: a COMMIT without an answer, a connection that breaks or freezes.

``lose_commit_answer`` replaces no code of Kilonova. The hook is between SQLAlchemy and the database
driver.
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
def lose_commit_answer(
    store: Store, *, committed: bool = True, after: int = 0
) -> Iterator[list[bool]]:
    """Let one COMMIT on this store lose its connection.

    Args:
        store: The store.
        committed: True if the transaction is committed before the connection is lost.
        after: Number of earlier COMMITs that succeed.

    Yields:
        A list that is empty until the COMMIT is lost.
    """
    lost: list[bool] = []
    successes: list[bool] = []
    dialect = store.engine.dialect
    real = dialect.do_commit

    def commit(connection: Any) -> None:
        if lost or len(successes) < after:
            successes.append(True)
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
    """A TCP proxy to a server on this machine that can freeze or cut connections.

    ``freeze`` stops all data without an error. ``cut`` closes all connections. ``redirect`` sends
    new connections to another server.

    Attributes:
        cut_at: Bytes of a client's request. The proxy drops the answer and cuts the connection,
            once.
        chunks: Number of chunks that clients have sent so far.
    """

    def __init__(self, url: str) -> None:
        self._to = sa.make_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = self._to.set(host="127.0.0.1", port=self._listener.getsockname()[1])
        self.cut_at: bytes | None = None
        self.chunks = 0
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

    def redirect(self, url: str) -> None:
        self._to = sa.make_url(url)

    def close(self) -> None:
        self._listener.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((str(self._to.host), int(self._to.port or 0)))
            except OSError:
                # The server does not listen now.
                client.close()
                continue
            drops_answer = threading.Event()
            for source, target, is_client in ((client, server, True), (server, client, False)):
                self._sockets.add(source)
                threading.Thread(
                    target=self._carry, args=(source, target, is_client, drops_answer), daemon=True
                ).start()

    def _carry(
        self,
        source: socket.socket,
        target: socket.socket,
        is_client: bool,
        drops_answer: threading.Event,
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.chunks += is_client
                self._open.wait()
                if is_client and self.cut_at is not None and self.cut_at in data:
                    self.cut_at = None
                    drops_answer.set()
                elif not is_client and drops_answer.is_set():
                    break
                target.sendall(data)
        _shut(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    """Shut a socket down, which wakes the threads that wait for its data."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
