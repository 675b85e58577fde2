# SPDX-License-Identifier: Apache-2.0
"""SPICE consoles for the operator's own proxies (spice-direct).

Each console has a separate port, which accepts connections only from the addresses of these
proxies. ``Consoles.offer`` requests a port. The proxy speaks SPICE from the first byte, with one
connection for each channel. It sends no secret, because Nova's answer to the proxy has no field for
a secret. So the address identifies the proxy, and ports are short-lived.

Invariant: a port belongs to one guest. The port closes when unused for ``OFFER_SECONDS``, or when
the guest does not run. Connections from other addresses get no answer.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable

from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.tls import Tls
from common.security.tls_socket import TlsSocket
from common.service.log import get_logger
from compute_agent.consoles import relay
from compute_agent.consoles.relay import Side
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import SPICE

log = get_logger(__name__)
#: Time for which a port stays open without a connection.
OFFER_SECONDS = 30.0
#: Limit of ports of a host.
MAX_PORTS = 32
#: Limit of simultaneous connections of a port.
MAX_CONNECTIONS = 16
HANDSHAKE_SECONDS = 5.0
OpenConsole = Callable[[str, str], socket.socket]


class DirectConsoles:
    """The open ports of this host's direct consoles. Thread-safe.

    Args:
        open_console: Opens a console, as ``Driver.console``.
        host: Address to listen on.
        proxies: Addresses that may connect.
        seconds: Time for which a port stays open without a connection.
        tls: Certificates for the ports, or None for plain connections.
    """

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
        """Open a port for the guest's SPICE console, and return the address.

        Returns:
            host, port and tls_port. With TLS both ports are the same, and this port accepts TLS
            only. Without TLS tls_port is None.

        Raises:
            BadRequest: No proxy is configured.
            Conflict: The guest does not run, or has no SPICE console.
            Unavailable: Too many ports are open.
        """
        if not self._proxies:
            raise errors.BadRequest(
                "This host has no spice-direct consoles: set [spice] direct_proxies in its configuration to "
                "the addresses of the proxies."
            )
        try:
            self._open_console(server, SPICE).close()
        except VerbFailed as problem:
            raise errors.Conflict(str(problem)) from problem
        with self._lock:
            self._ports = [port for port in self._ports if not port.is_closed]
            if len(self._ports) >= MAX_PORTS:
                raise errors.Unavailable(
                    "Too many direct consoles are open on this host; close some and try again."
                )
            new_port = _Port(
                lambda: self._open_console(server, SPICE),
                self._host,
                self._proxies,
                self._seconds,
                self._tls,
            )
            self._ports.append(new_port)
        new_port.start()
        return {
            "host": self._host,
            "port": new_port.number,
            "tls_port": None if self._tls is None else new_port.number,
        }

    def close(self) -> None:
        """Close all ports and their connections."""
        with self._lock:
            ports, self._ports = self._ports, []
        for port in ports:
            port.close()


class _Port:
    """A port of one guest.

    The port closes after ``seconds`` without a connection, by ``close``, or if at a connection the
    guest does not run or has no SPICE console.
    """

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
        """Close the port and all connections."""
        self._closed.set()
        # Wakes the thread that accepts connections.
        relay.shut(self._listener)
        self._listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            relay.shut(peer)

    def _listen(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._closed.is_set():
            connection = self._accept()
            if self._peers:
                deadline = time.monotonic() + self._seconds
            elif time.monotonic() >= deadline:
                if connection is not None:
                    connection[0].close()
                break
            if connection is not None:
                self._admit(*connection)
        self.close()

    def _accept(self) -> tuple[socket.socket, str] | None:
        """Return the next connection and its address, or None after a timeout or an error."""
        try:
            peer, (address, *_) = self._listener.accept()
        except TimeoutError:
            return None
        except OSError as error:
            # For example, the process has no free file descriptor. This may be temporary.
            if not self._closed.wait(0.1):
                log.warning("a direct console connection cannot be accepted", problem=error)
            return None
        return peer, address

    def _admit(self, peer: socket.socket, address: str) -> None:
        """Relay the connection in a new thread.

        Close the connection if ``address`` is not a proxy's, or too many connections are open.
        """
        with self._lock:
            is_accepted = _address(address) in self._proxies and len(self._peers) < MAX_CONNECTIONS
            if is_accepted:
                self._peers.append(peer)
        if not is_accepted:
            log.warning(
                "a direct console connection is refused: its address is not in [spice] "
                "direct_proxies, or the port has too many connections",
                address=address,
                max_connections=MAX_CONNECTIONS,
            )
            peer.close()
            return
        threading.Thread(
            target=self._carry, args=(peer,), name="direct-channel", daemon=True
        ).start()

    def _carry(self, plain: socket.socket) -> None:
        """Relay one channel of the guest until one side ends. Runs in a thread.

        If the guest does not run or has no SPICE console, close the port. Other errors are logged
        and end the channel.
        """
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
            log.info("the port of a direct console is closed", problem=problem)
            self.close()
        except (OSError, ValueError) as problem:
            log.warning("a direct console's connection failed", problem=problem)
        finally:
            peer.close()
            with self._lock:
                self._peers.remove(plain)


def _address(text: str) -> str:
    """Normalize an IP address. IPv4 addresses mapped into IPv6 become IPv4 addresses."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
