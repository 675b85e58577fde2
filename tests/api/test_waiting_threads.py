# SPDX-License-Identifier: Apache-2.0
"""Requests that may wait run in separate threads, so that other requests are answered."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compute_api.compute.request.waiting_threads import may_wait
from deploy.one_machine.cloud.probes import answers
from deploy.testing.servers import free_ports
from tests.waiting import await_true

#: This application answers requests to a server when a file exists.
APPLICATION = """
import pathlib, sys, time
from common.service import config
from compute_api.compute.request.waiting_threads import may_wait
from compute_api.http.worker.server import Server
config.load()
go = pathlib.Path(sys.argv[2])
def application(environ, start_response):
    while environ["PATH_INFO"].startswith("/servers/1/") and not go.exists():
        time.sleep(0.01)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"answer"]
Server("test", "127.0.0.1", int(sys.argv[1]), lambda: application, lambda: None, threads=1,
       may_wait=may_wait, waiting_threads=2).run()
"""


def get(port: int, path: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return int(opener.open(f"http://127.0.0.1:{port}{path}", timeout=30).status)


def test_list_servers_is_answered_while_server_requests_wait(tmp_path: Path) -> None:
    port, go = free_ports(1), tmp_path / "go"
    process = subprocess.Popen([sys.executable, "-c", APPLICATION, str(port), str(go)])
    try:
        await_true(lambda: answers(port), 30, "it listens")
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(get, port, "/servers/1/action") for _ in range(2)]
            assert [get(port, "/servers/detail") for _ in range(3)] == [200] * 3
            assert not any(future.done() for future in waiting)
            go.touch()
            assert [future.result(30) for future in waiting] == [200, 200]
    finally:
        go.touch()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("/v2.1/servers/1/os-interface", True),
        ("/v2.1/p/servers/1/action", True),
        ("/v2.1/servers", False),
        ("/v2.1/servers/detail", False),
        ("/v2.1/servers/1/", False),
        ("/v2.1/os-hypervisors/1/uptime", False),
    ],
)
def test_may_wait_is_true_only_for_subresources_of_one_server(path: str, waits: bool) -> None:
    assert may_wait(path) is waits
