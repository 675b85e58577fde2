# SPDX-License-Identifier: Apache-2.0
"""Sessions: a browser's websocket joined with a guest's console.

``service`` calls ``ConsoleSessions.serve`` on the thread of each websocket, ``check_records`` every
second, which ends sessions whose guest is gone, and ``check_tokens`` more rarely, which ends those
whose user has lost the right to them. The bytes are opaque. A session of SPICE is several
websockets, its channels: the first uses the token up, the others bring the cookie that it brought,
also to another process of this service, and end with it. Sockets block on both sides: a slow
reader slows the writer. The browser that opened a session may open it again, at a reload: the new
connection takes the place of the old one. Must stay true: nothing of a session outlives the
process, so that after a crash users ask for a new URL."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from common.domain import errors
from common.domain.console_types import HOST_KINDS, OF_SEVERAL_CONNECTIONS, SPICE_DIRECT
from common.domain.errors import ConfigError
from common.domain.json_types import JsonObject
from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from common.store.engine import Store
from common.store.rows import ConsoleTokenRow
from common.store.servers import console_tokens
from compute_api.console.browser_cookies import BrowserCookies, token_of
from compute_api.console.token_check import TokenChecker

log = logging.getLogger(__name__)
CHUNK_BYTES = 64 * 1024
Side = socket.socket | TlsSocket
CONNECT_SECONDS = 5.0
ENDING_SECONDS = 5.0  #: that a browser has to take in the end
MAX_CHANNELS = 16  #: connections of a session beside its first
KEEP_INTERVAL_SECONDS = 600.0  #: seconds at most, well below the time that expired rows are kept
#: Close codes: all is well, not allowed (any more), it failed, we restart, try again later.
DONE, REFUSED, FAILED, RESTART, BUSY = 1000, 1008, 1011, 1012, 1013
_REVOKED = "Your token was revoked, or your user or project is disabled."
_ENDED = "The console's session has ended: ask for a new address."
_AGAIN = "The console was opened again in this browser."
_GONE = "The server was deleted or has moved, or the console was closed: ask for a new address."


class ConsoleAgents(Protocol):
    """Asks hosts for the guest's side of a console."""

    def query(self, host: str, verb: str, arguments: JsonObject) -> JsonObject:
        """Raises NoAnswer, or the Problem that the host answers with."""


class BadToken(Exception):
    """It is no token, was used, has expired, or its server has moved."""


