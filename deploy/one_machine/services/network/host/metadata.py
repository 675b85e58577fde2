# SPDX-License-Identifier: Apache-2.0
"""Metadata for guests at 169.254.169.254.

A listener in each network's namespace signs the requests of guests and forwards them.
The origin of the packet identifies the guest: the socket belongs to the network, and the rules have
checked the address. The metadata service accepts X-Instance-ID because of its signature. Such
headers from a guest are never forwarded. The size of a guest's request, its time, and its number of
connections are limited, so no guest waits for another.
"""

import http.client
import selectors
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import urlsplit

from gunicorn.config import Config
from gunicorn.http.errors import ParseException
from gunicorn.workers.gthread import PollableMethodQueue

from common.security.tls import Tls
from common.service.log import get_logger
from compute_api.http.worker.connections import ClientConnection, ClientConnections
from compute_api.http.worker.limits import ClientLimits
from compute_api.metadata.proxy_headers import signature
from deploy.one_machine.services.network.host.description import GuestPort
from deploy.one_machine.services.network.host.dnsmasq_config import METADATA

LOG = get_logger("network.metadata")
PORT, WORKERS, TIMEOUT_SECONDS = 80, 32, 10.0
MAX_BODY_BYTES, MAX_ANSWER_BYTES = 64 * 1024, 4 * 1024 * 1024
#: A guest counts as one address of its network.
LIMITS = ClientLimits(
    head_seconds=TIMEOUT_SECONDS,
    stall_timeout_seconds=TIMEOUT_SECONDS,
    max_connections_per_address=6,
    max_connections=2000,
    max_body_bytes=MAX_BODY_BYTES,
)
#: The headers of a guest that are forwarded. All others are dropped.
FORWARDED_HEADERS = (
    "Accept",
    "Content-Type",
    "User-Agent",
    "X-aws-ec2-metadata-token",
    "X-aws-ec2-metadata-token-ttl-seconds",
)
READ_METHODS, WRITE_METHODS = ("GET", "HEAD"), ("POST", "PUT")


@dataclass(frozen=True, slots=True)
class MetadataUpstream:
    """The metadata service, and this host's key, which signs requests of local guests."""

    url: str
    host: str
    key: str = field(repr=False)
    ca_file: str = ""

    def connection(self) -> http.client.HTTPConnection:
        """Return a new HTTP or HTTPS connection to the service, which is not connected yet.

        For https:// the service needs a certificate of the authority in ``ca_file``.

        Raises:
            OSError, ValueError: The file or the URL is invalid.
        """
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            tls = Tls("", "", self.ca_file).for_client()
            return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=tls)
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)

    def headers(self, port: GuestPort, address: str) -> dict[str, str]:
        """Return the headers that identify the guest. The host's key signs the server's id."""
        return {
            "X-Instance-ID": port.server,
            "X-Tenant-ID": port.project,
            "X-Forwarded-For": address,
            "X-Instance-Host": self.host,
            "X-Instance-ID-Signature": signature(self.key, port.server),
        }


class NamespaceSockets(Protocol):
    """The source of sockets in namespaces: the kernel, or the client of a helper."""

    def listen(self, namespace: str, address: str, port: int) -> socket.socket:
        """Return a TCP socket that listens at an IPv4 address in a namespace.

        Raises:
            OSError: The address cannot be bound, or the helper refuses.
        """

    def namespace_id(self, namespace: str) -> int:
        """Return a number that changes when a namespace is deleted and made again.

        Raises:
            OSError: There is no such namespace.
        """


