# SPDX-License-Identifier: Apache-2.0
"""Sessions: a browser's websocket and a guest's console, joined for as long as both may be.

``Sessions.serve`` is the story of one, called by ``service`` on the thread of its websocket; ``look`` is called every
second and ends those whose guest is gone, in one question for all. The bytes are opaque: whoever sits in the guest
decides them, and the browser's noVNC reads them. Blocking sockets on both sides: who reads slowly slows the writer.
Must stay true: nothing of a session outlives the process, so that after a crash people ask for a new address.
"""
from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from common import errors
from common.store import console_tokens
from common.store.engine import Store
from compute_api.dependencies import Agents
from compute_api.resources.consoles import HOST_KINDS

log = logging.getLogger(__name__)
CHUNK = 64 * 1024
CONNECT_SECONDS = 5.0
ENDING_SECONDS = 5.0            #: that a browser has to take in the end
MOST_PARAMETERS = 20
KEEP_EVERY = 600.0              #: seconds at most, well below the time that expired rows are kept
#: Close codes: all is well, not allowed (any more), it failed, we restart, try again later.
DONE, REFUSED, FAILED, RESTART, BUSY = 1000, 1008, 1011, 1012, 1013
_GONE = "The server was deleted or has moved, or the console was closed: ask for a new address."


class BadToken(Exception):
    """It is no token, was used, has expired, or its server has moved."""


