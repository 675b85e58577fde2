# SPDX-License-Identifier: Apache-2.0
"""Clients that are slow on purpose, thousands of them, at the real processes: nobody else waits for
them."""

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

pytestmark = pytest.mark.slice("guests")  # thousands of connections slow down what runs beside them

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
    """One of the services, alone: all that it is asked here needs nobody else."""

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

    def connect(self, said: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        """A client of its own that says this much."""
        client = socket.create_connection(("127.0.0.1", self.port), 30, source_address=(address, 0))
        self.open.append(client)
        client.sendall(said)
        return client

    def ask(self, address: str = "127.0.0.9") -> tuple[bytes, float]:
        """The first line of the answer to a whole request, and after how many seconds."""
        begun = time.monotonic()
        with socket.create_connection(
            ("127.0.0.1", self.port), 30, source_address=(address, 0)
        ) as client:
            client.sendall(HEAD + b"Connection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        return answer.split(b"\r\n")[0], time.monotonic() - begun

    def stop(self) -> int:
        for client in self.open:
            client.close()
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)


@pytest.fixture
def many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = IDLE + SLOW + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine allows a process {hard} open files, and {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


@pytest.fixture(params=SERVICES)
def process(request: pytest.FixtureRequest, tmp_path: Path, many_files: None) -> Iterator[Process]:
    made = Process(request.param, tmp_path)
    yield made
    assert made.stop() == 0


def test_thousands_of_slow_clients_delay_nobody(process: Process) -> None:
    """Of as many addresses as make the limit for each of them no matter, and of one that has gone
    far beyond it."""
    expected, _ = process.ask()
    for number in range(SLOW):
        process.connect((HEAD, BODY, CHUNKED, b"G")[number % 4], f"127.0.1.{number % 8 + 1}")
        process.connect(HEAD)
    for number in range(IDLE - SLOW):
        process.connect(address=f"127.0.2.{number % 8 + 1}")
    for _ in range(5):
        assert process.ask()[0] == expected
        assert process.ask("127.0.0.1")[0] == expected
    assert max(process.ask()[1] for _ in range(10)) < 1


@pytest.fixture
def impatient(tmp_path: Path, many_files: None) -> Iterator[Process]:
    made = Process(
        "placement",
        tmp_path,
        head_seconds=1,
        stall_timeout_seconds=1,
        idle_seconds=1,
        connections=100,
        connections_per_address=20,
    )
    made.ask()  # it is up
    yield made
    assert made.stop() == 0


def ended(client: socket.socket, seconds: float = 8) -> bytes:
    """All that a client is told until it is hung up on."""
    client.settimeout(seconds)
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionResetError:
        return b""


def test_whoever_is_too_slow_is_told_so_and_cut_off(impatient: Process) -> None:
    slow = [impatient.connect(said) for said in (HEAD, BODY[:-1], CHUNKED, b"G")]
    assert [ended(client).split(b"\r\n")[0] for client in slow] == [
        b"HTTP/1.1 408 Request Timeout"
    ] * 4
    assert ended(impatient.connect()) == b""
    used = impatient.connect(HEAD + b"\r\n")
    assert ended(used).startswith(b"HTTP/1.1 200 OK")


def test_a_letter_now_and_then_does_not_buy_time(impatient: Process) -> None:
    begun = time.monotonic()
    clients = [impatient.connect(said) for said in (HEAD + b"X-Slow: ", BODY)]
    told = []
    while clients and time.monotonic() < begun + 8:
        time.sleep(0.3)  # what a slow client does
        for client in list(clients):
            try:
                client.sendall(b"a")
            except OSError:
                told.append(client)
                clients.remove(client)
    assert len(told) == 2
    assert time.monotonic() - begun < 6


def test_one_address_has_so_many_connections_and_no_more(impatient: Process) -> None:
    first = [impatient.connect(address="127.0.3.1") for _ in range(20)]
    assert impatient.ask("127.0.3.1")[0] == b"HTTP/1.1 200 OK"
    assert ended(first[0], 0.5) == b""  # it made room
    alone = impatient.connect(address="127.0.4.1")
    for number in range(120):
        impatient.connect(address=f"127.0.5.{number % 10 + 1}")
    assert impatient.ask("127.0.6.1")[0] == b"HTTP/1.1 200 OK"
    alone.sendall(HEAD + b"Connection: close\r\n\r\n")
    assert ended(alone).startswith(b"HTTP/1.1 200 OK")  # an address with one keeps it


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
def simple() -> Iterator[int]:
    """The port of a server of ours with four threads and an application of few lines."""
    port = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", APPLICATION, str(port)])
    await_true(lambda: answers(port), story="it listens")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_who_does_not_read_an_answer_delays_nobody(simple: int) -> None:
    slow = [socket.create_connection(("127.0.0.1", simple), 30) for _ in range(20)]
    for number, client in enumerate(slow):
        client.sendall(
            (b"GET /pieces", b"GET /large")[number % 2] + HEAD[5:] + b"Connection: close\r\n\r\n"
        )
    for path in (b"/large", b"/pieces"):
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", simple), 30) as client:
            client.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
            assert len(ended(client)) > LARGE
        assert time.monotonic() - begun < 1
    for client in slow[:2]:
        assert len(ended(client)) > LARGE  # all of it, once it does read
    for client in slow:
        client.close()


def test_what_an_application_does_wrong_is_json(simple: int) -> None:
    for path in (b"/failing", b"/snow"):
        with socket.create_connection(("127.0.0.1", simple), 30) as client:
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            head, _, body = ended(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        assert json.loads(body)["error"]["code"] == 500


def test_requests_one_after_the_other_and_at_once(impatient: Process) -> None:
    """What comes behind a whole request is the next one, also when both come in one piece or byte
    by byte."""
    whole = HEAD + b"\r\n"
    client = impatient.connect(whole * 3 + HEAD + b"Connection: close\r\n\r\n")
    assert ended(client).count(b"HTTP/1.1 200 OK") == 4
    letters = impatient.connect()
    for number in range(len(HEAD)):
        letters.sendall(HEAD[number : number + 1])
    letters.sendall(b"Connection: close\r\n\r\n")
    assert ended(letters).startswith(b"HTTP/1.1 200 OK")
    posted = impatient.connect(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd"
        + HEAD
        + b"Connection: close\r\n\r\n"
    )
    assert ended(posted).count(b"HTTP/1.1 ") == 2
