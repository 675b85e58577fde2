# SPDX-License-Identifier: Apache-2.0
"""Fair shares of the API's threads: a busy project does not delay other projects."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.store.engine import Store
from deploy.one_machine.cloud.probes import answers
from deploy.testing.servers import free_ports
from tests.schemas import upgrade
from tests.standalone import connect, running, running_api
from tests.waiting import await_true

#: Requests of the project "busy" are answered when a file exists. Each response has the number of
#: that project's requests that ran at the same time.
APPLICATION = """
import pathlib, sys, threading, time
from common.service import config
from compute_api.http import fair_share
from compute_api.http.worker.server import Server
config.load()
go, running, lock = pathlib.Path(sys.argv[2]), set(), threading.Lock()
fair_share.MAX_WAIT_SECONDS = float(sys.argv[3])
def application(environ, start_response):
    count = 0
    if environ["HTTP_X_PROJECT_ID"] == "busy":
        with lock:
            running.add(environ["wsgi.input"])
            count = len(running)
        while not go.exists():
            time.sleep(0.01)
        with lock:
            running.discard(environ["wsgi.input"])
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"%d " % count + body]
def fault(status, text):
    return {"serviceUnavailable": {"code": status, "message": text}}
Server("test", "127.0.0.1", int(sys.argv[1]), lambda: fair_share.limit_projects(application, fault),
       lambda: None, threads=4, shares_threads=True).run()
"""


@dataclass
class Process:
    """A process of four threads. Each project has one thread for reads, and two for changes."""

    port: int
    go: Path

    def send(self, project: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes, Any]:
        """Send a request, and return status, body and headers of the answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/",
            data=body or None,
            headers={"X-Project-Id": project},
            method=method,
        )
        try:
            answer = opener.open(request, timeout=30)
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            return answer.status, answer.read(), answer.headers


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    seconds = getattr(request, "param", 30)
    port, go = free_ports(1), tmp_path / "go"
    command = [sys.executable, "-c", APPLICATION, str(port), str(go), str(seconds)]
    child = subprocess.Popen(command)
    try:
        await_true(lambda: answers(port), 30, "it listens")
        yield Process(port, go)
    finally:
        go.touch()
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


@pytest.mark.parametrize(("method", "body", "places"), [("GET", b"", 1), ("POST", b"abc", 2)])
def test_fair_share_serves_project_while_another_fills_its_threads(
    process: Process, method: str, body: bytes, places: int
) -> None:
    with ThreadPoolExecutor(40) as pool:
        busy = [pool.submit(process.send, "busy", method, body) for _ in range(40)]
        try:
            for _ in range(5):
                assert process.send("other", method, body)[:2] == (200, b"0 " + body)
            assert not any(each.done() for each in busy)
        finally:
            process.go.touch()
        results = [each.result(30) for each in busy]
    assert [status for status, _, _ in results] == [200] * 40
    assert {answer.partition(b" ")[2] for _, answer, _ in results} == {body}
    assert max(int(answer.split(b" ")[0]) for _, answer, _ in results) == places


@pytest.mark.parametrize("process", [0.5], indirect=True)
def test_fair_share_request_without_free_thread_returns_503_after_wait(process: Process) -> None:
    with ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(process.send, "busy") for _ in range(3)]
        try:
            await_true(lambda: sum(each.done() for each in busy) == 2, 30, "two are refused")
        finally:
            process.go.touch()
        results = [each.result(30) for each in busy]
    assert sorted(status for status, _, _ in results) == [200, 503, 503]
    for status, body, headers in results:
        if status == 503:
            assert headers["Retry-After"] == "1"
            assert json.loads(body)["serviceUnavailable"]["code"] == 503


def test_fair_share_lists_servers_while_other_project_waits_for_images(tmp_path: Path) -> None:
    """An image service that does not answer keeps the requests of the busy project running."""
    with (
        running(tmp_path, with_image=False) as cloud,
        socket.create_server(("127.0.0.1", cloud.image_port)) as silent,
    ):
        store = upgrade(Store(f"sqlite:///{tmp_path}/kilonova.db"))
        store.close()
        busy = connect(cloud, "kilonova", cloud.service_password, "service").auth_token
        other = connect(cloud, "admin", cloud.admin_password, "admin").auth_token
        with running_api(cloud, store.url, "threads = 2") as url, ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(get_status, f"{url}/images/{n}", busy) for n in range(12)]
            silent.settimeout(30)
            accepted, _ = silent.accept()
            try:
                assert [get_status(f"{url}/servers", other) for _ in range(5)] == [200] * 5
                assert not any(each.done() for each in waiting)
            finally:
                accepted.close()
                silent.close()
            assert {each.result(60) for each in waiting} == {503}


def get_status(url: str, token: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, headers={"X-Auth-Token": token}), timeout=60
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