class Refused(Exception):
    """No session; ``code`` is the close code, the text says what to do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """One that is open. ``end`` may be called from any thread."""

    def __init__(self, browser: ServerConnection, guest: socket.socket) -> None:
        self._browser, self._guest = browser, guest
        self._end = (DONE, "The guest has ended its console.")
        self._ended_at: float | None = None

    def carry(self) -> None:
        """Until one of both ends."""
        back = threading.Thread(target=self._to_browser, name="console-back", daemon=True)
        back.start()
        try:
            for message in self._browser:
                self._guest.sendall(message.encode() if isinstance(message, str) else message)
        except (OSError, ConnectionClosed) as error:
            log.debug("a console's session ended: %s", error)
        _shut(self._guest)
        back.join()
        self._guest.close()

    def _to_browser(self) -> None:
        try:
            while data := self._guest.recv(CHUNK):
                self._browser.send(data)
        except (OSError, ConnectionClosed) as error:
            log.debug("a console's session ended: %s", error)
        self._browser.close(*self._end)

    def end(self, code: int, text: str) -> None:
        """End it and tell the browser why; asked again after ``ENDING_SECONDS``, without a word."""
        if self._ended_at is None:
            self._end, self._ended_at = (code, text), time.monotonic()
            _shut(self._guest)
        elif time.monotonic() > self._ended_at + ENDING_SECONDS:
            _shut(self._browser.socket)


class Sessions:
    """All of this process. ``most`` in all, ``per_server`` of one server; ``seconds``: how long a token's row stands
    without word from us."""

    def __init__(self, store: Store, agents: Agents, *, most: int, per_server: int, seconds: int) -> None:
        self._store, self._agents = store, agents
        self._most, self._per_server, self._seconds = most, per_server, seconds
        self._lock = threading.Lock()
        self._places: dict[str, str] = {}           # hash of the token -> server
        self._open: dict[str, Session] = {}
        self._kept_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def serve(self, browser: ServerConnection) -> None:
        """The whole story of a websocket."""
        assert browser.request is not None
        token = token_of(browser.request.path)
        try:
            record = self._store.read(lambda tx: console_tokens.find(tx, token))
            if record is None:
                raise BadToken
            self._take_place(record.hash, record.server_id)
        except (BadToken, Refused, errors.Problem) as refusal:
            return _refuse(browser, refusal)
        try:
            self._join(browser, token)
        except (BadToken, Refused, errors.Problem) as refusal:
            _refuse(browser, refusal)
        finally:
            with self._lock:
                self._open.pop(record.hash, None)
                del self._places[record.hash]

    def _take_place(self, token_hash: str, server: str) -> None:
        with self._lock:
            if token_hash in self._places:
                raise BadToken
            if len(self._places) >= self._most:
                raise Refused(BUSY, "Too many consoles are open; try this address again later.")
            if list(self._places.values()).count(server) >= self._per_server:
                raise Refused(BUSY, "Too many consoles of this server are open: close one and try again.")
            self._places[token_hash] = server

    def _join(self, browser: ServerConnection, token: str) -> None:
        """Use the token up, open the guest's side, carry bytes; then the token's row goes."""
        record = self._store.write(lambda tx: console_tokens.use(tx, token))
        if record is None:
            raise BadToken
        try:
            session = Session(browser, self._reach(record))
            with self._lock:
                self._open[record.hash] = session
            log.info("console %s of server %s opened by user %s", record.kind, record.server_id, record.user_id)
            session.carry()
            log.info("console %s of server %s closed", record.kind, record.server_id)
        finally:
            self._forget(record.hash)

    def _reach(self, record: Any) -> socket.socket:
        """The guest's console, through its host's agent."""
        offer = self._agents.query(record.host, "console", {"server": record.server_id,
                                                            "kind": HOST_KINDS[record.kind]})
        try:
            guest = socket.create_connection((offer["host"], offer["port"]), CONNECT_SECONDS)
            guest.sendall(offer["secret"].encode())
            guest.settimeout(None)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            log.warning("the consoles of host %s cannot be reached at %s port %s: %s; see [agent] console_host there",
                        record.host, offer["host"], offer["port"], error)
            raise Refused(FAILED, "The server's host cannot be reached: ask for a new address, try again.") from error
        return guest

    def _forget(self, token_hash: str) -> None:
        try:
            self._store.write(lambda tx: console_tokens.forget(tx, token_hash))
        except errors.Unavailable as problem:
            log.warning("the record of a console's session stays until it expires: %s", problem)

    def look(self) -> None:
        """End the sessions that may not go on, keep the records of the others. Raises Unavailable."""
        with self._lock:
            found = dict(self._open)
        if not found:
            return
        alive = self._store.read(lambda tx: console_tokens.alive(tx, list(found)))
        for token_hash in found.keys() - alive:
            found[token_hash].end(REFUSED, _GONE)
        if alive and time.monotonic() > self._kept_at + min(self._seconds / 4, KEEP_EVERY):
            self._store.write(lambda tx: console_tokens.keep(tx, sorted(alive), self._seconds))
            self._kept_at = time.monotonic()

    def close(self) -> None:
        """End all."""
        with self._lock:
            found = list(self._open.values())
        for session in found:
            session.end(RESTART, "The console service restarts: ask for a new address.")


def token_of(path: str) -> str:
    """The token of ``/?token=…``, or of the path that noVNC was told: ``/websockify?path=?token=…``. Empty: none."""
    try:
        query = parse_qs(urlsplit(path).query, max_num_fields=MOST_PARAMETERS)
        for inner in query.get("path", ()):
            query = {**parse_qs(inner.partition("?")[2], max_num_fields=MOST_PARAMETERS), **query}
    except ValueError:
        return ""
    return query.get("token", [""])[-1]


def _refuse(browser: ServerConnection, why: BadToken | Refused | errors.Problem) -> None:
    """Close with a reason; it holds 123 bytes at most. Whoever brings no good token is told nothing: the connection
    ends without a frame, as Nova's proxies end it."""
    if isinstance(why, BadToken):
        log.info("a console was refused: its token is none, was used or has expired, or its server has moved")
        _shut(browser.socket)
        return
    if isinstance(why, Refused):
        code, text = why.code, str(why)
    else:
        code, text = BUSY if why.retryable else FAILED, why.text
    log.info("a console was refused: %s", text)
    browser.close(code, text.encode()[:120].decode(errors="ignore"))


def _shut(side: socket.socket) -> None:
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a console's other side had closed before")
