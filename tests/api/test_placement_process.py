# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-placement: authentication, health, metrics and its end on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from common.store.engine import Store
from deploy.testing.servers import free_ports
from tests.schemas import upgrade

FORGED = {
    "X-Identity-Status": "Confirmed",
    "X-User-Id": "admin",
    "X-Project-Id": "admin",
    "X-Roles": "admin",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a process whose identity service does not answer."""
    tmp_path = tmp_path_factory.mktemp("placement")
    store, port = Store(f"sqlite:///{tmp_path}/kilonova.db"), free_ports(2)
    upgrade(store)
    store.close()
    (tmp_path / "kilonova.conf").write_text(
        f"[database]\nurl = {store.url}\n[placement]\nport = {port}\n"
        f"[identity]\nauth_url = http://127.0.0.1:{free_ports(1)}/v3\n"
        f"[prometheus]\nenabled = true\nplacement_port = {port + 1}\n"
    )
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(tmp_path / "notify"))
    notices.settimeout(30)
    with notices:
        process = subprocess.Popen(
            [sys.executable, "-m", "compute_api.placement.service"],
            env={
                **os.environ,
                "KILONOVA_CONF": str(tmp_path / "kilonova.conf"),
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
            },
        )
        assert b"READY=1" in notices.recv(1000)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def get(url: str, **headers: str) -> tuple[int, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


def test_placement_process_returns_503_for_token_without_identity_service(url: str) -> None:
    status, body = get(url)
    assert (status, body["versions"][0]["max_version"]) == (200, "1.39")
    for headers, expected in (
        ({}, 401),
        (FORGED, 401),
        ({"X-Auth-Token": "some"}, 503),
        ({**FORGED, "X-Auth-Token": "some"}, 503),
    ):
        status, body = get(f"{url}/resource_providers", **headers)
        assert (status, body["errors"][0]["status"]) == (expected, expected), headers


def test_placement_process_is_alive_but_not_ready_without_identity(url: str) -> None:
    """The health checks need no token, and the answer names each dependency."""
    assert get(f"{url}/healthcheck", **FORGED) == (200, {"status": "alive"})
    status, body = get(f"{url}/healthcheck/ready")
    assert (status, body["status"]) == (503, "not ready")
    statuses = {name: dependency["status"] for name, dependency in body["dependencies"].items()}
    assert statuses == {"database": "ok", "identity": "failed"}
    assert get(f"{url}/healthcheck/other", **{"X-Auth-Token": "some"})[0] == 503
    assert get(f"{url}/healthcheck/other")[0] == 401


def test_placement_process_serves_metrics_on_separate_port(url: str) -> None:
    """The worker counts the requests. The master serves the metrics without a token."""
    before = read_metrics(url)
    get(f"{url}/resource_providers")
    get(f"{url}/no/such/path")
    get(url)
    after = read_metrics(url)
    for route, status, number in (("/", 200, 1), ("other", 401, 2)):
        name = f'kilonova_http_requests_total{{method="GET",route="{route}",status="{status}"}}'
        assert after[name] - before.get(name, 0) == number
    assert not any("_has_lease" in name for name in after)
    assert get(f"{url}/metrics")[0] == 401


def read_metrics(url: str) -> dict[str, float]:
    """Return the value of each metric, by its name with its labels."""
    base, _, port = url.rpartition(":")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{base}:{int(port) + 1}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}
