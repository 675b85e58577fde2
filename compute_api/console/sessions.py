# SPDX-License-Identifier: Apache-2.0
"""Sessions connect a browser's websocket with a guest's console.

``service`` calls ``ConsoleSessions.serve`` on the thread of each websocket. ``check_records`` ends
sessions of deleted or moved guests and runs every second. ``check_tokens`` ends sessions of users
without access and runs less often. Data passes unchanged, and a slow reader slows the writer.

A SPICE session has several websockets, its channels. The first one uses the token. The others bring
the cookie of the first, also to another process of this service, and end with it. When the same
browser reloads the page, the new connection replaces the old session.

Invariant: no state of a session outlives the process. After a crash users request new URLs.
"""

from __future__ import annotations

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
from common.service.log import get_logger
from common.store.engine import Store
from common.store.rows import ConsoleTokenRow
from common.store.servers import console_tokens
from compute_api.console.browser_cookies import BrowserCookies, token_of
from compute_api.console.token_check import TokenChecker

log = get_logger(__name__)
CHUNK_BYTES = 64 * 1024
Side = socket.socket | TlsSocket
CONNECT_SECONDS = 5.0
#: Time in which a browser must close an ended session.
ENDING_SECONDS = 5.0
#: Connections of a session besides the first.
MAX_CHANNELS = 16
#: Longest time between extensions of the tokens' rows, well below the retention of expired rows.
KEEP_INTERVAL_SECONDS = 600.0
#: Close codes: normal end, access denied, failure, restart of the service, and try again later.
DONE, REFUSED, FAILED, RESTART, BUSY = 1000, 1008, 1011, 1012, 1013
_REVOKED = "Your token was revoked, or your user or project is disabled."
_ENDED = "The console's session has ended. Request a new console URL."
_AGAIN = "The console was opened again in this browser."
_GONE = "The server was deleted or has moved, or the console was closed. Request a new console URL."


class ConsoleAgents(Protocol):
    """Sends queries to hosts' agents, which open the consoles of guests."""

    def query(self, host: str, verb: str, arguments: JsonObject) -> JsonObject:
        """Run a query on the host's agent, and return the answer.

        Args:
            host: Name of the host.
            verb: Name of the query, here ``console``.
            arguments: Arguments of the query: the server, and the kind of the console.

        Raises:
            NoAnswer: The host does not answer.
            Problem: The host answers with this error.
        """


class BadToken(Exception):
    """The token of a console cannot be used.

    The token is unknown, used, expired or of another browser, its server has moved, its user has
    lost access, or the kind of the console does not use this service.
    """


