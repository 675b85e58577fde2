# SPDX-License-Identifier: Apache-2.0
"""SPICE consoles for proxies of the operator's own (spice-direct): a port of its own for each, good
for the addresses of these proxies alone.

``Consoles.offer`` asks for one. Such a proxy speaks SPICE from its first byte, a connection for
each channel, and shows no secret of ours: Nova's answer to it has no place for one. So who it is
follows from its address, and a port is short-lived. Must stay true: a port is of one guest; it is
closed once nobody has used it for ``OFFER_SECONDS``, or its guest cannot be reached; who comes from
elsewhere is told nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable

from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from compute_agent.consoles import relay
from compute_agent.consoles.relay import Side
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SPICE

log = logging.getLogger(__name__)
OFFER_SECONDS = 30.0  #: that a port stays open while nobody is connected
MAX_PORTS = 32  #: of a host
MAX_CONNECTIONS = 16  #: of a port, at a time
HANDSHAKE_SECONDS = 5.0
OpenConsole = Callable[[str, str], socket.socket]


class DirectConsoles:
    """``open_console(server, kind)`` is the driver's; ``host`` is the address to listen on;
    ``proxies`` are the addresses that may connect; with ``tls`` ports are proved and encrypted.
    Thread-safe."""

    def __init__(
        self,
        open_console: OpenConsole,
        host: str,
        proxies: Iterable[str],
        *,
        seconds: float = OFFER_SECONDS,
        tls: Tls | None = None,
    ) -> None:
        self._open_console, self._host, self._seconds, self._tls = open_console, host, seconds, tls
        self._proxies = frozenset(map(_address, proxies))
        self._lock = threading.Lock()
        self._ports: list[_Port] = []

    def offer(self, server: str) -> JsonObject:
        """Where the guest's SPICE is reached: host, port, tls_port. With TLS both ports are the
        one, which speaks nothing else.

        Raises:
            BadRequest: no proxy is known. Conflict: the guest does not run, or has no SPICE.
            Unavailable: too many ports are open.
        """
        if not self._proxies:
            raise errors.BadRequest(
                "This host has no spice-direct consoles: set [spice] direct_proxies there to the addresses "
                "of the proxy."
            )
        try:
            self._open_console(server, SPICE).close()
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem
        with self._lock:
            self._ports = [port for port in self._ports if not port.is_closed]
            if len(self._ports) >= MAX_PORTS:
                raise errors.Unavailable("Too many direct consoles are open on this host.")
            made = _Port(
                lambda: self._open_console(server, SPICE),
                self._host,
                self._proxies,
                self._seconds,
                self._tls,
            )
            self._ports.append(made)
        made.start()
        return {
            "host": self._host,
            "port": made.number,
            "tls_port": None if self._tls is None else made.number,
        }

    def close(self) -> None:
        """Close all ports, and end what goes over them."""
        with self._lock:
            ended, self._ports = self._ports, []
        for port in ended:
            port.close()


class _Port:
    """One that listens until it is closed."""

    def __init__(
        self,
        open_guest: Callable[[], socket.socket],
        host: str,
        proxies: frozenset[str],
        seconds: float,
        tls: Tls | None,
    ) -> None:
        self._open_guest, self._proxies, self._seconds, self._tls = (
            open_guest,
            proxies,
            seconds,
            tls,
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(min(1.0, seconds))
        self.number = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._peers: list[Side] = []
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def start(self) -> None:
        threading.Thread(target=self._listen, name="direct-console", daemon=True).start()

    def close(self) -> None:
        """End it, and the connections over it."""
        self._closed.set()
        relay.shut(self._listener)  # wakes who accepts
        self._listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            relay.shut(peer)

    def _listen(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._closed.is_set() and time.monotonic() < deadline:
            try:
                peer, (address, *_) = self._listener.accept()
            except TimeoutError:
                if self._peers:
                    deadline = time.monotonic() + self._seconds
                continue
            except OSError as error:
                if not self._closed.wait(0.1):  # out of descriptors, say: it passes
                    log.warning("no direct console connection could be accepted: %s", error)
                continue
            with self._lock:
                is_let_in = (
                    _address(address) in self._proxies and len(self._peers) < MAX_CONNECTIONS
                )
                if is_let_in:
                    self._peers.append(peer)
            if not is_let_in:
                log.warning("a direct console was refused to %s", address)
                peer.close()
                continue
            threading.Thread(
                target=self._carry, args=(peer,), name="direct-channel", daemon=True
            ).start()
        self.close()

    def _carry(self, plain: socket.socket) -> None:
        """The thread of a connection: a channel of the guest's, until one side ends."""
        peer: Side = plain
        try:
            if self._tls is not None:
                plain.settimeout(HANDSHAKE_SECONDS)
                peer = TlsSocket.open(plain, self._tls.for_server(proved=False))
                peer.settimeout(None)
            with self._open_guest() as guest:
                relay.stay_alive(peer)
                relay.join(peer, guest, "direct-channel-back")
        except VerbFailed as problem:
            log.info("a direct console ends: %s", problem)
            self.close()
        except (OSError, ValueError) as problem:
            log.warning("a direct console's connection failed: %s", problem)
        finally:
            peer.close()
            with self._lock:
                self._peers.remove(plain)


def _address(text: str) -> str:
    """The same text for the same address; one of IPv4 as such."""
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
