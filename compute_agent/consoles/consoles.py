# SPDX-License-Identifier: Apache-2.0
"""Consoles of this host's guests for the console service.

``HostQueries`` offers a console: the connection to the guest is opened at once, and one client with
the secret may connect within ``OFFER_SECONDS``. One listener serves all consoles, and each session
relays opaque bytes. Without a valid secret the listener reads at most ``SECRET_BYTES`` and sends no
answer.

Invariant: sockets block, so that a slow reader slows down the writer and no data accumulates here.

Invariant: a session ends when either side closes. A serial port has one reader, and a newer session
replaces the older one.
"""

from __future__ import annotations

import hmac
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
from common.service.log import get_logger
from compute_agent.consoles import relay
from compute_agent.consoles.direct_consoles import DirectConsoles
from compute_agent.consoles.relay import Side
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SERIAL, SPICE, VNC

log = get_logger(__name__)
KINDS = (VNC, SERIAL, SPICE)
#: The kind of a direct console in a query. ``DirectConsoles`` serves these.
DIRECT = "spice-direct"
#: Validity of an offer.
OFFER_SECONDS = 30.0
#: Limit of offered and open sessions together.
MAX_SESSIONS = 128
#: Limit of connections that have not sent their secret yet.
MAX_UNPROVED = 32
#: Time for a client to send the secret.
SECRET_TIMEOUT_SECONDS = 5.0
#: Length of a secret.
SECRET_BYTES = 43


@dataclass(slots=True, eq=False)
class Session:
    """A console: open with the client ``peer``, or offered until ``deadline`` (``peer`` None)."""

    server: str
    kind: str
    secret: str
    guest: socket.socket
    deadline: float
    peer: Side | None = None

    def end(self) -> None:
        """Shut down the connections to guest and client.

        The threads that relay an open session then close the sockets. Of a session that was only
        offered, this method closes the connection to the guest.
        """
        for side in (self.guest, self.peer):
            if side is not None:
                relay.shut(side)
        if self.peer is None:
            self.guest.close()


class Consoles:
    """The listener for consoles, and the sessions. Thread-safe.

    Args:
        open_console: Opens a console, as ``Driver.console``.
        host: Address to listen on.
        seconds: Validity of an offer.
        sessions: Limit of offered and open sessions together.
        tls: Certificates for the listener, or None. With TLS each client must present a certificate
            of the cloud's authority.
        direct: Direct consoles for the operator's own proxies, or None.
    """

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
        """Start the thread that listens, and return the thread."""
        thread = threading.Thread(target=self._listen, name="consoles", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._closed.set()
        # Wakes the thread that accepts connections.
        relay.shut(self._listener)
        self._listener.close()
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.end()
        if self._direct is not None:
            self._direct.close()

    def offer(self, server: str, kind: str) -> JsonObject:
        """Open a guest's console, and return the address to which a client may connect.

        A present session or offer of the server's serial port ends if ``kind`` is SERIAL.

        Args:
            server: Id of the server.
            kind: An entry of ``KINDS``, or ``DIRECT``.

        Returns:
            host, port and the secret for one connection, valid for the ``seconds`` of this
            listener. For a direct console host, port and tls_port, as from
            ``DirectConsoles.offer``.

        Raises:
            BadRequest: The kind is unknown, or is ``DIRECT`` and no proxies are configured.
            Conflict: The guest does not run, or has no such console.
            Unavailable: Too many consoles are open.
        """
        if kind == DIRECT and self._direct is not None:
            return self._direct.offer(server)
        if kind not in KINDS:
            raise errors.BadRequest(
                f"This host has no consoles of the kind {kind!r}, only {', '.join(KINDS)}."
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
        """End expired offers, and if ``kind`` is SERIAL the server's serial session or offer.

        Raises:
            Unavailable: Too many consoles are open.
        """
        with self._lock:
            sessions = [
                session
                for session in self._sessions
                if (session.peer is None and session.deadline < time.monotonic())
                or (kind == SERIAL == session.kind and session.server == server)
            ]
            self._sessions = [session for session in self._sessions if session not in sessions]
            full = len(self._sessions) >= self._most
        for session in sessions:
            session.end()
        if full:
            raise errors.Unavailable(
                "Too many consoles are open on this host; close some and try again."
            )

    # --- Threads ---
    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                peer, address = self._listener.accept()
            except TimeoutError:
                self._expire()
                continue
            except OSError as error:
                # For example, the process has no free file descriptor. This may be temporary.
                if not self._closed.wait(0.1):
                    log.warning("a console connection cannot be accepted", problem=error)
                continue
            number = self._unproved.add(peer, address)
            threading.Thread(
                target=self._open_session, args=(peer, number), name="console", daemon=True
            ).start()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            sessions = [
                session
                for session in self._sessions
                if session.peer is None and session.deadline < now
            ]
            self._sessions = [session for session in self._sessions if session not in sessions]
        for session in sessions:
            session.end()

    def _open_session(self, peer: Side, number: int) -> None:
        """Read the client's secret, then relay the session of this secret until it ends.

        Runs in a thread of its own. A client without a valid secret is disconnected without an
        answer. ``number`` identifies the connection among those without a valid secret so far.
        """
        try:
            secret = _read_secret(peer := self._accept_tls(peer))
            session = self._claim_session(peer, secret)
        except (OSError, ValueError) as problem:
            log.warning("a console connection failed before its session began", problem=problem)
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

    def _accept_tls(self, peer: Side) -> Side:
        """Complete the TLS handshake, and return the TLS connection.

        The client must have a certificate of the cloud's authority. Without TLS the connection is
        returned unchanged.

        Raises:
            OSError: The handshake failed.
        """
        if self._tls is None or not isinstance(peer, socket.socket):
            return peer
        peer.settimeout(SECRET_TIMEOUT_SECONDS)
        return TlsSocket.open(peer, self._tls.for_server())

    def _claim_session(self, peer: Side, secret: bytes) -> Session | None:
        """Assign the client to the offered session with this secret, and return the session.

        None if no session has this secret, if the session is expired or already connected, or if
        the listener is closed.
        """
        now = time.monotonic()
        with self._lock:
            # Every secret is compared, so that the time reveals no position in the list.
            sessions = [
                session
                for session in self._sessions
                if hmac.compare_digest(session.secret.encode(), secret)
            ]
            if (
                self._closed.is_set()
                or not sessions
                or sessions[0].peer is not None
                or sessions[0].deadline < now
            ):
                return None
            sessions[0].peer = peer
        relay.stay_alive(peer)
        return sessions[0]


def _read_secret(peer: Side) -> bytes:
    """Return the first ``SECRET_BYTES`` bytes of a client.

    The result is shorter if the connection ends or fails, or the client does not send them within
    ``SECRET_TIMEOUT_SECONDS``.
    """
    secret, deadline = b"", time.monotonic() + SECRET_TIMEOUT_SECONDS
    try:
        while len(secret) < SECRET_BYTES and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            part = peer.recv(SECRET_BYTES - len(secret))
            if not part:
                break
            secret += part
        peer.settimeout(None)
    except OSError as error:
        log.debug("a console connection ended before its secret", problem=error)
    return secret
