# SPDX-License-Identifier: Apache-2.0
"""Consoles of this host's guests for the console service: one listener, and a relay of opaque bytes
for each session.

``Host.query`` offers a console: the guest's side is opened at once, and whoever brings the secret
within ``OFFER_SECONDS`` gets it, once. ``service`` starts the listener. Without a secret nothing is
read but its length, and nothing is answered. Must stay true: sockets block, so that who reads
slowly slows the writer and nothing piles up here; a session ends when either side does; a serial
port has one reader, so that the newest session takes it over.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from common.security.unproved import Unproved
from compute_agent.consoles import relay
from compute_agent.consoles.direct_consoles import DirectConsoles
from compute_agent.consoles.relay import Side
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SERIAL, SPICE, VNC

log = logging.getLogger(__name__)
KINDS = (VNC, SERIAL, SPICE)
DIRECT = "spice-direct"  #: asked for like a kind; ``direct`` has them
OFFER_SECONDS = 30.0  #: that an offer stands
MAX_SESSIONS = 128  #: offered and open, in all
MAX_UNPROVED = 32  #: connections that have not yet said their secret
SECRET_TIMEOUT_SECONDS = 5.0  #: for saying it
SECRET_BYTES = 43  #: of a secret


@dataclass(slots=True, eq=False)
class Session:
    """A console that was offered (``peer`` None) until the deadline, or is open."""

    server: str
    kind: str
    secret: str
    guest: socket.socket
    deadline: float
    peer: Side | None = None

    def end(self) -> None:
        """Both sides see the end; the sockets are closed by the threads that read them, or here
        when none does."""
        for side in (self.guest, self.peer):
            if side is not None:
                relay.shut(side)
        if self.peer is None:
            self.guest.close()


class Consoles:
    """``open_console(server, kind)`` is the driver's; ``host`` is the address to listen on; an
    offer stands for ``seconds``; ``sessions`` are offered and open in all; with ``tls`` who
    connects must prove itself; ``direct``: has those of the operator's own proxies. Thread-safe."""

    def __init__(
        self,
        open_console: Callable[[str, str], socket.socket],
        host: str,
        *,
        seconds: float = OFFER_SECONDS,
        sessions: int = MAX_SESSIONS,
        tls: Tls | None = None,
        direct: DirectConsoles | None = None,
    ) -> None:
        self._tls, self._direct = tls, direct
        self._open_console, self._seconds, self._most = open_console, seconds, sessions
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._unproved = Unproved(MAX_UNPROVED)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_UNPROVED)
        self._listener.settimeout(1.0)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._closed = threading.Event()

    def start(self) -> threading.Thread:
        """Listen, in a thread of its own."""
        thread = threading.Thread(target=self._listen, name="consoles", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End all sessions."""
        self._closed.set()
        relay.shut(self._listener)  # wakes who accepts
        self._listener.close()
        with self._lock:
            ended, self._sessions = self._sessions, []
        for session in ended:
            session.end()
        if self._direct is not None:
            self._direct.close()

    def offer(self, server: str, kind: str) -> JsonObject:
        """Where the guest's console can be reached, and the secret that opens it once: host, port,
        secret; of one for another's proxy host, port, tls_port.

        Raises:
            BadRequest: there is no such kind. Conflict: the guest does not run. Unavailable: too
            many are open.
        """
        if kind == DIRECT and self._direct is not None:
            return self._direct.offer(server)
        if kind not in KINDS:
            raise errors.BadRequest(
                f"This host knows no console {kind!r}; it has {', '.join(KINDS)}."
            )
        self._make_room(server, kind)
        try:
            guest = self._open_console(server, kind)
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem
        session = Session(
            server, kind, secrets.token_urlsafe(32), guest, time.monotonic() + self._seconds
        )
        with self._lock:
            self._sessions.append(session)
        return {"host": self._host, "port": self._port, "secret": session.secret}

    def _make_room(self, server: str, kind: str) -> None:
        """End what nobody came for, and the session that has the serial port."""
        with self._lock:
            ended = [
                session
                for session in self._sessions
                if (session.peer is None and session.deadline < time.monotonic())
                or (kind == SERIAL == session.kind and session.server == server)
            ]
            self._sessions = [session for session in self._sessions if session not in ended]
            full = len(self._sessions) >= self._most
        for session in ended:
            session.end()
        if full:
            raise errors.Unavailable(
                "Too many consoles are open on this host; close some and try again."
            )

    # --- the threads ---
    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                peer, address = self._listener.accept()
            except TimeoutError:
                self._expire()
                continue
            except OSError as error:
                if not self._closed.wait(0.1):  # out of descriptors, say: it passes
                    log.warning("no console connection could be accepted: %s", error)
                continue
            number = self._unproved.add(peer, address)
            threading.Thread(
                target=self._open_session, args=(peer, number), name="console", daemon=True
            ).start()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            ended = [
                session
                for session in self._sessions
                if session.peer is None and session.deadline < now
            ]
            self._sessions = [session for session in self._sessions if session not in ended]
        for session in ended:
            session.end()

    def _open_session(self, peer: Side, number: int) -> None:
        """The thread of a connection: the secret, then what the peer sends to the guest; a second
        thread has the other direction."""
        try:
            said = _read_secret(peer := self._secured(peer))
            session = self._claimed(peer, said)
        except (OSError, ValueError) as problem:
            log.warning("the console service is not proved: %s", problem)
            session = None
        finally:
            self._unproved.remove(number)
        if session is None:
            peer.close()
            return
        relay.join(peer, session.guest, "console-back")
        with self._lock:
            if session in self._sessions:
                self._sessions.remove(session)
        peer.close()
        session.guest.close()

    def _secured(self, peer: Side) -> Side:
        """With TLS: once the other side has shown a certificate of our authority."""
        if self._tls is None or not isinstance(peer, socket.socket):
            return peer
        peer.settimeout(SECRET_TIMEOUT_SECONDS)
        return TlsSocket.open(peer, self._tls.for_server())

    def _claimed(self, peer: Side, said: bytes) -> Session | None:
        """The session whose secret this is, taken."""
        now = time.monotonic()
        with self._lock:
            # Every secret is compared, so that time tells nothing of where in the list one stands.
            found = [
                session
                for session in self._sessions
                if hmac.compare_digest(session.secret.encode(), said)
            ]
            if (
                self._closed.is_set()
                or not found
                or found[0].peer is not None
                or found[0].deadline < now
            ):
                return None
            found[0].peer = peer
        relay.stay_alive(peer)
        return found[0]


def _read_secret(peer: Side) -> bytes:
    """What it says first; too little when it does not say enough in time."""
    said, deadline = b"", time.monotonic() + SECRET_TIMEOUT_SECONDS
    try:
        while len(said) < SECRET_BYTES and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            part = peer.recv(SECRET_BYTES - len(said))
            if not part:
                break
            said += part
        peer.settimeout(None)
    except OSError as error:
        log.debug("a console connection ended before its secret: %s", error)
    return said
