# SPDX-License-Identifier: Apache-2.0
"""A volume service without volumes, for suites that want one in the catalog before they run
anything.

It shows its version and empty lists; for all else there is 404. Nothing of the cloud asks it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LISTS = ("volumes", "snapshots", "backups")
NONE = {"itemNotFound": {"code": 404, "message": "There are no volumes."}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, form: str, *values: Any) -> None:
        """Nothing on the terminal."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(http.client.NOT_FOUND, NONE)

    def do_GET(self) -> None:
        own = f"http://{self.headers['Host']}/v3/"
        version = {
            "id": "v3.0",
            "status": "CURRENT",
            "version": "3.71",
            "min_version": "3.0",
            "links": [{"rel": "self", "href": own}],
        }
        parts = [part for part in self.path.partition("?")[0].split("/") if part]
        listed = next(
            (name for name in LISTS if parts[-1:] == [name] or parts[-2:] == [name, "detail"]), None
        )
        if parts in ([], ["v3"]):
            self._answer(http.client.OK, {"versions": [version]})
        elif listed:
            self._answer(http.client.OK, {listed: []})
        else:
            self._answer(http.client.NOT_FOUND, NONE)

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def listed(identity: Any) -> Iterator[None]:
    """It listens and stands in the catalog. ``identity``: the admin's client of the identity
    service."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, name="volumes", daemon=True).start()
    service = identity.create_service(name="volumes", type="block-storage")
    try:
        identity.create_endpoint(
            service_id=service.id,
            interface="public",
            region_id="RegionOne",
            url=f"http://127.0.0.1:{server.server_port}/v3",
        )
        yield
    finally:
        identity.delete_service(service)
        server.shutdown()
        server.server_close()
