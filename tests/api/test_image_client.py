# SPDX-License-Identifier: Apache-2.0
"""The client of the image service against a small HTTP server: records, data, and errors."""

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
    """An image service that sends the configured answers and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.queries, self.data, self.cut_bytes = 200, [], b"", 0
        self.record, self.refusal_text, self.received = dict(BODY), "", b""
        self.answers = threading.Event()
        self.answers.set()

    status: int
    queries: list[tuple[str, str]]
    data: bytes
    cut_bytes: int
    #: The image that a GET returns.
    record: dict[str, Any]
    #: The page of a refusal.
    refusal_text: str
    #: A GET waits for this event.
    answers: threading.Event
    #: The body of the last POST or PUT.
    received: bytes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Glance

    def do_GET(self) -> None:
        self.server.queries.append((self.path, self.headers["X-Auth-Token"]))
        assert self.server.answers.wait(30)
        if self.path.startswith("/v2/images?"):
            body = self._page()
        else:
            body = (
                self.server.data
                if self.path.endswith("/file")
                else json.dumps(self.server.record).encode()
            )
        self._answer(self.server.status if self.server.received == b"" else 200, body)

    def _page(self) -> bytes:
        if "marker=" in self.path:
            return json.dumps({"images": [{"id": "b"}]}).encode()
        return json.dumps({"images": [{"id": "a"}], "next": "/v2/images?marker=a"}).encode()

    def do_POST(self) -> None:
        self.server.queries.append((f"{self.command} {self.path}", self.headers["X-Auth-Token"]))
        self.server.received = self._body()
        self._answer(self.server.status, self.server.refusal_text.encode())

    do_PUT = do_DELETE = do_POST

    def _body(self) -> bytes:
        """Read the body of the request, with or without chunked encoding."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: -self.server.cut_bytes or None])

    def log_message(self, *args: Any) -> None:
        """Keep requests out of the terminal's output."""


