# SPDX-License-Identifier: Apache-2.0
"""Thousands of slow clients at the real processes do not delay other clients."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.store.engine import Store
from deploy.one_machine.cloud.probes import answers
from deploy.testing.servers import free_ports
from tests.schemas import upgrade
from tests.waiting import await_true

# Thousands of connections slow down tests that run at the same time.
pytestmark = pytest.mark.slice("guests")

IDLE, SLOW = 2000, 200
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BODY = b"POST /servers HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
CHUNKED = b"POST /servers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"
SERVICES = {
    "api": "compute_api.compute.service",
    "placement": "compute_api.placement.service",
    "metadata": "compute_api.metadata.service",
    "image_gateway": "compute_api.image_gateway.service",
}


class Process:
    """A process of one service, which needs no other service for these requests."""

    def __init__(self, name: str, folder: Path, **options: int) -> None:
        self.port = free_ports(1)
        store = Store(f"sqlite:///{folder}/kilonova.db")
        upgrade(store)
        store.close()
        lines = "".join(f"{key} = {value}\n" for key, value in options.items())
        (folder / "kilonova.conf").write_text(
            f"[DEFAULT]\nsecret_key = key\n[database]\nurl = {store.url}\n[{name}]\nport = {self.port}\n[http]\n{lines}"
            f"[identity]\nauth_url = http://127.0.0.1:{free_ports(1)}/v3\n"
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.bind(str(folder / "notify"))
            notices.settimeout(30)
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVICES[name]],
                env={
                    **os.environ,
                    "KILONOVA_CONF": str(folder / "kilonova.conf"),
                    "NOTIFY_SOCKET": str(folder / "notify"),
                },
            )
            assert b"READY=1" in notices.recv(1000)
        self.open: list[socket.socket] = []

    def connect(self, data: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        """Connect a new client that sends this data, and return its socket."""
        client = socket.create_connection(("127.0.0.1", self.port), 30, source_address=(address, 0))
        self.open.append(client)
        client.sendall(data)
        return client

    def request(self, address: str = "127.0.0.9") -> tuple[bytes, float]:
        """Send a whole request. Return the first line of the answer, and the seconds."""
        started = time.monotonic()
        with socket.create_connection(
            ("127.0.0.1", self.port), 30, source_address=(address, 0)
        ) as client:
            client.sendall(HEAD + b"Connection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        return answer.split(b"\r\n")[0], time.monotonic() - started

    def stop(self) -> int:
        for client in self.open:
            client.close()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)


@pytest.fixture
def many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = IDLE + SLOW + 500
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip(f"this machine allows a process {hard} open files, and {limit} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@pytest.fixture(params=SERVICES)
def process(request: pytest.FixtureRequest, tmp_path: Path, many_files: None) -> Iterator[Process]:
    service_process = Process(request.param, tmp_path)
    yield service_process
    assert service_process.stop() == 0


def test_slow_clients_do_not_delay_other_clients(process: Process) -> None:
    """Each of many addresses has fewer unfinished requests and idle connections than its limit."""
    expected, _ = process.request()
    for number in range(SLOW):
        process.connect((HEAD, BODY, CHUNKED, b"G")[number % 4], f"127.0.1.{number % 8 + 1}")
        process.connect(HEAD)
    for number in range(IDLE - SLOW):
        process.connect(address=f"127.0.2.{number % 8 + 1}")
    for _ in range(5):
        assert process.request()[0] == expected
        assert process.request("127.0.0.1")[0] == expected
    assert max(process.request()[1] for _ in range(10)) < 1


@pytest.fixture
def strict_process(tmp_path: Path, many_files: None) -> Iterator[Process]:
    service_process = Process(
        "placement",
        tmp_path,
        head_seconds=1,
        stall_timeout_seconds=1,
        idle_seconds=1,
        connections=100,
        connections_per_address=20,
    )
    # The answer shows that the process serves requests.
    service_process.request()
    yield service_process
    assert service_process.stop() == 0


def read_to_end(client: socket.socket, seconds: float = 8) -> bytes:
    """Return the data that a client receives until the server closes the connection."""
    client.settimeout(seconds)
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionResetError:
        return b""


def test_slow_clients_get_408_and_are_disconnected(strict_process: Process) -> None:
    slow = [strict_process.connect(data) for data in (HEAD, BODY[:-1], CHUNKED, b"G")]
    assert [read_to_end(client).split(b"\r\n")[0] for client in slow] == [
        b"HTTP/1.1 408 Request Timeout"
    ] * 4
    assert read_to_end(strict_process.connect()) == b""
    idle = strict_process.connect(HEAD + b"\r\n")
    assert read_to_end(idle).startswith(b"HTTP/1.1 200 OK")


def test_single_bytes_of_slow_clients_do_not_extend_timeout(strict_process: Process) -> None:
    started = time.monotonic()
    clients = [strict_process.connect(data) for data in (HEAD + b"X-Slow: ", BODY)]
    disconnected = []
    while clients and time.monotonic() < started + 8:
        # Slow clients send single bytes with pauses.
        time.sleep(0.3)
        for client in list(clients):
            try:
                client.sendall(b"a")
            except OSError:
                disconnected.append(client)
                clients.remove(client)
    assert len(disconnected) == 2
    assert time.monotonic() - started < 6


def test_connection_over_limit_closes_oldest_of_same_address_not_of_others(
    strict_process: Process,
) -> None:
    first = [strict_process.connect(address="127.0.3.1") for _ in range(20)]
    assert strict_process.request("127.0.3.1")[0] == b"HTTP/1.1 200 OK"
    # The server closed the oldest connection of this address.
    assert read_to_end(first[0], 0.5) == b""
    alone = strict_process.connect(address="127.0.4.1")
    for number in range(120):
        strict_process.connect(address=f"127.0.5.{number % 10 + 1}")
    assert strict_process.request("127.0.6.1")[0] == b"HTTP/1.1 200 OK"
    alone.sendall(HEAD + b"Connection: close\r\n\r\n")
    # The only connection of an address stays open.
    assert read_to_end(alone).startswith(b"HTTP/1.1 200 OK")


LARGE = 5_000_000
APPLICATION = rf"""
from compute_api.http.worker.server import Server
def application(environ, start_response):
    if environ["PATH_INFO"] == "/failing":
        raise ValueError
    if environ["PATH_INFO"] == "/snow":
        start_response("200 OK", [("Location", "/\u2603")])
        return []
    large = environ["PATH_INFO"] == "/large"
    start_response("200 OK", [("Content-Length", "{LARGE}")] if large else [])
    return [bytes({LARGE})] if large else (bytes(100_000) for _ in range({LARGE} // 100_000))
import sys
Server("test", "127.0.0.1", int(sys.argv[1]), lambda: application, lambda: None, threads=4).run()
"""


@pytest.fixture
def application_port() -> Iterator[int]:
    """Yield the port of a server with four threads and a small application."""
    port = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", APPLICATION, str(port)])
    await_true(lambda: answers(port), story="it listens")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_clients_not_reading_their_answers_do_not_delay_other_clients(
    application_port: int,
) -> None:
    slow = [socket.create_connection(("127.0.0.1", application_port), 30) for _ in range(20)]
    for number, client in enumerate(slow):
        client.sendall(
            (b"GET /pieces", b"GET /large")[number % 2] + HEAD[5:] + b"Connection: close\r\n\r\n"
        )
    for path in (b"/large", b"/pieces"):
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", application_port), 30) as client:
            client.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
            assert len(read_to_end(client)) > LARGE
        assert time.monotonic() - started < 1
    for client in slow[:2]:
        # The client gets the whole answer once it reads.
        assert len(read_to_end(client)) > LARGE
    for client in slow:
        client.close()


def test_application_error_returns_500_with_json_body(application_port: int) -> None:
    for path in (b"/failing", b"/snow"):
        with socket.create_connection(("127.0.0.1", application_port), 30) as client:
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            head, _, body = read_to_end(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        assert json.loads(body)["error"]["code"] == 500


def test_pipelined_and_split_requests_are_each_answered(strict_process: Process) -> None:
    """Requests may arrive together in one packet, or byte by byte."""
    whole = HEAD + b"\r\n"
    client = strict_process.connect(whole * 3 + HEAD + b"Connection: close\r\n\r\n")
    assert read_to_end(client).count(b"HTTP/1.1 200 OK") == 4
    letters = strict_process.connect()
    for number in range(len(HEAD)):
        letters.sendall(HEAD[number : number + 1])
    letters.sendall(b"Connection: close\r\n\r\n")
    assert read_to_end(letters).startswith(b"HTTP/1.1 200 OK")
    posted = strict_process.connect(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd"
        + HEAD
        + b"Connection: close\r\n\r\n"
    )
    assert read_to_end(posted).count(b"HTTP/1.1 ") == 2