class MetadataListeners:
    """The listeners of all networks. The class is thread-safe.

    One thread has all sockets, and a pool of threads calls the metadata service.
    """

    def __init__(self, sockets: NamespaceSockets, upstream: MetadataUpstream) -> None:
        self._opener, self._upstream = sockets, upstream
        self._sockets: dict[str, tuple[int, socket.socket]] = {}
        self._ports: dict[tuple[str, str], GuestPort] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "metadata")
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._calls = PollableMethodQueue()
        self._calls.init()
        self._selector.register(
            self._calls.fileno(), selectors.EVENT_READ, self._calls.run_callbacks
        )
        self._clients = ClientConnections(
            self._selector,
            Config(),
            LIMITS,
            self._calls.defer,
            self._begin,
            self._begin,
            plain_answer,
        )
        self._thread = threading.Thread(target=self._run, name="metadata", daemon=True)
        self._thread.start()

    def set_ports(self, ports: Mapping[str, GuestPort]) -> None:
        """Replace the ports, which identify guests by network and address.

        Requests from addresses of other ports, and of ports without a server, get 404.
        """
        self._ports = {
            (port.network, str(address)): port
            for port in ports.values()
            if port.server
            for address in port.addresses
        }

    def listen(self, namespaces: Mapping[str, str]) -> dict[str, str]:
        """Listen in exactly these namespaces, and close the listeners in all others.

        A namespace that was made again gets a new listener.

        Args:
            namespaces: Namespace -> network.

        Returns:
            The failures: namespace -> reason.
        """
        failed: dict[str, str] = {}
        for namespace in set(self._sockets) - set(namespaces):
            self._close(namespace)
        for namespace, network in namespaces.items():
            try:
                inode = self._opener.namespace_id(namespace)
                if namespace in self._sockets and self._sockets[namespace][0] != inode:
                    self._close(namespace)
                if namespace not in self._sockets:
                    listener = self._opener.listen(namespace, METADATA, PORT)
                    listener.setblocking(False)
                    self._sockets[namespace] = (inode, listener)
                    self._calls.defer(
                        self._selector.register,
                        listener,
                        selectors.EVENT_READ,
                        partial(self._clients.accept, tag=network),
                    )
            except OSError as error:
                failed[namespace] = f"no metadata listener: {error}"
        return failed

    def close(self) -> None:
        """Close all listeners and end the threads, without waiting for running requests."""
        for namespace in list(self._sockets):
            self._close(namespace)
        self._calls.defer(self._stop.set)
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _close(self, namespace: str) -> None:
        _, listener = self._sockets.pop(namespace)
        self._calls.defer(self._forget, listener)

    def _forget(self, listener: socket.socket) -> None:
        self._selector.unregister(listener)
        listener.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(1.0):
                try:
                    key.data(key.fileobj)
                except Exception:
                    LOG.exception("a metadata listener failed unexpectedly")
            self._clients.close_late()

    def _begin(self, client: ClientConnection) -> None:
        self._pool.submit(self._answer, client)

    def _answer(self, client: ClientConnection) -> None:
        try:
            client.out.sendall(self._answer_to(client))
            client.out.flush()
        except OSError as error:
            LOG.info(
                "a guest broke off its request",
                address=_address_of(client),
                network=client.tag,
                problem=error,
            )
        except Exception:
            LOG.exception("a guest's request failed unexpectedly")
        finally:
            self._calls.defer(self._clients.finish_answer, client, True)

    def _answer_to(self, client: ClientConnection) -> bytes:
        """Return the metadata service's response to a guest's request, or an error of this proxy.

        The errors are 404 for an unknown address, 400, 413 and 501 for an invalid request, and 502
        and 503 if the service fails.
        """
        request, address = client.incoming.request, _address_of(client)
        port = self._ports.get((str(client.tag), address))
        if port is None:
            return plain_answer(404, f"No server of this network has the address {address}.")
        if request.method not in READ_METHODS + WRITE_METHODS:
            return plain_answer(501, "Not implemented.")
        try:
            body = request.body.read() if not client.incoming.is_cut else None
        except (OSError, ParseException):
            return plain_answer(400, "The request body ended early or is badly chunked.")
        if body is None:
            return plain_answer(413, f"The request body may have at most {MAX_BODY_BYTES} bytes.")
        guest_headers = dict(reversed(request.headers))
        headers = {
            name: guest_headers[name.upper()]
            for name in FORWARDED_HEADERS
            if name.upper() in guest_headers
        }
        headers |= self._upstream.headers(port, address)
        return self._forward(request.method, _target(request.uri), body, headers)

    def _forward(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> bytes:
        connection = None
        try:
            connection = self._upstream.connection()
            connection.request(method, target, body or None, headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            LOG.warning(
                "the metadata service does not answer", url=self._upstream.url, problem=error
            )
            return plain_answer(503, "The metadata service does not answer; try again.")
        finally:
            if connection is not None:
                connection.close()
        if len(content) > MAX_ANSWER_BYTES:
            return plain_answer(502, "The metadata service's answer is too large.")
        length = (
            answer.getheader("Content-Length") or "0" if method == "HEAD" else str(len(content))
        )
        return _response(
            answer.status, answer.getheader("Content-Type") or "text/plain", length, content
        )


def plain_answer(status: int, text: str) -> bytes:
    """Return a whole HTTP response of this proxy itself, with a line of text as the body."""
    content = f"{text}\n".encode()
    return _response(status, "text/plain; charset=utf-8", str(len(content)), content)


def _response(status: int, kind: str, length: str, content: bytes) -> bytes:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    return (
        f"HTTP/1.1 {status} {phrase}\r\nServer: metadata\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode("latin-1") + content


def _address_of(client: ClientConnection) -> str:
    host, *_ = cast("tuple[str, int]", client.peer)
    return host


def _target(uri: str) -> str:
    """Return the path and query of a request's URI, because a guest may send a whole URL."""
    parts = urlsplit(uri)
    path = parts.path if parts.path.startswith("/") else f"/{parts.path}"
    return f"{path}?{parts.query}" if parts.query else path
