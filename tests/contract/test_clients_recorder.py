# SPDX-License-Identifier: Apache-2.0
"""The recording proxy of the client suites, before a local HTTP server.

The proxy passes requests and responses unchanged. It records each fault, and each response of the
compute service that differs from Nova's schemas.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from tests.clients.recorder import Recorder
from tests.nova import schemas


class Echo(BaseHTTPRequestHandler):
    """Respond with the request's body and the status from X-Status or the end of the path."""

    protocol_version = "HTTP/1.1"

    def log_message(self, form: str, *values: Any) -> None:
        """Suppress the log on the terminal."""

    def answer(self) -> None:
        path, _, last = self.path.partition("?")[0].rpartition("/")
        status = int(self.headers.get("X-Status", last))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(status)
        self.send_header("X-Path", path)
        self.send_header("X-Token", self.headers.get("X-Auth-Token", ""))
        if version := self.headers.get("OpenStack-API-Version"):
            self.send_header("OpenStack-API-Version", version)
        if status != 204:
            self.send_header("Content-Length", str(len(body) or 7))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body or b"nothing")

    do_GET = do_HEAD = do_POST = do_PUT = answer


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def recorder(service: str) -> Iterator[Recorder]:
    with Recorder(f"{service}/v2.1") as recorder:
        yield recorder


@pytest.fixture
def client(recorder: Recorder) -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        session.proxies = {"http": recorder.url}
        yield session


def test_recorder_passes_requests_and_responses_unchanged(
    service: str, client: requests.Session
) -> None:
    answer = client.post(
        f"{service}/a/b/201?limit=1", data=b"sent", headers={"X-Auth-Token": "t"}, timeout=10
    )
    assert (answer.status_code, answer.content) == (201, b"sent")
    assert (answer.headers["X-Path"], answer.headers["X-Token"]) == ("/a/b", "t")
    assert (
        client.post(f"{service}/200", data=iter([b"in ", b"chunks"]), timeout=10).content
        == b"in chunks"
    )
    assert client.get(f"{service}/204", timeout=10).content == b""
    assert client.head(f"{service}/200", timeout=10).headers["Content-Length"] == "7"


def test_recorder_strips_prefix_of_identity_service(service: str, client: requests.Session) -> None:
    assert client.get(f"{service}/identity/v3/200", timeout=10).headers["X-Path"] == "/v3"


def test_recorder_notes_each_server_fault_without_query(
    service: str, client: requests.Session, recorder: Recorder
) -> None:
    for status in (200, 404, 500, 503):
        client.get(f"{service}/servers/{status}?token=secret", timeout=10)
    assert recorder.faults == [f"GET {service}/servers/{status}: {status}" for status in (500, 503)]
    assert recorder.answers == {200: 1, 404: 1, 500: 1, 503: 1}


def test_recorder_answers_502_and_notes_fault_when_service_is_down(
    client: requests.Session, recorder: Recorder
) -> None:
    with socket.socket() as listener:  # Bound, so that no other process listens there.
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v3"
        assert client.get(url, timeout=10).status_code == 502
    assert recorder.faults == [f"GET {url}: 502"]


META, SPOILT = {"meta": {"200": "green"}}, {"meta": {"200": "green"}, "more": 1}


@pytest.fixture
def nova() -> None:
    schemas.require()


@pytest.mark.usefixtures("nova")
def test_recorder_accepts_responses_matching_nova_schemas(
    service: str, client: requests.Session, recorder: Recorder
) -> None:
    assert (
        client.get(f"{service}/v2.1/servers/s/metadata/200?x=1", json=META, timeout=10).json()
        == META
    )
    tagged = client.put(
        f"{service}/v2.1/servers/s/tags/201",
        headers={"OpenStack-API-Version": "compute 2.26"},
        timeout=10,
    )
    assert tagged.status_code == 201, "known to differ"
    assert client.get(f"{service}/v2.1/servers/s/404", timeout=10).status_code == 404
    assert client.get(f"{service}/v2.0/networks/200", json=SPOILT, timeout=10).json() == SPOILT, (
        "another service's"
    )
    assert (recorder.disagreements, recorder.judged) == ([], 2)


@pytest.mark.usefixtures("nova")
def test_recorder_reports_each_kind_of_disagreement_once(
    service: str, client: requests.Session, recorder: Recorder
) -> None:
    for server in ("s", "t"):
        client.get(f"{service}/v2.1/servers/{server}/metadata/200", json=SPOILT, timeout=10)
    action = {"headers": {"X-Status": "202", "OpenStack-API-Version": "compute 2.7"}, "timeout": 10}
    client.post(f"{service}/v2.1/servers/s/action", json={"os-getVNCConsole": {}}, **action)
    client.get(f"{service}/v2.1/nothing/200", timeout=10)
    metadata, version, path = recorder.disagreements
    assert (
        metadata.startswith("GET /servers/{server_id}/metadata/{id} at 2.1, 200: : ")
        and "more" in metadata
    )
    assert (
        version
        == "POST /servers/{id}/action os-getVNCConsole at 2.7, 202: version: Nova does not serve it"
    )
    assert path == "GET /v2.1/nothing/200 at 2.1, 200: path: Nova has no such operation"