class SessionRefused(Exception):
    """No session; ``code`` is the close code, the text says what to do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ConsoleSession:
    """One that is open. ``caller``: the encrypted token of its user; ``used_at``: when the token of
    the console was used for it. ``end`` may be called from any thread."""

    def __init__(self, browser: ServerConnection, guest: Side, record: ConsoleTokenRow) -> None:
        self._browser, self._guest, self.caller = browser, guest, record.caller
        self.used_at = record.used_at
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
            while data := self._guest.recv(CHUNK_BYTES):
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


class ConsoleSessions:
    """All of this process. ``most`` in all, ``per_server`` of one server, ``per_user`` of one user;
    ``seconds``: how long a token's row stands without word from us; ``protect``: what proves a
    host's address, None: plain text is all right; may raise ConfigError."""

    def __init__(
        self,
        store: Store,
        agents: ConsoleAgents,
        callers: TokenChecker,
        browsers: BrowserCookies,
        *,
        most: int,
        per_server: int,
        per_user: int,
        seconds: int,
        protect: Callable[[str], Tls | None] = lambda host: None,
    ) -> None:
        self._store, self._agents, self._callers, self._browsers = store, agents, callers, browsers
        self._most, self._per_server, self._per_user, self._seconds = (
            most,
            per_server,
            per_user,
            seconds,
        )
        self._protect = protect
        self._lock = threading.Lock()
        self._places: dict[str, tuple[str, str]] = {}  # hash of the token -> server, user
        self._channels: Counter[str] = Counter()  # the same -> connections beside the first
        self._open: dict[ConsoleSession, str] = {}  # -> the same
        self._kept_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def serve(self, browser: ServerConnection) -> None:
        """The whole story of a websocket."""
        assert browser.request is not None
        token = token_of(browser.request.path)
        cookie = self._browsers.cookie_of(browser.request.path, browser.request.headers)
        try:
            record = self._store.read(
                lambda tx: (
                    console_tokens.find(tx, token, cookie)
                    or console_tokens.of_open_session(tx, token, cookie)
                )
            )
            if record is None or record.kind == SPICE_DIRECT:
                raise BadToken
            if not self._callers.is_valid(record.caller):
                raise BadToken
            if record.used_at is not None and record.kind in OF_SEVERAL_CONNECTIONS:
                return self._add_channel(browser, record)
            if record.used_at is not None:
                self._end_before(record)
            self._take_place(record)
        except (BadToken, SessionRefused, errors.Problem) as refusal:
            return _refuse(browser, refusal)
        try:
            self._join(browser, token, cookie)
        except (BadToken, SessionRefused, errors.Problem) as refusal:
            _refuse(browser, refusal)
        finally:
            with self._lock:
                del self._places[record.hash]

    def _add_channel(self, browser: ServerConnection, record: ConsoleTokenRow) -> None:
        """One more connection of a session that is open, here or in another process."""
        with self._lock:
            if self._channels[record.hash] >= MAX_CHANNELS:
                raise SessionRefused(BUSY, "This console has too many connections.")
            self._channels[record.hash] += 1
        try:
            self._carry(browser, record)
        finally:
            with self._lock:
                self._channels[record.hash] -= 1
                self._channels += Counter()  # forgets those of which there are none

    def _end_before(self, record: ConsoleTokenRow) -> None:
        """End the session that the same browser has opened before, and wait for its place. One of
        another process ends at its next look at the records."""
        with self._lock:
            open_here = [one for one, of in self._open.items() if of == record.hash]
        for session in open_here:
            session.end(DONE, _AGAIN)
        until = time.monotonic() + ENDING_SECONDS
        while record.hash in self._places and time.monotonic() < until:
            time.sleep(0.01)

    def _take_place(self, record: ConsoleTokenRow) -> None:
        with self._lock:
            if record.hash in self._places:
                raise BadToken
            servers, users = zip(*self._places.values(), strict=True) if self._places else ((), ())
            if len(self._places) >= self._most:
                raise SessionRefused(
                    BUSY, "Too many consoles are open; try this address again later."
                )
            if servers.count(record.server_id) >= self._per_server:
                raise SessionRefused(
                    BUSY, "Too many consoles of this server are open: close one and try again."
                )
            if users.count(record.user_id) >= self._per_user:
                raise SessionRefused(
                    BUSY, "You have too many consoles open: close one and try again."
                )
            self._places[record.hash] = (record.server_id, record.user_id)

    def _join(self, browser: ServerConnection, token: str, cookie: str) -> None:
        """Use the token, open the guest's side, carry bytes; then the token is given up, and the
        session's other connections end."""
        record = self._store.write(
            lambda tx: (
                console_tokens.use(tx, token, cookie) or console_tokens.take_over(tx, token, cookie)
            )
        )
        if record is None:
            raise BadToken
        try:
            self._carry(browser, record)
        finally:
            assert record.used_at is not None
            self._forget(record.hash, record.used_at)
            with self._lock:
                others = [one for one, of in self._open.items() if of == record.hash]
            for session in others:
                session.end(DONE, _ENDED)

    def _carry(self, browser: ServerConnection, record: ConsoleTokenRow) -> None:
        """Open the guest's side, and carry bytes until one of both ends."""
        session = ConsoleSession(browser, self._reach(record), record)
        with self._lock:
            self._open[session] = record.hash
        try:
            log.info(
                "console %s of server %s opened by user %s",
                record.kind,
                record.server_id,
                record.user_id,
            )
            session.carry()
            log.info("console %s of server %s closed", record.kind, record.server_id)
        finally:
            with self._lock:
                del self._open[session]

    def _reach(self, record: ConsoleTokenRow) -> Side:
        """The guest's console, through its host's agent."""
        offer = self._agents.query(
            record.host, "console", {"server": record.server_id, "kind": HOST_KINDS[record.kind]}
        )
        try:
            guest = self._connected(offer["host"], offer["port"])
            guest.sendall(offer["secret"].encode())
            guest.settimeout(None)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, ConfigError) as error:
            log.warning(
                "the consoles of host %s cannot be reached at %s port %s: %s; see [agent] console_host there",
                record.host,
                offer["host"],
                offer["port"],
                error,
            )
            raise SessionRefused(
                FAILED, "The server's host cannot be reached: ask for a new address, try again."
            ) from error
        return guest

    def _connected(self, host: str, port: int) -> Side:
        """Raises OSError, ConfigError: the host is not reached, or not proved."""
        proof = self._protect(host)
        plain = socket.create_connection((host, port), CONNECT_SECONDS)
        if proof is None:
            return plain
        return TlsSocket.open(plain, proof.for_client(), host)

    def _forget(self, token_hash: str, used_at: int) -> None:
        try:
            self._store.write(lambda tx: console_tokens.forget(tx, token_hash, used_at))
        except errors.Unavailable as problem:
            log.warning("the record of a console's session stays until it expires: %s", problem)

    def check_records(self) -> None:
        """End the sessions that may not go on, keep the records of the others. Raises
        Unavailable."""
        with self._lock:
            found = dict(self._open)
        if not found:
            return
        alive = self._store.read(lambda tx: console_tokens.alive(tx, sorted({*found.values()})))
        for session, token_hash in found.items():
            if token_hash not in alive:
                session.end(REFUSED, _GONE)
            elif alive[token_hash] != session.used_at:
                session.end(DONE, _ENDED if alive[token_hash] is None else _AGAIN)
        if alive and time.monotonic() > self._kept_at + min(
            self._seconds / 4, KEEP_INTERVAL_SECONDS
        ):
            self._store.write(lambda tx: console_tokens.keep(tx, sorted(alive), self._seconds))
            self._kept_at = time.monotonic()

    def check_tokens(self) -> None:
        """End the sessions of users who may not have them any more. Raises Unavailable, which ends
        none."""
        with self._lock:
            found = list(self._open)
        stands: dict[str | None, bool] = {}
        for session in found:
            if session.caller not in stands:
                stands[session.caller] = self._callers.is_valid(session.caller)
            if not stands[session.caller]:
                session.end(REFUSED, _REVOKED)

    def close(self) -> None:
        """End all."""
        with self._lock:
            found = list(self._open)
        for session in found:
            session.end(RESTART, "The console service restarts: ask for a new address.")


def _refuse(browser: ServerConnection, why: BadToken | SessionRefused | errors.Problem) -> None:
    """Close with a reason; it holds 123 bytes at most. Without a good token there is no reason: the
    connection ends without a frame, as Nova's proxies end it."""
    if isinstance(why, BadToken):
        log.info(
            "a console was refused: its token is none, was used or has expired, or its server has moved"
        )
        _shut(browser.socket)
        return
    if isinstance(why, SessionRefused):
        code, text = why.code, str(why)
    else:
        code, text = BUSY if why.retryable else FAILED, why.text
    log.info("a console was refused: %s", text)
    browser.close(code, text.encode()[:120].decode(errors="ignore"))


def _shut(side: Side) -> None:
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a console's other side had closed before")
