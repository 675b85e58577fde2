# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-console: one thread a connection, one that accepts, one that looks after the sessions.

Any number of them may run; each counts its own sessions. It keeps nothing: after kill -9 it starts, and people ask
for new addresses. Tokens stand in the addresses of requests, so no request is ever logged.
"""
from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg
from websockets.http11 import Request, Response
from websockets.sync import server as websockets

from common import errors, service
from compute_api.console_service.door import Door
from compute_api.console_service.sessions import Sessions
from compute_api.edge.limits import origin

log = logging.getLogger(__name__)
LOOK_EVERY = 1.0                    # seconds
BESIDE_SESSIONS = 64                # connections that fetch pages or shake hands
LARGEST_MESSAGE, QUEUED_MESSAGES = 256 * 1024, 4
UNHEARD_MILLISECONDS = 30_000       # that what was sent may stay unacknowledged or unread
BINARY = "binary"


class Service:
    """The threads around ``Sessions``. ``most`` is how many connections there may be at a time. One more takes
    the place of the oldest that is no session yet, of the address that has the most of these."""

    def __init__(self, listener: socket.socket, door: Door, sessions: Sessions, most: int) -> None:
        self._listener, self._sessions = listener, sessions
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[socket.socket, str] = {}           # -> address; in the order in which they came
        self._sessions_of: set[socket.socket] = set()       # those that are websockets by now
        self._stop = threading.Event()
        quiet = logging.getLogger("kilonova.websockets")
        quiet.setLevel(logging.CRITICAL)        # it would log requests, and with them tokens

        def answer(connection: websockets.ServerConnection, request: Request) -> Response | None:
            return door.answer(request)

        def serve(browser: websockets.ServerConnection) -> None:
            self._sessions_of.add(browser.socket)
            try:
                sessions.serve(browser)
            except Exception:
                log.exception("a console's session failed unexpectedly")
                raise
        self._server = websockets.serve(
            serve, sock=listener, process_request=answer, select_subprotocol=_subprotocol, compression=None,
            max_size=LARGEST_MESSAGE, max_queue=QUEUED_MESSAGES, open_timeout=10, close_timeout=5, server_header=None,
            logger=quiet)

    def start(self) -> list[threading.Thread]:
        """Start the threads."""
        threads = [threading.Thread(target=self._accept, name="accept", daemon=True),
                   threading.Thread(target=self._look, name="look", daemon=True)]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Accept nobody, and end the sessions."""
        self._stop.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)       # wakes accept()
        except OSError as error:
            log.debug("the listener was closed: %s", error)
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
                if not self._stop.wait(0.1):        # out of descriptors, say: it passes
                    log.warning("no connection could be accepted: %s", error)
                continue
            self._make_room()
            with self._lock:
                self._open[channel] = origin(address)
            threading.Thread(target=self._serve, args=(channel, address), name="connection", daemon=True).start()

    def _serve(self, channel: socket.socket, address: Any) -> None:
        try:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MILLISECONDS)
            self._server.handler(channel, address)
        finally:
            with self._lock:
                self._open.pop(channel, None)
                self._sessions_of.discard(channel)

    def _make_room(self) -> None:
        with self._lock:
            if len(self._open) < self._most:
                return
            waiting = [channel for channel in self._open if channel not in self._sessions_of]
            each = Counter(self._open[channel] for channel in waiting)
            late = max(waiting, key=lambda channel: each[self._open[channel]], default=None)    # the first of equals
            if late is None:
                return
            del self._open[late]
        try:
            late.shutdown(socket.SHUT_RDWR)         # its thread ends
        except OSError as error:
            log.debug("it had ended by itself: %s", error)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            try:
                self._sessions.look()
            except errors.Problem as problem:
                # A guest's own connection ends with the guest, so that its sessions may wait for the database.
                log.warning("the sessions could not be looked after: %s", problem)
            except Exception:
                log.exception("the sessions could not be looked after")


def _subprotocol(connection: websockets.ServerConnection, offered: Sequence[Any]) -> Any:
    """All messages are binary; who offers its name is told."""
    return BINARY if BINARY in offered else None


def listen(host: str, port: int) -> socket.socket:
    """The socket that connections come to; the process ends when it cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=128)
    except OSError as problem:
        sys.exit(f"kilonova-console: [console] host {host}, port {port}: {problem}; give an address of this machine "
                 "and a port that is free")


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open database and broker, listen, start the threads; returns what closes them."""
    from common.rpc import agent
    from common.rpc.broker import opener
    from common.rpc.host_link import ControlSide
    from common.store import host_keys
    from common.store.engine import Store
    from common.store.version import guarded
    options = conf.console
    door = Door(Path(options.novnc), options.public_url, options.allowed_origins)
    store = guarded(Store.opened(conf.database))
    link = ControlSide(opener(conf), host_keys.of_all(store, conf))
    sessions = Sessions(store, agent.Client(link), most=options.sessions, per_server=options.sessions_per_server,
                        seconds=options.token_seconds)
    running = Service(listen(options.host, options.port), door, sessions, options.sessions + BESIDE_SESSIONS)
    threads = running.start()

    def close() -> None:
        running.close()
        for thread in threads:
            thread.join(timeout=2)
        link.close()
        store.close()
    return close


def main() -> None:
    """The console script kilonova-console."""
    service.run(service.start("console"), open_up)


if __name__ == "__main__":
    main()
