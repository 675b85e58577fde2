# SPDX-License-Identifier: Apache-2.0
"""169.254.169.254 for guests: a listener in each network's namespace that passes requests on, signed.

Which guest asks is decided by where its packet came from: the network is the socket's, the address was checked by the
rules before it got here. The metadata service believes X-Instance-ID because of its signature; whatever the guest
sends under such names never gets through. Everything of a guest's is bounded: its line, headers and body, its time,
and how many connections it has; so no guest waits for another's.
"""
from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import selectors
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from gunicorn.config import Config
from gunicorn.http.errors import ParseException
from gunicorn.workers.gthread import PollableMethodQueue

from compute_api.edge.clients import Client, Clients
from compute_api.edge.limits import Limits
from deploy.standalone.network.host.description import Port
from deploy.standalone.network.host.dnsmasq import METADATA
from deploy.standalone.network.host.kernel import SPACES, Kernel

LOG = logging.getLogger("network.metadata")
PORT, WORKERS, PATIENCE = 80, 32, 10.0
BODY_LIMIT, ANSWER_LIMIT = 64 * 1024, 4 * 1024 * 1024
#: ``each``: of one guest, which counts as one address of its network.
LIMITS = Limits(head=PATIENCE, patience=PATIENCE, each=6, connections=2000, body=BODY_LIMIT)
#: Of a guest's headers only these go on.
PASSED = ("Accept", "Content-Type", "User-Agent", "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds")
READING, WRITING = ("GET", "HEAD"), ("POST", "PUT")


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
    """One thread has all sockets, a few others ask the metadata service. Thread-safe."""

    def __init__(self, kernel: Kernel, upstream: Upstream) -> None:
        self._kernel, self._upstream = kernel, upstream
        self._sockets: dict[str, tuple[int, socket.socket]] = {}
        self._ports: dict[tuple[str, str], Port] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "metadata")
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._calls = PollableMethodQueue()
        self._calls.init()
        self._selector.register(self._calls.fileno(), selectors.EVENT_READ, self._calls.run_callbacks)
        self._clients = Clients(self._selector, Config(), LIMITS, self._calls.defer, self._begin, self._begin, said)
        self._thread = threading.Thread(target=self._run, name="metadata", daemon=True)
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
                    self._sockets[space] = (inode, made)
                    self._calls.defer(self._selector.register, made, selectors.EVENT_READ,
                                      partial(self._clients.accept, tag=network))
            except OSError as problem:
                wrong[space] = f"no metadata listener: {problem}"
        return wrong

    def close(self) -> None:
        """Stop answering."""
        for space in list(self._sockets):
            self._close(space)
        self._calls.defer(self._stop.set)
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _close(self, space: str) -> None:
        _, made = self._sockets.pop(space)
        self._calls.defer(self._forget, made)

    def _forget(self, made: socket.socket) -> None:
        self._selector.unregister(made)
        made.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(1.0):
                try:
                    key.data(key.fileobj)
                except Exception:
                    LOG.exception("a metadata listener failed unexpectedly")
            self._clients.look()

    def _begin(self, client: Client) -> None:
        self._pool.submit(self._answer, client)

    def _answer(self, client: Client) -> None:
        try:
            client.out.sendall(self._said_to(client))
            client.out.flush()
        except OSError as problem:
            LOG.info("%s in %s broke off: %s", client.peer[0], client.tag, problem)
        except Exception:
            LOG.exception("a guest's request failed unexpectedly")
        finally:
            self._calls.defer(self._clients.finished, client, True)

    def _said_to(self, client: Client) -> bytes:
        """The whole answer to a guest's request."""
        request, address = client.incoming.request, str(client.peer[0])
        port = self._ports.get((client.tag, address))
        if port is None:
            return said(404, "No server has this address here.")
        if request.method not in READING + WRITING:
            return said(501, "Not implemented.")
        try:
            body = request.body.read() if not client.incoming.is_cut else None
        except (OSError, ParseException):
            return said(400, "The request body ended early or is badly chunked.")
        if body is None:
            return said(413, f"At most {BODY_LIMIT} bytes are accepted.")
        given = dict(reversed(request.headers))
        headers = {name: given[name.upper()] for name in PASSED if name.upper() in given}
        return self._passed_on(request.method, _target(request.uri), body,
                               headers | self._upstream.headers(port, address))

    def _passed_on(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> bytes:
        where = urlsplit(self._upstream.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=PATIENCE)
        try:
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            content = answer.read(ANSWER_LIMIT + 1)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            LOG.warning("the metadata service at %s does not answer: %s", self._upstream.url, problem)
            return said(503, "The metadata service does not answer; try again.")
        finally:
            connection.close()
        if len(content) > ANSWER_LIMIT:
            return said(502, "The metadata service said too much.")
        length = answer.getheader("Content-Length") or "0" if method == "HEAD" else str(len(content))
        return _whole(answer.status, answer.getheader("Content-Type") or "text/plain", length, content)


def said(status: int, text: str) -> bytes:
    """An answer of our own."""
    content = f"{text}\n".encode()
    return _whole(status, "text/plain; charset=utf-8", str(len(content)), content)


def _whole(status: int, kind: str, length: str, content: bytes) -> bytes:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    return (f"HTTP/1.1 {status} {phrase}\r\nServer: metadata\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {length}\r\nConnection: close\r\n\r\n").encode("latin-1") + content


def _target(uri: str) -> str:
    """The path and query alone: a guest may write a whole URL into its request."""
    parts = urlsplit(uri)
    path = parts.path if parts.path.startswith("/") else f"/{parts.path}"
    return f"{path}?{parts.query}" if parts.query else path
