# SPDX-License-Identifier: Apache-2.0
"""The image gateway between a host and a fake image service that breaks off, refuses or is silent.

Invariant: a host never gets a truncated image, and the image service never takes a truncated upload
for a complete one.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from falcon import testing

from common.clients.own_images import OwnImages
from common.domain import errors
from common.security.image_tickets import Tickets
from common.security.vault import Vault
from compute_agent.image_access import ImageGatewayAccess
from compute_api.image_gateway import app
from compute_api.image_gateway.service import STALL_SECONDS
from tests.contract.image_gateway_rig import Process, Service, running, send_request
from tests.standalone import Cloud
from tests.waiting import await_true

IMAGE = str(uuid.uuid4())
MEBIBYTE = 1 << 20
#: The service closes each connection and announces that, because it would lose another request.
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n"
#: Answers that end too early.
SHORT = {
    "length": HEAD + b"Content-Length: 100\r\n\r\n" + b"x" * 99,
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    "in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n100\r\nabcde",
}


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture(scope="module")
def gateway(
    cloud: Cloud, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """Yield a gateway that already has a token.

    On a busy machine, the first token takes longer than the timeout of a request.
    """
    with running(tmp_path_factory.mktemp("gateway"), cloud, image=service.url) as process:
        service.respond_with(HEAD + b"Content-Length: 1\r\n\r\nx")
        url, token = f"{process.url}/v2/images/{IMAGE}/file", process.read_access(IMAGE).token
        await_true(lambda: send_request("GET", url, token).status_code == 200, 60, "it has a token")
        yield process


def download(gateway: Process) -> bytes:
    return b"".join(ImageGatewayAccess().download(gateway.read_access(IMAGE), IMAGE))


@pytest.mark.parametrize("how", SHORT)
def test_image_gateway_interrupted_download_raises_unavailable(
    gateway: Process, service: Service, how: str
) -> None:
    service.respond_with(SHORT[how])
    with pytest.raises(errors.Unavailable, match="broke off|answered 500"):
        download(gateway)
    service.respond_with(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n")
    assert download(gateway) == b"abcde"


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (403, b"By a rule", errors.Forbidden),
        (404, b"No image", errors.NotFound),
        (401, b"No token", errors.Unavailable),
        (413, b"Full", errors.TooLarge),
        (500, b"Oops", errors.Unavailable),
        (503, b"Not now", errors.Unavailable),
    ],
)
def test_image_gateway_passes_on_refusals_but_turns_401_and_500_into_503(
    gateway: Process, service: Service, status: int, words: bytes, kind: type[errors.Problem]
) -> None:
    service.respond_with(
        b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(words), words)
    )
    answer = send_request(
        "GET", f"{gateway.url}/v2/images/{IMAGE}/file", gateway.read_access(IMAGE).token
    )
    assert answer.status_code == (status if status not in (401, 500) else 503)
    with pytest.raises(kind) as refusal:
        download(gateway)
    if status == 403:
        assert refusal.value.text.startswith(
            "The image service does not let this user read the image; check the user's roles. The service's message: "
            "By a rule Kilonova's own user, kilonova of project service (admin, manager, member, reader, service), "
            "needs the role admin"
        )
    service.respond_with(HEAD + b"Content-Length: 1\r\n\r\nx")
    assert download(gateway) == b"x"


class Own:
    """Kilonova's identity at an image service."""

    def __init__(self, url: str) -> None:
        self.image_url = url

    def with_token(self, call: Any, who: str) -> Any:
        return call("own token")


def test_image_gateway_returns_503_when_image_service_is_silent(service: Service) -> None:
    service.does = lambda client, head: client.recv(1)
    tickets = Tickets(Vault("key"))
    own = OwnImages(Own(service.url), timeout=0.2)  # type: ignore[arg-type]  # the same interface
    answer = testing.TestClient(app.create(own, tickets)).simulate_get(
        f"/v2/images/{IMAGE}/file", headers={"X-Auth-Token": tickets.make("h1", [IMAGE])}
    )
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "does not answer" in answer.text


def test_image_gateway_sends_own_token_and_no_ticket_to_image_service(
    gateway: Process, service: Service
) -> None:
    service.respond_with(HEAD + b"Content-Length: 1\r\n\r\nx")
    ticket = gateway.read_access(IMAGE).token
    assert download(gateway) == b"x"
    assert (
        ticket not in "".join(service.request_heads)
        and "X-Auth-Token: " in service.request_heads[-1]
    )


