# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-metadata: valid and broken requests at its socket, and SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from compute_api.metadata.proxy_headers import signature
from deploy.testing.servers import free_ports
from tests.api.conftest import PROJECT, Cloud

SECRET = "a shared secret"


class Process:
    """The process with one server, and the headers that the proxy sends for this server."""

    def __init__(self, cloud: Cloud, folder: Path) -> None:
        self.cloud, self.port = cloud, free_ports(1)
        server = cloud.create()
        cloud.set_state(
            server,
            interfaces=[to_wire(Interface("p", addresses=[{"address": "10.0.0.5", "version": 4}]))],
        )
        self.head = (
            f"Host: x\r\nX-Instance-ID: {server}\r\nX-Tenant-ID: {PROJECT}\r\nX-Forwarded-For: 10.0.0.5\r\n"
            f"X-Instance-ID-Signature: {signature(SECRET, server)}\r\n"
        )
        (folder / "kilonova.conf").write_text(
            f"[database]\nurl = {cloud.store.url.render_as_string(hide_password=False)}\n[metadata]\n"
            f"port = {self.port}\nproxy_shared_secret = {SECRET}\n"
        )
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notices.bind(str(folder / "notify"))
        notices.settimeout(30)
        with notices:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "compute_api.metadata.service"],
                env={
                    **os.environ,
                    "KILONOVA_CONF": str(folder / "kilonova.conf"),
                    "NOTIFY_SOCKET": str(folder / "notify"),
                },
            )
            assert b"READY=1" in notices.recv(1000)

    def send(self, first: str, rest: str = "\r\n", ends: bool = False) -> str:
        """Send a request with a new client, and return the whole answer.

        With ``ends`` the client then closes its sending side.
        """
        with socket.create_connection(("127.0.0.1", self.port), 30) as client:
            client.sendall(f"{first}\r\nConnection: close\r\n{self.head}{rest}".encode("latin-1"))
            if ends:
                client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(65536), b"")).decode("latin-1")


@pytest.fixture
def process(cloud: Cloud, tmp_path: Path) -> Iterator[Process]:
    process_with_server = Process(cloud, tmp_path)
    yield process_with_server
    process_with_server.child.send_signal(signal.SIGTERM)
    assert process_with_server.child.wait(20) == 0


GET, POST = "GET /latest/meta-data/hostname HTTP/1.1", "POST /openstack/latest/password HTTP/1.1"


def test_metadata_process_returns_200_for_valid_4xx_for_broken_requests(process: Process) -> None:
    for first, rest, ends, status in (
        (GET, "\r\n", False, 200),
        ("GET http://169.254.169.254/latest HTTP/1.1", "\r\n", False, 200),
        # A header with underscores is a different header.
        (GET, "X_Instance_ID: other\r\n\r\n", False, 200),
        (GET, "X-Instance-ID: other\r\n\r\n", False, 403),
        (GET, "X-Forwarded-For: 10.0.0.6\r\n\r\n", False, 404),
        (f"GET /{'a' * 9000} HTTP/1.1", "\r\n", False, 414),
        (GET, f"X-A: {'a' * 20000}\r\n\r\n", False, 431),
        (POST, "Content-Length: 100\r\n\r\nabc", True, 400),
        (POST, "Transfer-Encoding: chunked\r\n\r\nzz\r\nabc", False, 400),
        (POST, f"Transfer-Encoding: chunked\r\n\r\n800\r\n{'a' * 2048}\r\n0\r\n\r\n", False, 400),
        (POST, "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", False, 200),
        (POST, "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", False, 409),
    ):
        answer = process.send(first, rest, ends)
        assert answer.startswith(f"HTTP/1.1 {status} "), (first[:80], rest[:80], answer[:300])
    assert [row.password for row in process.cloud.rows(schema.servers)] == ["abc"]


def test_metadata_health_check_is_answered_to_operators_only(process: Process) -> None:
    guest = process.send("GET /healthcheck/ready HTTP/1.1")
    assert guest.startswith("HTTP/1.1 404 ") and "database" not in guest
    process.head = ""
    operator = process.send("GET /healthcheck/ready HTTP/1.1", "Host: x\r\n\r\n")
    assert operator.startswith("HTTP/1.1 200 ") and '"database":{"status":"ok"' in operator
