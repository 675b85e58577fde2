# SPDX-License-Identifier: Apache-2.0
"""The client of the image service against a small HTTP server: facts, bytes, the cache, and what can go wrong."""
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from common import errors
from common.clients import image

ID = "70a599e0-31e7-49b7-b260-868f441e862b"
BODY = {"id": ID, "name": "cirros", "status": "active", "disk_format": "qcow2", "container_format": "bare",
        "size": 3_000_000,
        "virtual_size": 2 ** 30, "min_ram": 64, "min_disk": 1, "os_hash_algo": "sha512", "os_hash_value": "abc",
        "visibility": "public", "tags": [], "protected": False, "owner": "o", "self": "/v2/images/x",
        "hw_disk_bus": "virtio",
        "os_distro": "cirros", "nothing": None}


class Glance(ThreadingHTTPServer):
    """Answers what the test says, and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.asked, self.data, self.cut = 200, [], b"", 0

    status: int
    asked: list[tuple[str, str]]
    data: bytes
    cut: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Glance

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["X-Auth-Token"]))
        body = self.server.data if self.path.endswith("/file") else json.dumps(BODY).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:-self.server.cut or None])

    def log_message(self, *args: Any) -> None:
        """Not to the terminal."""


@pytest.fixture
def glance() -> Iterator[Glance]:
    server = Glance()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_facts_of_an_image(glance: Glance) -> None:
    found = image.Client(glance.url + "/v2/").show(ID, "token")
    assert glance.asked == [(f"/v2/images/{ID}", "token")]
    assert found == image.Image(image.ImageRef(
        ID, "qcow2", 3_000_000, "sha512", "abc", {"hw_disk_bus": "virtio", "os_distro": "cirros"}), "cirros",
        "active", 64, 1, 2 ** 30)


def test_it_is_remembered_for_a_while_for_one_token(glance: Glance) -> None:
    now = [0.0]
    client = image.Client(lambda: glance.url, cache_seconds=30, monotonic=lambda: now[0])
    for token in ("a", "a", "b"):
        client.show(ID, token)
    assert [token for _, token in glance.asked] == ["a", "b"]
    now[0] = 30
    client.show(ID, "a")
    assert len(glance.asked) == 3
    assert "'a'" not in repr(client), "no token is kept in plain"


@pytest.mark.parametrize(("status", "kind"), [
    (404, errors.BadRequest), (403, errors.BadRequest), (401, errors.Unauthorized), (500, errors.Unavailable),
    (503, errors.Unavailable), (300, errors.Unavailable)])
def test_answers_that_are_no_image(glance: Glance, status: int, kind: type[errors.Problem]) -> None:
    glance.status = status
    with pytest.raises(kind) as raised:
        image.Client(glance.url).show(ID, "token")
    assert type(raised.value) is kind


def test_a_service_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(errors.Unavailable, match="does not answer"):
        image.Client("http://127.0.0.1:9", timeout=2).show(ID, "token")


def test_its_bytes_come_in_pieces(glance: Glance) -> None:
    glance.data = bytes(range(256)) * 10_000
    pieces = list(image.Client(glance.url).download(ID, "token"))
    assert b"".join(pieces) == glance.data
    assert max(map(len, pieces)) <= image.CHUNK
    assert glance.asked == [(f"/v2/images/{ID}/file", "token")]


def test_bytes_that_break_off_are_noticed(glance: Glance) -> None:
    glance.data, glance.cut = b"x" * 3_000_000, 1
    with pytest.raises(errors.Unavailable, match="broke off"):
        list(image.Client(glance.url).download(ID, "token"))


def test_an_image_without_bytes(glance: Glance) -> None:
    glance.status = 204
    with pytest.raises(errors.NotFound):
        list(image.Client(glance.url).download(ID, "token"))
