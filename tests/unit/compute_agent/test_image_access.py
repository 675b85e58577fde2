# SPDX-License-Identifier: Apache-2.0
"""The agent's client of the image gateway, before a gateway that answers with fixed statuses."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from common.domain import errors
from common.domain.models import Access
from compute_agent.image_access import ImageGatewayAccess

IMAGE = "8a9a5b1c-0d6f-4f5e-9a53-0d2f6c1a7e11"


class Gateway(http.server.BaseHTTPRequestHandler):
    """The ticket expires between the upload, which conflicts, and the look at the image."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_answer(409)

    def do_GET(self) -> None:
        self.send_answer(401)

    def send_answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Keep the test's output empty."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_image_upload_raises_unavailable_if_ticket_expires_after_conflict(url: str) -> None:
    with pytest.raises(errors.Unavailable, match="ticket"):
        ImageGatewayAccess().upload(Access(url, "ticket"), IMAGE, iter([b""]))
