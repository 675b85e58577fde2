# SPDX-License-Identifier: Apache-2.0
"""The process ``kilonova-console``.

It has a thread per connection, a thread that accepts connections, and two threads that check the
sessions. Any number of these processes may run, and each counts its own sessions. No state survives
the process: after a crash users request new URLs. URLs contain tokens, so requests are never
logged.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from oslo_config import cfg
from websockets.http11 import Request, Response
from websockets.sync import server as websockets
from websockets.typing import Subprotocol

from common import access
from common.domain import errors
from common.security import tls
from common.security.unproved import origin, to_shed
from common.service import reload, service
from common.service.log import get_logger
from compute_api.console.browser_cookies import BrowserCookies
from compute_api.console.page_server import PageServer
from compute_api.console.sessions import ConsoleSessions
from compute_api.console.token_check import TokenChecker, keystone
from compute_api.http.health import Dependency, Health

log = get_logger(__name__)
#: Intervals between checks of the sessions' records and of their users' tokens.
RECORD_CHECK_SECONDS, TOKEN_CHECK_SECONDS = 1.0, 20.0
#: Connections that fetch pages or have not completed the handshake.
MAX_OTHER_CONNECTIONS = 64
MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES = 256 * 1024, 4
#: Time that data may stay unacknowledged or unread.
TCP_USER_TIMEOUT_MILLISECONDS = 30_000
BINARY = Subprotocol("binary")


class ConsoleServer:
    """The threads of the process: they accept and serve connections, and check the sessions.

    Args:
        listener: The listening socket.
        pages: The pages.
        sessions: The sessions.
        most: Largest number of connections that are not sessions. A further connection replaces the
            oldest of the address with the most connections.
        ask_every: Seconds between two checks of the users' tokens.
    """

    def __init__(
        self,
        listener: socket.socket,
        pages: PageServer,
        sessions: ConsoleSessions,
        most: int,
        ask_every: float = TOKEN_CHECK_SECONDS,
    ) -> None:
        self._listener, self._sessions = listener, sessions
        self._most, self._ask_every = most, ask_every
        self._lock = threading.Lock()
        #: Address of each open connection, oldest first.
        self._open: dict[socket.socket, str] = {}
        #: The connections that are websockets.
        self._websockets: set[socket.socket] = set()
        self._stop = threading.Event()
        quiet = logging.getLogger("kilonova.websockets")
        # The library would log requests with their tokens.
        quiet.setLevel(logging.CRITICAL)

        def answer(connection: websockets.ServerConnection, request: Request) -> Response | None:
            return pages.answer(request)

        def serve(browser: websockets.ServerConnection) -> None:
            self._websockets.add(browser.socket)
            try:
                sessions.serve(browser)
            except Exception:
                log.exception("a console's session failed unexpectedly")
                raise

        self._server = websockets.serve(
            serve,
            sock=listener,
            process_request=answer,
            select_subprotocol=_select_subprotocol,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=MAX_QUEUED_MESSAGES,
            open_timeout=10,
            close_timeout=5,
            server_header=None,
            logger=quiet,
        )

    def start(self) -> list[threading.Thread]:
        """Start the threads that accept connections and check sessions, and return them."""
        threads = [
            threading.Thread(target=self._accept, name="accept", daemon=True),
            threading.Thread(
                target=self._check_regularly,
                args=(RECORD_CHECK_SECONDS, self._sessions.check_records),
                name="look",
                daemon=True,
            ),
            threading.Thread(
                target=self._check_regularly,
                args=(self._ask_every, self._sessions.check_tokens),
                name="callers",
                daemon=True,
            ),
        ]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Stop accepting connections, and end all sessions. Wait for them for at most 5 seconds."""
        self._stop.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the listener was closed", problem=error)
        self._sessions.close()
        deadline = time.monotonic() + 5
        while len(self._sessions) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                channel, address = self._listener.accept()
            except OSError as error:
                # For example, no file descriptors are free. This is temporary.
                if not self._stop.wait(0.1):
                    log.warning("a connection cannot be accepted", problem=error)
                continue
            self._make_room()
            with self._lock:
                self._open[channel] = origin(address)
            threading.Thread(
                target=self._serve, args=(channel, address), name="connection", daemon=True
            ).start()

    def _serve(self, channel: socket.socket, address: object) -> None:
        try:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MILLISECONDS
            )
            self._server.handler(channel, address)
        finally:
            with self._lock:
                self._open.pop(channel, None)
                self._websockets.discard(channel)

    def _make_room(self) -> None:
        with self._lock:
            waiting = [channel for channel in self._open if channel not in self._websockets]
            if len(waiting) < self._most:
                return
            oldest = to_shed(waiting, self._open)
            del self._open[oldest]
        try:
            # The connection's thread then ends.
            oldest.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the connection had ended", problem=error)

    def _check_regularly(self, seconds: float, check: Callable[[], None]) -> None:
        while not self._stop.wait(seconds):
            try:
                check()
            except errors.Problem as problem:
                # The next check repeats this. A guest that ends closes its connection by itself.
                log.warning(
                    "the console sessions cannot be checked; the next check follows",
                    problem=problem,
                )
            except Exception:
                log.exception("a check of the console sessions failed unexpectedly")