def test_image_gateway_never_completes_interrupted_upload(
    gateway: Process, service: Service
) -> None:
    """The host dies in the middle of an upload with a declared length or in chunks."""
    received: list[bytes] = []

    def take(client: socket.socket, head: str) -> None:
        try:
            while piece := client.recv(65536):
                received.append(piece)
        finally:
            received.append(b"END")

    service.does = take
    token = gateway.write_access(IMAGE).token
    address = gateway.url.removeprefix("http://").split(":")
    for length, body in (
        (b"Content-Length: 5000000\r\n", b"x" * 1_500_000),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n" % (1_500_000, b"x" * 1_500_000)),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b" % (5_000_000, b"x" * 1_500_000)),
    ):
        received.clear()
        with socket.create_connection((address[0], int(address[1])), 30) as host:
            host.sendall(
                f"PUT /v2/images/{IMAGE}/file HTTP/1.1\r\nHost: x\r\nX-Auth-Token: {token}\r\n".encode()
                + length
                + b"\r\n"
                + body
            )
            host.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: host.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
        await_true(lambda: received[-1:] == [b"END"], 10, "the image service hears of the end")
        sent = b"".join(received)
        assert sent.count(b"x") >= MEBIBYTE and not sent.endswith(b"0\r\n\r\nEND")


def test_image_gateway_streams_large_image_with_little_memory(
    gateway: Process, service: Service
) -> None:
    size, piece = 200 * MEBIBYTE, b"x" * MEBIBYTE
    before = gateway.peak_memory()

    def serve(client: socket.socket, head: str) -> None:
        if head.startswith("GET") and head.split()[1].endswith("/file"):
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
            for _ in range(size // MEBIBYTE):
                client.sendall(piece)
            return
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = tail[-5:] + client.recv(MEBIBYTE)
        client.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")

    service.does = serve
    assert sum(map(len, ImageGatewayAccess().download(gateway.read_access(IMAGE), IMAGE))) == size
    answer = send_request(
        "PUT",
        f"{gateway.url}/v2/images/{IMAGE}/file",
        gateway.write_access(IMAGE).token,
        data=iter([piece] * (size // MEBIBYTE)),
    )
    assert answer.status_code == 204
    assert gateway.peak_memory() - before < 50, "MiB more than before"


def test_image_gateway_record_contains_only_status_and_size(
    gateway: Process, service: Service
) -> None:
    secret: dict[str, Any] = {
        "id": IMAGE,
        "status": "active",
        "size": 1,
        "direct_url": "rbd://keys",
        "owner": "p",
        "locations": [{"url": "swift+https://user:password@store"}],
    }
    body = json.dumps(secret).encode()
    service.respond_with(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    answer = send_request(
        "GET", f"{gateway.url}/v2/images/{IMAGE}", gateway.write_access(IMAGE).token
    )
    assert answer.json() == {"id": IMAGE, "status": "active", "size": 1}


SLOW_HOSTS = 70  # more than the threads of a gateway


def serve_image(client: socket.socket, head: str) -> None:
    """Serve an image of 3 MiB, and accept uploads."""
    if head.startswith("GET"):
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (3 * MEBIBYTE) + bytes(3 * MEBIBYTE))
        return
    tail = b""
    while piece := client.recv(65536):
        tail = tail[-5:] + piece
        if tail.endswith(b"0\r\n\r\n"):
            client.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            return


@pytest.mark.parametrize(
    "kind", ["half a head", "a body without a ticket", "an upload", "an answer that is not read"]
)
def test_image_gateway_slow_hosts_do_not_delay_other_host(
    gateway: Process, service: Service, kind: str
) -> None:
    """The slow hosts share one address, and the other host has another."""
    service.does = serve_image
    line = "{} " + f"/v2/images/{IMAGE}/file HTTP/1.1\r\nHost: x\r\nX-Auth-Token: " + "{}\r\n"
    length = b"Content-Length: 5000000\r\n\r\n"
    request = {
        "half a head": b"GET / HTTP/1.1\r\nHost: x\r\n",
        "a body without a ticket": line.format("PUT", "none").encode() + length + b"x",
        "an upload": line.format("PUT", gateway.write_access(IMAGE).token).encode()
        + length
        + bytes(300_000),
        "an answer that is not read": line.format("GET", gateway.read_access(IMAGE).token).encode()
        + b"\r\n",
    }[kind]
    host, port = gateway.url.removeprefix("http://").split(":")
    other = str(uuid.uuid4())
    with ExitStack() as slow:
        for _ in range(SLOW_HOSTS):
            slow.enter_context(
                socket.create_connection((host, int(port)), 30, ("127.0.0.9", 0))
            ).sendall(request)
        began = time.monotonic()
        read = send_request(
            "GET", f"{gateway.url}/v2/images/{other}/file", gateway.read_access(other).token
        )
        stored = send_request(
            "PUT",
            f"{gateway.url}/v2/images/{other}/file",
            gateway.write_access(other).token,
            data=bytes(2 * MEBIBYTE),
        )
        took = time.monotonic() - began
    # A gateway that serves the slow hosts first would delay the other host until they are cut off.
    assert (len(read.content), stored.status_code, took < STALL_SECONDS / 3) == (
        3 * MEBIBYTE,
        204,
        True,
    ), took