@pytest.fixture
def glance() -> Iterator[Glance]:
    server = Glance()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_image_client_show_returns_parsed_record(glance: Glance) -> None:
    record = image.ImageClient(glance.url + "/v2/").show(ID, "token")
    assert glance.queries == [(f"/v2/images/{ID}", "token")]
    assert record == image.Image(
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


def test_image_client_show_calls_require_callback_and_passes_on_its_error(glance: Glance) -> None:
    checked: list[image.Image] = []
    client = image.ImageClient(glance.url, require=checked.append)
    assert [client.show(ID, "a"), client.show(ID, "a")] == checked

    def refuse(record: image.Image) -> None:
        raise errors.Forbidden("No host gets it.")

    client = image.ImageClient(glance.url, require=refuse)
    for _ in range(2):
        with pytest.raises(errors.Forbidden, match="No host gets it"):
            client.show(ID, "a")


def test_image_client_show_is_not_cached_and_repr_contains_no_token(glance: Glance) -> None:
    client = image.ImageClient(glance.url)
    for _ in range(2):
        client.show(ID, "a")
    assert len(glance.queries) == 2
    assert "'a'" not in repr(client), "no token is kept in plain"


@pytest.mark.parametrize("method", ["show", "look"])
@pytest.mark.parametrize("status", [200, 403])
def test_image_client_shares_request_between_concurrent_calls_with_one_token(
    glance: Glance, method: str, status: int
) -> None:
    client = image.ImageClient(glance.url)
    glance.status = status
    glance.answers.clear()

    def call(token: str) -> str:
        try:
            return getattr(client, method)(ID, token).ref.id
        except (errors.Forbidden, errors.BadRequest):
            return "refused"

    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(call, "a")
        await_true(lambda: len(glance.queries) == 1, 30, "the first request is sent")
        others = [pool.submit(call, "a") for _ in range(7)]
        stranger = pool.submit(call, "b")
        await_true(lambda: len(glance.queries) == 2, 30, "the stranger's request is sent")
        assert not wait(others, 0.2).done
        glance.answers.set()
        answers = [call.result(30) for call in (first, *others, stranger)]
    assert answers == [ID if status == 200 else "refused"] * 9
    # The other calls came after the first request was sent, so they share a second request.
    assert sorted(token for _, token in glance.queries) == ["a", "a", "b"]


def test_image_client_show_raises_error_of_require(glance: Glance) -> None:
    def refuse(record: image.Image) -> None:
        raise errors.Forbidden("No host gets it.")

    client = image.ImageClient(glance.url, require=refuse)
    with pytest.raises(errors.Forbidden, match="No host gets it"):
        client.show(ID, "a")
    assert client.look(ID, "a").ref.id == ID


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
def test_image_client_show_maps_error_status_to_exception(
    glance: Glance, status: int, kind: type[errors.Problem]
) -> None:
    glance.status = status
    with pytest.raises(kind) as raised:
        image.ImageClient(glance.url).show(ID, "token")
    assert type(raised.value) is kind


def test_image_client_show_without_a_service_raises_unavailable() -> None:
    with pytest.raises(errors.Unavailable, match="does not answer"):
        image.ImageClient("http://127.0.0.1:9", timeout=2).show(ID, "token")


def test_image_client_download_yields_chunks_of_limited_size(glance: Glance) -> None:
    glance.data = bytes(range(256)) * 10_000
    chunks = list(image.ImageClient(glance.url).download(ID, "token"))
    assert b"".join(chunks) == glance.data
    assert max(map(len, chunks)) <= image.CHUNK
    assert glance.queries == [(f"/v2/images/{ID}/file", "token")]


def test_image_client_download_raises_unavailable_when_transfer_breaks_off(glance: Glance) -> None:
    glance.data, glance.cut_bytes = b"x" * 3_000_000, 1
    with pytest.raises(errors.Unavailable, match="broke off"):
        list(image.ImageClient(glance.url).download(ID, "token"))


def test_image_client_download_without_data_raises_not_found(glance: Glance) -> None:
    glance.status = 204
    with pytest.raises(errors.NotFound):
        list(image.ImageClient(glance.url).download(ID, "token"))


# --- changes by conductors and agents ---
RECORD = {"id": ID, "name": "snap", "disk_format": "qcow2", "min_disk": 1, "instance_uuid": "i"}


def test_image_client_create_posts_record(glance: Glance) -> None:
    glance.status = 201
    image.ImageClient(glance.url).create(RECORD, "token")
    assert glance.queries == [("POST /v2/images", "token")]
    assert json.loads(glance.received) == RECORD


def test_image_client_create_raises_conflict_unless_existing_image_is_own(glance: Glance) -> None:
    client, glance.status = image.ImageClient(glance.url), 409
    glance.record = {**RECORD, "min_disk": 1, "status": "queued"}
    client.create(RECORD, "token")
    glance.record["instance_uuid"] = "other"
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
def test_image_client_changes_map_error_to_exception_with_text_of_refusal(
    glance: Glance, status: int, kind: type[errors.Problem]
) -> None:
    glance.status, glance.refusal_text = status, "<html><h1>No</h1>\n quota  is used up</html>"
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
def test_image_client_delete_succeeds_when_image_exists_or_is_already_gone(
    glance: Glance, status: int
) -> None:
    glance.status = status
    image.ImageClient(glance.url).delete(ID, "token")
    assert glance.queries == [(f"DELETE /v2/images/{ID}", "token")]


def test_image_client_find_reads_all_pages_newest_first(glance: Glance) -> None:
    records = image.ImageClient(glance.url).find({"owner": "p", "image_type": "backup"}, "token")
    assert [record["id"] for record in records] == ["a", "b"]
    assert [path for path, _ in glance.queries] == [
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


def test_image_client_upload_sends_chunks_and_checks_stored_record(glance: Glance) -> None:
    glance.record.update(STORED)
    upload(glance)
    assert glance.queries == [(f"PUT /v2/images/{ID}/file", "token"), (f"/v2/images/{ID}", "token")]
    assert glance.received == SENT


@pytest.mark.parametrize(
    "changes",
    [{"size": len(SENT) - 1}, {"status": "queued"}, {"os_hash_value": "ab" * 64}],
    ids=["size", "status", "checksum"],
)
def test_image_client_upload_raises_conflict_when_stored_record_differs(
    glance: Glance, changes: dict[str, Any]
) -> None:
    glance.record.update(STORED | changes)
    with pytest.raises(errors.Conflict, match=f"stored image {ID} with .* was sent"):
        upload(glance)


def test_image_client_upload_does_not_compare_checksum_of_other_algorithm(glance: Glance) -> None:
    glance.record.update(STORED, os_hash_algo="blake2b", os_hash_value="ab" * 64)
    upload(glance)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, errors.NotFound), (410, errors.NotFound), (409, errors.Conflict)]
)
def test_image_client_upload_maps_refusal_to_exception(
    glance: Glance, status: int, kind: type[errors.Problem]
) -> None:
    glance.status = status
    with pytest.raises(kind):
        image.ImageClient(glance.url).upload(ID, "token", [b"x"])


def test_image_client_upload_passes_on_exception_of_chunk_source(glance: Glance) -> None:
    class Cancelled(Exception):
        """The exception of a cancelled verb."""

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1000
        raise Cancelled

    with pytest.raises(Cancelled):
        image.ImageClient(glance.url).upload(ID, "token", chunks())


def test_image_client_url_is_below_v2_images() -> None:
    assert image.ImageClient("http://images/v2/").url(ID) == f"http://images/v2/images/{ID}"
