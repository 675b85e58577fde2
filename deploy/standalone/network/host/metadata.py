# SPDX-License-Identifier: Apache-2.0
"""169.254.169.254 for guests: a listener in each network's namespace that passes requests on, signed.

Which guest asks is decided by where its packet came from: the network is the socket's, the address was checked by the
rules before it got here. The metadata service believes X-Instance-ID because of its signature; whatever the guest
sends under such names never gets through. Everything of the guest's is bounded: its line and headers (http.server),
its body, its time, and how many of one network's requests are served at once.
"""
from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from deploy.standalone.network.host.description import Port
from deploy.standalone.network.host.dnsmasq import METADATA
from deploy.standalone.network.host.kernel import SPACES, Kernel

LOG = logging.getLogger("network.metadata")
PORT, WORKERS, EACH, PATIENCE, LONGEST = 80, 32, 6, 10.0, 30.0
BODY_LIMIT, ANSWER_LIMIT = 64 * 1024, 4 * 1024 * 1024
#: Of a guest's headers only these go on.
PASSED = ("Accept", "Content-Type", "User-Agent", "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds")


@dataclass(frozen=True, slots=True)
class Upstream:
    """The metadata service, and the secret it shares with us."""

    url: str
    secret: bytes

    def headers(self, port: Port, address: str) -> dict[str, str]:
        """Who asks, and the proof that we say so."""
        signature = hmac.new(self.secret, port.server.encode(), hashlib.sha256).hexdigest()
        return {"X-Instance-ID": port.server, "X-Tenant-ID": port.project, "X-Forwarded-For": address,
                "X-Instance-ID-Signature": signature}


class Listeners:
    """One thread accepts on all sockets, a few answer. Thread-safe."""

    def __init__(self, kernel: Kernel, upstream: Upstream) -> None:
        self._kernel, self.upstream = kernel, upstream
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._sockets: dict[str, tuple[int, str, socket.socket]] = {}
        self._ports: dict[tuple[str, str], Port] = {}
        self._busy: Counter[str] = Counter()
        self._since: dict[socket.socket, float] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "metadata")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="metadata", daemon=True)
        self._thread.start()

    def know(self, ports: Mapping[str, Port]) -> None:
        """Whose addresses these are, from now on."""
        self._ports = {(port.network, str(address)): port for port in ports.values() if port.server
                       for address in port.addresses}

    def listen(self, spaces: Mapping[str, str]) -> dict[str, str]:
        """Listen in exactly these namespaces (-> network); what failed, with the reason."""
        wrong: dict[str, str] = {}
        for space in set(self._sockets) - set(spaces):
            self._close(space)
        for space, network in spaces.items():
            try:
                inode = (SPACES / space).stat().st_ino
                if space in self._sockets and self._sockets[space][0] != inode:
                    self._close(space)
                if space not in self._sockets:
                    made = self._kernel.listen(space, METADATA, PORT)
                    made.setblocking(False)
                    with self._lock:
                        self._sockets[space] = (inode, network, made)
                        self._selector.register(made, selectors.EVENT_READ, network)
            except OSError as problem:
                wrong[space] = f"no metadata listener: {problem}"
        return wrong

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        self._thread.join()
        for space in list(self._sockets):
            self._close(space)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def asker(self, network: str, address: str) -> Port | None:
        """The port with this address in this network."""
        return self._ports.get((network, address))

    def _close(self, space: str) -> None:
        with self._lock:
            _, _, made = self._sockets.pop(space)
            self._selector.unregister(made)
            made.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            self._hurry()
            for key, _ in self._selector.select(0.2):
                try:
                    with self._lock:
                        taken, (address, _) = key.fileobj.accept()      # type: ignore[union-attr]
                except (BlockingIOError, OSError):
                    continue       # the guest has gone, or the listener
                self._begin(taken, key.data, address)

    def _begin(self, taken: socket.socket, network: str, address: str) -> None:
        with self._lock:
            full = self._busy[network] >= EACH
            self._busy[network] += not full
        if full:
            taken.close()
        else:
            self._pool.submit(self._answer, taken, network, address)

    def _hurry(self) -> None:
        """Who sends a letter now and then is cut off."""
        with self._lock:
            late = [taken for taken, since in self._since.items() if time.monotonic() > since + LONGEST]
            for taken in late:
                with contextlib.suppress(OSError):       # it may have ended by itself
                    taken.shutdown(socket.SHUT_RDWR)

    def _answer(self, taken: socket.socket, network: str, address: str) -> None:
        with self._lock:
            self._since[taken] = time.monotonic()
        try:
            with taken:
                Request(taken, self, network, address)
        except OSError as problem:
            LOG.info("%s in %s broke off: %s", address, network, problem)
        finally:
            with self._lock:
                self._busy[network] -= 1
                del self._since[taken]


class Request(BaseHTTPRequestHandler):
    """One request of a guest."""

    timeout = PATIENCE
    server_version, sys_version = "metadata", ""

    def __init__(self, taken: socket.socket, listeners: Listeners, network: str, address: str) -> None:
        self._listeners, self._network, self._address = listeners, network, address
        super().__init__(taken, (address, 0), listeners)      # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Pass it on."""
        self._pass_on(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Pass it on with its body."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            self.send_error(411)
        elif int(length[:9]) > BODY_LIMIT or len(length) > 9:
            self.send_error(413)
        else:
            self._pass_on(self.rfile.read(int(length)))

    do_PUT = do_POST

    def _pass_on(self, body: bytes) -> None:
        port = self._listeners.asker(self._network, self._address)
        if port is None:
            self.send_error(404, explain="No server has this address here.")
            return
        upstream = self._listeners.upstream
        where = urlsplit(upstream.url)
        headers = {name: self.headers[name] for name in PASSED if name in self.headers}
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=PATIENCE)
        try:
            connection.request(self.command, self._target(), body or None,
                               headers | upstream.headers(port, self._address))
            answer = connection.getresponse()
            said = answer.read(ANSWER_LIMIT + 1)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            LOG.warning("the metadata service at %s does not answer: %s", upstream.url, problem)
            self.send_error(503, explain="The metadata service does not answer; try again.")
            return
        finally:
            connection.close()
        if len(said) > ANSWER_LIMIT:
            self.send_error(502)
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type") or "text/plain")
        self.send_header("Content-Length", str(len(said)) if self.command != "HEAD"
                         else answer.getheader("Content-Length") or "0")
        self.end_headers()
        self.wfile.write(said)

    def _target(self) -> str:
        """The path and query alone: a guest may write a whole URL into its request."""
        parts = urlsplit(self.path)
        path = parts.path if parts.path.startswith("/") else f"/{parts.path}"
        return f"{path}?{parts.query}" if parts.query else path

    def log_message(self, format: str, *args: Any) -> None:      # noqa: A002 - http.server's name
        """Guests decide how much they ask; they shall not fill the log."""
