# SPDX-License-Identifier: Apache-2.0
"""The network and metadata services over HTTP, as the host part of the network sees them.

``descriptions`` has the wanted state of each host. ``acknowledged`` and ``metadata_requests`` have
the received messages.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """The external services of the host parts."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.acknowledged: dict[str, dict[str, Any]] = {}
        self.metadata_requests: list[tuple[str, str, dict[str, str], bytes]] = []
        lab = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lab.get(self)

            def do_POST(self) -> None:
                lab.post(self)

            def do_PUT(self) -> None:
                lab.put(self)

            def do_DELETE(self) -> None:
                lab.delete(self)

            def log_message(self, *arguments: Any) -> None:
                """Suppress the log."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore connections that a killed host part breaks off."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if "/kilonova/hosts/" not in request.path:
            return self._metadata(request, b"")
        host = request.path.split("/")[5 - 1]
        query = dict(pair.split("=") for pair in request.path.split("?")[1].split("&"))
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.descriptions.get(host, {"revision": 0})["revision"] > int(query["seen"])
                ),
                min(float(query["wait"]), 2),
            )
            description = self.descriptions.get(host, {"revision": 0})
        if description["revision"] > int(query["seen"]):
            return self._answer(request, 200, json.dumps(description).encode())
        return self._answer(request, 304, b"")

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        return self._metadata(request, body)

    def put(self, request: BaseHTTPRequestHandler) -> None:
        acknowledgement = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.changed:
            self.acknowledged[request.path.split("/")[4]] = acknowledgement
            self.changed.notify_all()
        self._answer(request, 204, b"")

    def delete(self, request: BaseHTTPRequestHandler) -> None:
        self._answer(request, 405, b"")

    def _metadata(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.metadata_requests.append(
            (request.command, request.path, dict(request.headers.items()), body)
        )
        self._answer(
            request, 200, b"metadata of " + request.headers.get("X-Instance-ID", "nobody").encode()
        )

    def _answer(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in ({} if headers is None else headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
