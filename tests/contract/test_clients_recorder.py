# SPDX-License-Identifier: Apache-2.0
"""The proxy that counts what services answer to the clients' suites: it changes nothing, and misses no fault."""
from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from tests.clients.recorder import Recorder


class Echo(BaseHTTPRequestHandler):
    """Answers the status that its path ends with, and what it was sent."""

    protocol_version = "HTTP/1.1"

    def log_message(self, form: str, *values: Any) -> None:
        """Nothing on the terminal."""

    def answer(self) -> None:
        path, _, status = self.path.partition("?")[0].rpartition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(int(status))
        self.send_header("X-Path", path)
        self.send_header("X-Token", self.headers.get("X-Auth-Token", ""))
        if int(status) != 204:
            self.send_header("Content-Length", str(len(body) or 7))
        self.end_headers()
        if self.command != "HEAD" and int(status) != 204:
            self.wfile.write(body or b"nothing")

    do_GET = do_HEAD = do_POST = answer


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as found:
        yield found


@pytest.fixture
def client(recorder: Recorder) -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        session.proxies = {"http": recorder.url}
        yield session


def test_requests_and_answers_pass_as_they_are(service: str, client: requests.Session) -> None:
    answer = client.post(f"{service}/a/b/201?limit=1", data=b"sent", headers={"X-Auth-Token": "t"}, timeout=10)
    assert (answer.status_code, answer.content) == (201, b"sent")
    assert (answer.headers["X-Path"], answer.headers["X-Token"]) == ("/a/b", "t")
    assert client.post(f"{service}/200", data=iter([b"in ", b"chunks"]), timeout=10).content == b"in chunks"
    assert client.get(f"{service}/204", timeout=10).content == b""
    assert client.head(f"{service}/200", timeout=10).headers["Content-Length"] == "7"


def test_the_identity_service_is_below_its_prefix_too(service: str, client: requests.Session) -> None:
    assert client.get(f"{service}/identity/v3/200", timeout=10).headers["X-Path"] == "/v3"


def test_every_fault_is_noted_without_its_query(service: str, client: requests.Session, recorder: Recorder) -> None:
    for status in (200, 404, 500, 503):
        client.get(f"{service}/servers/{status}?token=secret", timeout=10)
    assert recorder.faults == [f"GET {service}/servers/{status}: {status}" for status in (500, 503)]
    assert recorder.answers == {200: 1, 404: 1, 500: 1, 503: 1}


def test_a_service_that_is_not_there_is_a_fault(client: requests.Session, recorder: Recorder) -> None:
    with socket.socket() as taken:      # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v3"
        assert client.get(url, timeout=10).status_code == 502
    assert recorder.faults == [f"GET {url}: 502"]
