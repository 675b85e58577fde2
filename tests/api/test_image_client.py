# SPDX-License-Identifier: Apache-2.0
"""The client of the image service against a small HTTP server: facts, bytes, the cache, and what
can go wrong."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from common.clients import image
from common.domain import errors
from tests.waiting import await_true

ID = "70a599e0-31e7-49b7-b260-868f441e862b"
BODY = {
    "id": ID,
    "name": "cirros",
    "status": "active",
    "disk_format": "qcow2",
    "container_format": "bare",
    "size": 3_000_000,
    "virtual_size": 2**30,
    "min_ram": 64,
    "min_disk": 1,
    "os_hash_algo": "sha512",
    "os_hash_value": "abc",
    "visibility": "public",
    "tags": [],
    "protected": False,
    "owner": "o",
    "self": "/v2/images/x",
    "hw_disk_bus": "virtio",
    "os_distro": "cirros",
    "nothing": None,
}


class Glance(ThreadingHTTPServer):
    """Answers what the test says, and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.asked, self.data, self.cut = 200, [], b"", 0
        self.there, self.words, self.got = dict(BODY), "", b""

    status: int
    asked: list[tuple[str, str]]
    data: bytes
    cut: int
    there: dict[str, Any]  # the image that a GET finds
    words: str  # the page of a refusal
    got: bytes  # the body of the last POST or PUT

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Glance

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["X-Auth-Token"]))
        if self.path.startswith("/v2/images?"):
            body = self._page()
        else:
            body = (
                self.server.data
                if self.path.endswith("/file")
                else json.dumps(self.server.there).encode()
            )
        self._answer(self.server.status if self.server.got == b"" else 200, body)

    def _page(self) -> bytes:
        if "marker=" in self.path:
            return json.dumps({"images": [{"id": "b"}]}).encode()
        return json.dumps({"images": [{"id": "a"}], "next": "/v2/images?marker=a"}).encode()

    def do_POST(self) -> None:
        self.server.asked.append((f"{self.command} {self.path}", self.headers["X-Auth-Token"]))
        self.server.got = self._body()
        self._answer(self.server.status, self.server.words.encode())

    do_PUT = do_DELETE = do_POST

    def _body(self) -> bytes:
        """Whole, or in chunks, as it was sent."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline() or b"0", 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        return found

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: -self.server.cut or None])

    def log_message(self, *args: Any) -> None:
        """Not to the terminal."""


@pytest.fixture
def glance() -> Iterator[Glance]:
    server = Glance()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_facts_of_an_image(glance: Glance) -> None:
    found = image.ImageClient(glance.url + "/v2/").show(ID, "token")
    assert glance.asked == [(f"/v2/images/{ID}", "token")]
    assert found == image.Image(
        image.ImageRef(
            ID,
            "qcow2",
            3_000_000,
            "sha512",
            "abc",
            {"hw_disk_bus": "virtio", "os_distro": "cirros"},
        ),
        "cirros",
        "active",
        64,
        1,
        2**30,
        "public",
    )


def test_requirement_of_an_image_is_asked_each_time(glance: Glance) -> None:
    asked: list[image.Image] = []
    client = image.ImageClient(glance.url, require=asked.append)
    assert [client.show(ID, "a"), client.show(ID, "a")] == asked

    def refuse(found: image.Image) -> None:
        raise errors.Forbidden("No host gets it.")

    client = image.ImageClient(glance.url, require=refuse)
    for _ in range(2):
        with pytest.raises(errors.Forbidden, match="No host gets it"):
            client.show(ID, "a")


def test_image_is_asked_for_anew_by_each_request(glance: Glance) -> None:
    client = image.ImageClient(glance.url)
    for _ in range(2):
        client.show(ID, "a")
    assert len(glance.asked) == 2
    assert "'a'" not in repr(client), "no token is kept in plain"


@pytest.mark.parametrize("fails", [False, True])
def test_concurrent_requests_of_one_token_share_one_question(glance: Glance, fails: bool) -> None:
    go, asked = threading.Event(), threading.Event()

    def hold(found: image.Image) -> None:
        asked.set()
        assert go.wait(30)
        if fails:
            raise errors.Forbidden("No host gets it.")

    client = image.ImageClient(glance.url, require=hold)

    def show(token: str) -> str:
        try:
            return client.show(ID, token).ref.id
        except errors.Forbidden as problem:
            return problem.text

    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(show, "a")
        assert asked.wait(30)
        others = [pool.submit(show, "a") for _ in range(7)]
        stranger = pool.submit(show, "b")
        await_true(lambda: len(glance.asked) == 2, 30, "the stranger asks for itself")
        assert not wait(others, 0.2).done
        go.set()
        answers = [one.result(30) for one in (first, *others, stranger)]
    assert answers == ["No host gets it." if fails else ID] * 9
    # The first question may have been answered before the others came, so they share a second one.
    assert sorted(token for _, token in glance.asked) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, errors.BadRequest),
        (403, errors.BadRequest),
        (401, errors.Unauthorized),
        (500, errors.Unavailable),
        (503, errors.Unavailable),
        (300, errors.Unavailable),
    ],
)
def test_answers_that_are_no_image(glance: Glance, status: int, kind: type[errors.Problem]) -> None:
    glance.status = status
    with pytest.raises(kind) as raised:
        image.ImageClient(glance.url).show(ID, "token")
    assert type(raised.value) is kind


def test_a_service_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(errors.Unavailable, match="does not answer"):
        image.ImageClient("http://127.0.0.1:9", timeout=2).show(ID, "token")


def test_its_bytes_come_in_pieces(glance: Glance) -> None:
    glance.data = bytes(range(256)) * 10_000
    pieces = list(image.ImageClient(glance.url).download(ID, "token"))
    assert b"".join(pieces) == glance.data
    assert max(map(len, pieces)) <= image.CHUNK
    assert glance.asked == [(f"/v2/images/{ID}/file", "token")]


def test_bytes_that_break_off_are_noticed(glance: Glance) -> None:
    glance.data, glance.cut = b"x" * 3_000_000, 1
    with pytest.raises(errors.Unavailable, match="broke off"):
        list(image.ImageClient(glance.url).download(ID, "token"))


def test_an_image_without_bytes(glance: Glance) -> None:
    glance.status = 204
    with pytest.raises(errors.NotFound):
        list(image.ImageClient(glance.url).download(ID, "token"))


# --- what the conductor and the agents change ---
RECORD = {"id": ID, "name": "snap", "disk_format": "qcow2", "min_disk": 1, "instance_uuid": "i"}


def test_a_record_is_made(glance: Glance) -> None:
    glance.status = 201
    image.ImageClient(glance.url).create(RECORD, "token")
    assert glance.asked == [("POST /v2/images", "token")]
    assert json.loads(glance.got) == RECORD


def test_the_same_record_again_is_fine_and_another_s_is_not(glance: Glance) -> None:
    client, glance.status = image.ImageClient(glance.url), 409
    glance.there = {**RECORD, "min_disk": 1, "status": "queued"}
    client.create(RECORD, "token")
    glance.there["instance_uuid"] = "other"
    with pytest.raises(errors.Conflict):
        client.create(RECORD, "token")


REFUSALS = [
    (400, errors.BadRequest),
    (403, errors.Forbidden),
    (413, errors.TooLarge),
    (401, errors.Unauthorized),
    (500, errors.Unavailable),
    (503, errors.Unavailable),
]


@pytest.mark.parametrize(("status", "kind"), REFUSALS)
def test_a_refusal_is_told_with_the_service_s_words(
    glance: Glance, status: int, kind: type[errors.Problem]
) -> None:
    glance.status, glance.words = status, "<html><h1>No</h1>\n quota  is used up</html>"
    client = image.ImageClient(glance.url)
    for change in (
        lambda: client.create(RECORD, "token"),
        lambda: client.upload(ID, "token", [b"x"]),
        lambda: client.delete(ID, "token"),
    ):
        with pytest.raises(kind) as raised:
            change()
        assert type(raised.value) is kind
        assert status >= 500 or status == 401 or raised.value.text.endswith(": No quota is used up")


@pytest.mark.parametrize("status", [204, 404, 410])
def test_an_image_is_removed_or_gone_already(glance: Glance, status: int) -> None:
    glance.status = status
    image.ImageClient(glance.url).delete(ID, "token")
    assert glance.asked == [(f"DELETE /v2/images/{ID}", "token")]


def test_images_are_found_over_all_pages_newest_first(glance: Glance) -> None:
    found = image.ImageClient(glance.url).find({"owner": "p", "image_type": "backup"}, "token")
    assert [record["id"] for record in found] == ["a", "b"]
    assert [path for path, _ in glance.asked] == [
        "/v2/images?owner=p&image_type=backup&sort_key=created_at&sort_dir=desc",
        "/v2/images?marker=a",
    ]
    glance.status = 503
    with pytest.raises(errors.Unavailable):
        image.ImageClient(glance.url).find({}, "token")


SENT = b"".join(bytes([number]) * 100_000 for number in range(20))
STORED = {
    "size": len(SENT),
    "os_hash_algo": "sha512",
    "os_hash_value": hashlib.sha512(SENT).hexdigest(),
}


def upload(glance: Glance) -> None:
    glance.status = 204
    image.ImageClient(glance.url).upload(
        ID, "token", (SENT[at : at + 100_000] for at in range(0, len(SENT), 100_000))
    )


def test_bytes_are_sent_as_they_come(glance: Glance) -> None:
    glance.there.update(STORED)
    upload(glance)
    assert glance.asked == [(f"PUT /v2/images/{ID}/file", "token"), (f"/v2/images/{ID}", "token")]
    assert glance.got == SENT


@pytest.mark.parametrize(
    "lost",
    [{"size": len(SENT) - 1}, {"status": "queued"}, {"os_hash_value": "ab" * 64}],
    ids=["size", "status", "checksum"],
)
def test_what_the_service_did_not_store_as_given_is_noticed(
    glance: Glance, lost: dict[str, Any]
) -> None:
    glance.there.update(STORED | lost)
    with pytest.raises(errors.Conflict, match=f"has image {ID} not as it was given"):
        upload(glance)


def test_checksum_of_another_kind_is_not_compared(glance: Glance) -> None:
    glance.there.update(STORED, os_hash_algo="blake2b", os_hash_value="ab" * 64)
    upload(glance)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, errors.NotFound), (410, errors.NotFound), (409, errors.Conflict)]
)
def test_an_image_that_takes_no_bytes(
    glance: Glance, status: int, kind: type[errors.Problem]
) -> None:
    glance.status = status
    with pytest.raises(kind):
        image.ImageClient(glance.url).upload(ID, "token", [b"x"])


def test_who_reads_the_bytes_may_break_off(glance: Glance) -> None:
    class Cancelled(Exception):
        """What a verb that is cancelled raises."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1000
        raise Cancelled

    with pytest.raises(Cancelled):
        image.ImageClient(glance.url).upload(ID, "token", chunks())


def test_where_an_image_is() -> None:
    assert image.ImageClient("http://images/v2/").url(ID) == f"http://images/v2/images/{ID}"