def _select_subprotocol(
    connection: websockets.ServerConnection, offered: Sequence[Subprotocol]
) -> Subprotocol | None:
    """Return "binary" if the browser offers it, else None. All messages are binary in any case."""
    return BINARY if BINARY in offered else None


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket, or end the process with a message."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except OSError as problem:
        sys.exit(
            f"kilonova-console: [console] host {host}, port {port}: {problem}; set an address of this machine "
            "and a free port"
        )


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open database and broker, listen, and start the threads.

    If the address cannot be used, the process ends with a message.

    Returns:
        A function that closes all of them.

    Raises:
        ConfigError: The configuration is invalid.
    """
    from common.clients.identity import IdentityClient
    from common.rpc import agent
    from common.rpc.broker import opener, require_answer
    from common.rpc.host_link import ControlSide
    from common.security.broker_names import CONSOLE
    from common.security.vault import Vault
    from common.store.engine import Store
    from common.store.hosts import host_keys
    from common.store.version import guard

    options = conf.console
    reload.takes(*reload.OF_IDENTITY)
    access.check(conf, access.DATABASE, access.BROKER, access.IDENTITY)
    # With TLS, hosts require a client certificate.
    tls.protecting(conf, "hosts' consoles", [], listens=True)
    store = guard(Store.open(conf))
    browsers = BrowserCookies(
        store, options.public_url, options.allowed_origins, options.token_seconds
    )
    identity = IdentityClient(conf)
    health = Health(
        (
            Dependency("database", store.now),
            Dependency("identity", identity.require_answer),
            Dependency("broker", partial(require_answer, opener(conf))),
        )
    )
    pages = PageServer(
        Path(options.novnc),
        options.public_url,
        browsers,
        options.allowed_origins,
        health,
        Path(conf.spice.html5),
    )
    callers = TokenChecker(Vault(conf.secret_key), keystone(identity, conf.identity.auth_url))
    link = ControlSide(opener(conf), host_keys.of_all(store, conf), role=CONSOLE)
    sessions = ConsoleSessions(
        store,
        agent.AgentClient(link),
        callers,
        browsers,
        most=options.sessions,
        per_server=options.sessions_per_server,
        per_user=options.sessions_per_user,
        seconds=options.token_seconds,
        protect=lambda host: tls.protecting(conf, "a host's console", [host]),
    )
    server = ConsoleServer(
        listen(options.host, options.port),
        pages,
        sessions,
        options.sessions + MAX_OTHER_CONNECTIONS,
    )
    threads = server.start()

    def close() -> None:
        server.close()
        for thread in threads:
            thread.join(timeout=2)
        link.close()
        store.close()

    return close


def main() -> None:
    """Run the console script ``kilonova-console``."""
    service.run("console", service.start("console"), open_up)


if __name__ == "__main__":
    main()