class SessionRefused(Exception):
    """A session is refused. ``code`` is the websocket's close code, and the text is the reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ConsoleSession:
    """An open session. ``end`` may be called from any thread.

    Attributes:
        caller: The encrypted token of the user.
        used_at: Time at which the console's token was used for this session.
    """

    def __init__(self, browser: ServerConnection, guest: Side, record: ConsoleTokenRow) -> None:
        self._browser, self._guest, self.caller = browser, guest, record.caller
        self.used_at = record.used_at
        self._end = (DONE, "The guest has ended its console.")
        self._ended_at: float | None = None

    def carry(self) -> None:
        """Pass data in both directions until one side ends. Then close both sides."""
        back = threading.Thread(target=self._carry_to_browser, name="console-back", daemon=True)
        back.start()
        try:
            for message in self._browser:
                self._guest.sendall(message.encode() if isinstance(message, str) else message)
        except (OSError, ConnectionClosed) as error:
            log.debug("a console's session ended", problem=error)
        _shut(self._guest)
        back.join()
        self._guest.close()

    def _carry_to_browser(self) -> None:
        try:
            while data := self._guest.recv(CHUNK_BYTES):
                self._browser.send(data)
        except (OSError, ConnectionClosed) as error:
            log.debug("a console's session ended", problem=error)
        self._browser.close(*self._end)

    def end(self, code: int, text: str) -> None:
        """Begin to end the session. ``carry`` then sends the code and text to the browser.

        The first call decides on code and text. A repeated call after ``ENDING_SECONDS`` closes the
        connection without a message, because the browser has not reacted.
        """
        if self._ended_at is None:
            self._end, self._ended_at = (code, text), time.monotonic()
            _shut(self._guest)
        elif time.monotonic() > self._ended_at + ENDING_SECONDS:
            _shut(self._browser.socket)


class ConsoleSessions:
    """All sessions of this process.

    Args:
        store: The database.
        agents: The hosts.
        callers: Validates users' tokens.
        browsers: The cookies.
        most: Largest number of sessions.
        per_server: Largest number of sessions of a server.
        per_user: Largest number of sessions of a user.
        seconds: Lifetime of a token's row, which open sessions extend.
        protect: Returns the TLS settings for a host, or None for plain text. May raise ConfigError.
    """

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
        #: Server and user of each session, by the hash of the token.
        self._places: dict[str, tuple[str, str]] = {}
        #: Connections besides the first, by the hash of the token.
        self._channels: Counter[str] = Counter()
        #: Hash of the token of each open connection.
        self._open: dict[ConsoleSession, str] = {}
        self._kept_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def serve(self, browser: ServerConnection) -> None:
        """Serve a websocket: check the token, connect the guest, and pass data until the end.

        A websocket that is refused is closed, with a reason unless the token cannot be used.
        """
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
                self._end_earlier_session(record)
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
        """Serve a further connection of an open session, of this or another process.

        Raises:
            SessionRefused: The session has ``MAX_CHANNELS`` further connections in this process, or
                the host cannot be reached.
            Problem: The host's agent does not answer, or refuses.
        """
        with self._lock:
            if self._channels[record.hash] >= MAX_CHANNELS:
                raise SessionRefused(BUSY, "This console has too many connections.")
            self._channels[record.hash] += 1
        try:
            self._carry(browser, record)
        finally:
            with self._lock:
                self._channels[record.hash] -= 1
                # This drops entries with the count 0.
                self._channels += Counter()

    def _end_earlier_session(self, record: ConsoleTokenRow) -> None:
        """End the earlier session of the same browser, and wait until its place is free.

        After ``ENDING_SECONDS`` this function returns in any case. A session of another process is
        not waited for. That process ends the session when it next checks the records.
        """
        with self._lock:
            sessions = [session for session, key in self._open.items() if key == record.hash]
        for session in sessions:
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
                    BUSY, "Too many consoles are open; try this console URL again later."
                )
            if servers.count(record.server_id) >= self._per_server:
                raise SessionRefused(
                    BUSY,
                    "Too many consoles of this server are open; close a console and try again.",
                )
            if users.count(record.user_id) >= self._per_user:
                raise SessionRefused(
                    BUSY, "You have too many consoles open; close a console and try again."
                )
            self._places[record.hash] = (record.server_id, record.user_id)

    def _join(self, browser: ServerConnection, token: str, cookie: str) -> None:
        """Use the token, connect the guest, and pass data until the end.

        Then the session ends in the database, which deletes the token's row unless the browser may
        open the console again. The other connections of the session end too.

        Raises:
            BadToken: The token was used or has expired meanwhile.
            SessionRefused: The host cannot be reached.
            Problem: The host or the database does not answer, or the host refuses.
        """
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
            self._delete_record(record.hash, record.used_at)
            with self._lock:
                others = [other for other, key in self._open.items() if key == record.hash]
            for session in others:
                session.end(DONE, _ENDED)

    def _carry(self, browser: ServerConnection, record: ConsoleTokenRow) -> None:
        """Connect the guest, and pass data until one side ends. Errors: see ``_connect_guest``."""
        session = ConsoleSession(browser, self._connect_guest(record), record)
        with self._lock:
            self._open[session] = record.hash
        try:
            log.info(
                "a console is opened",
                kind=record.kind,
                server=record.server_id,
                user=record.user_id,
            )
            session.carry()
            log.info("a console is closed", kind=record.kind, server=record.server_id)
        finally:
            with self._lock:
                del self._open[session]

    def _connect_guest(self, record: ConsoleTokenRow) -> Side:
        """Connect to the guest's console with the address and secret from the host's agent.

        Raises:
            SessionRefused: The address cannot be reached, or the TLS configuration is invalid.
            Problem: The agent does not answer, or refuses.
        """
        offer = self._agents.query(
            record.host, "console", {"server": record.server_id, "kind": HOST_KINDS[record.kind]}
        )
        try:
            guest = self._connect(offer["host"], offer["port"])
            guest.sendall(offer["secret"].encode())
            guest.settimeout(None)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, ConfigError) as error:
            log.warning(
                "the consoles of a host are unreachable; see [agent] console_host on the host",
                host=record.host,
                address=offer["host"],
                port=offer["port"],
                problem=error,
            )
            raise SessionRefused(
                FAILED,
                "The server's host cannot be reached. Request a new console URL and try again.",
            ) from error
        return guest

    def _connect(self, host: str, port: int) -> Side:
        """Connect to the address of a console on a host, with TLS if the configuration has it.

        Raises:
            OSError: The host is unreachable, or its certificate is invalid.
            ConfigError: The TLS configuration is invalid, or does not allow plain text to the host.
        """
        tls_settings = self._protect(host)
        plain_socket = socket.create_connection((host, port), CONNECT_SECONDS)
        if tls_settings is None:
            return plain_socket
        return TlsSocket.open(plain_socket, tls_settings.for_client(), host)

    def _delete_record(self, token_hash: str, used_at: int) -> None:
        try:
            self._store.write(lambda tx: console_tokens.forget(tx, token_hash, used_at))
        except errors.Unavailable as problem:
            log.warning(
                "the row of a closed console session remains until it expires", problem=problem
            )

    def check_records(self) -> None:
        """End the sessions that lost their token row, and extend the rows of the others in time.

        A session loses the row if the row is deleted, if the guest is deleted or moved, if the
        first connection of the session has ended, or if another connection has used the token
        since.

        Raises:
            Unavailable: The database does not answer.
        """
        with self._lock:
            sessions = dict(self._open)
        if not sessions:
            return
        alive = self._store.read(lambda tx: console_tokens.alive(tx, sorted({*sessions.values()})))
        for session, token_hash in sessions.items():
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
        """End the sessions of users whose token is not valid any more.

        Raises:
            Problem: As for ``TokenChecker.is_valid``. The remaining sessions stay open.
        """
        with self._lock:
            sessions = list(self._open)
        validity: dict[str | None, bool] = {}
        for session in sessions:
            if session.caller not in validity:
                validity[session.caller] = self._callers.is_valid(session.caller)
            if not validity[session.caller]:
                session.end(REFUSED, _REVOKED)

    def close(self) -> None:
        """Begin to end all sessions, because the process ends. This does not wait for the end."""
        with self._lock:
            sessions = list(self._open)
        for session in sessions:
            session.end(RESTART, "The console service restarts. Request a new console URL.")


def _refuse(browser: ServerConnection, refusal: BadToken | SessionRefused | errors.Problem) -> None:
    """Close the websocket with a reason of at most 120 bytes.

    Without a valid token the connection ends without a close frame, as in Nova's proxies.
    """
    if isinstance(refusal, BadToken):
        log.info(
            "a console is refused: the token is unknown, used, expired or revoked, or the server has moved"
        )
        _shut(browser.socket)
        return
    if isinstance(refusal, SessionRefused):
        code, text = refusal.code, str(refusal)
    else:
        code, text = BUSY if refusal.retryable else FAILED, refusal.text
    log.info("a console is refused", reason=text)
    browser.close(code, text.encode()[:120].decode(errors="ignore"))


def _shut(side: Side) -> None:
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a console's other side had closed before")
