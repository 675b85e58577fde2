# SPDX-License-Identifier: Apache-2.0
"""gunicorn's worker with threads that only build responses.

``ClientConnections`` replaces the part of gunicorn's gthread that waits for requests. gunicorn's
arbiter, parser and WSGI environment are used unchanged.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Protocol

import orjson
from gunicorn.http import wsgi
from gunicorn.workers.gthread import ThreadWorker

from common.security.tls_socket import TlsSocket
from common.service.log import get_logger
from compute_api.http.fair_share import ADMISSION, Admission, Lanes
from compute_api.http.worker.connections import ClientConnection, ClientConnections
from compute_api.http.worker.limits import ClientLimits
from compute_api.http.worker.response_buffer import FULL_BYTES

log = get_logger(__name__)
#: Size of the blocks in which files are read.
_BLOCK_BYTES = 256 * 1024


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn ships no types
    """The worker. ``server.worker`` sets the class attributes in a subclass."""

    limits = ClientLimits()
    clients: ClientConnections
    #: True for paths of requests that may wait. They have ``waiting_threads`` of their own.
    may_wait: Callable[[str], bool] = staticmethod(lambda path: False)
    waiting_threads = 1
    #: Share the threads between projects. This needs ``fair_share.limit_projects``.
    shares_threads = False
    lanes: Lanes | None = None

    @staticmethod
    def fault(status: int, text: str) -> object:
        """Return the body of an error that the worker itself sends, not the application."""
        return {"error": {"code": status, "title": HTTPStatus(status).phrase, "message": text}}

    def get_thread_pool(self) -> ThreadPoolExecutor:
        """Create the thread pool for requests that do not wait. gunicorn calls this."""
        return self._create_pool(self.cfg.threads)

    def _create_pool(self, threads: int) -> ThreadPoolExecutor:
        additional_threads = Lanes.threads_beside(threads) if self.shares_threads else 0
        return ThreadPoolExecutor(threads + additional_threads)

    def run(self) -> None:
        """Serve until gunicorn stops the worker, or the master has ended. gunicorn calls this.

        Running requests then have ``graceful_timeout`` to end.
        """
        # Clients must set neither SCRIPT_NAME nor the scheme. Proxies may (see ``forwarded``).
        self.cfg.set("forwarder_headers", "")
        self.cfg.set("secure_scheme_headers", {})
        self.clients = ClientConnections(
            self.poller,
            self.cfg,
            self.limits,
            self.method_queue.defer,
            self._begin,
            self._go_on,
            self._build_refusal,
            self._add_tls if self.cfg.is_ssl else None,
        )
        self.poller.register(
            self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks
        )
        self._waiting = self._create_pool(self.waiting_threads)
        if self.shares_threads:
            self.lanes = Lanes.create(self.cfg.threads, self.waiting_threads)
        self.set_accept_enabled(True)
        while self.alive and self.is_parent_alive():
            self._run_once(1.0)
        self.set_accept_enabled(False)
        self.clients.end()
        end = time.monotonic() + self.cfg.graceful_timeout
        while len(self.clients) and time.monotonic() < end:
            self._run_once(0.1)
        for pool in (self.tpool, self._waiting):
            pool.shutdown(wait=False)
        for listener in self.sockets:
            listener.close()

    def _add_tls(self, plain_socket: socket.socket) -> TlsSocket:
        return TlsSocket(plain_socket, self.cfg.ssl_context(self.cfg, None))

    def _run_once(self, timeout: float) -> None:
        self.notify()
        self.wait_for_and_dispatch_events(timeout=timeout)
        self.clients.close_late()
        if self.lanes is not None:
            self.lanes.refuse_late()

    def accept(self, listener: socket.socket) -> None:
        """Accept connections. gunicorn's poller calls this."""
        self.clients.accept(listener, listener.getsockname())

    # --- Responses, in threads of the pool ---
    def _begin(self, client: ClientConnection) -> None:
        request = client.incoming.request
        may_wait = self.may_wait(request.path)
        pool = self._waiting if may_wait else self.tpool
        resume = partial(pool.submit, self._serve, client, self._answer)
        client.admission = self.lanes and Admission(self.lanes.of(request.method, may_wait), resume)
        resume()

    def _go_on(self, client: ClientConnection) -> None:
        self.tpool.submit(self._serve, client, self._write)

    def _serve(self, client: ClientConnection, work: Callable[[ClientConnection], bool]) -> None:
        is_last = True
        try:
            if not work(client):
                self.method_queue.defer(self.clients.pause_answer, client)
                return
            client.out.flush()
            is_last = client.answer.response.should_close() or client.incoming.request.body.failed
        except _MustWaitError as waits:
            # After this call another thread may use the client.
            waits.admission.lane.wait(waits.admission)
            return
        except BrokenPipeError:
            log.debug("a client has gone")
        except Exception:
            log.exception("a request failed unexpectedly")
            self._fail(client)
        if client.answer is not None:
            client.answer.close()
        self.method_queue.defer(self.clients.finish_answer, client, is_last)

    def _answer(self, client: ClientConnection) -> bool:
        """Run the application, and write the response until the buffer is full.

        Returns:
            True if the whole response is written. False: ``_go_on`` writes the rest later.

        Raises:
            _MustWaitError: The project has no free place, so there is no response yet.
            BrokenPipeError: The client has disconnected.
        """
        self.nr += 1
        admission = client.admission
        response, environ = wsgi.create(
            client.incoming.request, client.out, client.peer, client.tag, self.cfg
        )
        client.answer = PendingResponse(response)
        environ["wsgi.multithread"] = True
        if client.is_last or not self.alive:
            response.force_close()
        if admission is None:
            items = self.wsgi(environ, response.start_response)
        else:
            environ[ADMISSION] = admission
            try:
                items = self.wsgi(environ, response.start_response)
            finally:
                admission.lane.leave(admission)
            if admission.must_wait:
                client.answer = None
                raise _MustWaitError(admission)
        if isinstance(items, wsgi.FileWrapper):
            items.blksize = _BLOCK_BYTES
        client.answer.take(items)
        return self._write(client)

    def _write(self, client: ClientConnection) -> bool:
        pending = client.answer
        for item in pending.items:
            pending.response.write(item)
            if client.out.held > FULL_BYTES:
                return False
        pending.response.close()
        return True

    def _fail(self, client: ClientConnection) -> None:
        """Send status 500 if no headers were sent yet. Otherwise the response breaks off."""
        with contextlib.suppress(BrokenPipeError):
            if client.answer is None or not client.answer.response.headers_sent:
                client.out.sendall(
                    self._build_refusal(500, "Unexpected error. Report the time to your operator.")
                )
            client.out.flush()

    def _build_refusal(self, status: int, text: str) -> bytes:
        return refusal(status, self.fault(status, text))


class _MustWaitError(Exception):
    """The request must wait for a free place of its project."""

    def __init__(self, admission: Admission) -> None:
        super().__init__()
        self.admission = admission


def refusal(status: int, body: object) -> bytes:
    """Return the bytes of an error response with a JSON body. The caller closes the connection."""
    content = orjson.dumps(body)
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode() + content


class WsgiResponse(Protocol):
    """The methods of gunicorn's response that this module uses."""

    headers_sent: bool

    def write(self, item: bytes, /) -> None: ...

    def close(self) -> None: ...

    def should_close(self) -> bool: ...


class PendingResponse:
    """A response while it is being built."""

    def __init__(self, response: WsgiResponse) -> None:
        self.response = response
        self.items: Iterator[bytes] = iter(())
        self._result: Iterable[bytes] = ()

    def take(self, result: Iterable[bytes]) -> None:
        """Store the result of the application. The worker writes the items later."""
        self._result, self.items = result, iter(result)

    def close(self) -> None:
        """Close the application's result, and drop the items that are not written yet."""
        self.items = iter(())
        if hasattr(self._result, "close"):
            self._result.close()
