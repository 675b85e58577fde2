# SPDX-License-Identifier: Apache-2.0
"""``kilonova host verify`` with a fake cloud.

The tests cover the created server, the accepted proofs, and the removal of the server.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.domain.models import HostInventory
from common.service import config
from common.store.engine import Store
from common.store.hosts import hosts, services
from deploy.operator.hosts import verify as host_verify
from deploy.operator.main import main
from tests.schemas import upgrade

IMAGES = [
    {"id": "iso", "disk_format": "iso", "size": 1},
    {"id": "large", "disk_format": "qcow2", "size": 9 << 30},
    {"id": "small", "disk_format": "qcow2", "size": 1 << 20, "virtual_size": 3 << 30},
]
FLAVORS = [
    {"id": "none", "ram": 64, "vcpus": 1, "disk": 1},
    {"id": "fits", "ram": 128, "vcpus": 1, "disk": 3},
    {"id": "huge", "ram": 9999, "vcpus": 8, "disk": 99},
]


class FakeCloud:
    """Compute and image service. New servers get ``status`` and ``host``."""

    def __init__(self) -> None:
        self.servers: dict[str, dict[str, Any]] = {}
        self.requested_servers: list[dict[str, Any]] = []
        self.status, self.host, self.console_output = "ACTIVE", "h1", "login:"
        self.consoles = 0

    def base(self) -> str:
        return ""

    def send(self, method: str, url: str, token: str, **more: Any) -> Any:
        assert token == "token"
        status, body = self.answer(method, url, more.get("json"))
        text = json.dumps(body)
        return SimpleNamespace(
            status_code=status, text=text, content=text.encode(), json=lambda: json.loads(text)
        )

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        if url.startswith("/v2/images/"):
            return 200, next(image for image in IMAGES if image["id"] == url.split("/")[-1])
        if url.startswith("/v2/images"):
            return 200, {"images": IMAGES}
        if url.startswith("/flavors"):
            return 200, {"flavors": FLAVORS}
        if method == "POST" and url == "/servers":
            self.requested_servers.append(body["server"])
            return 202, {"server": {"id": self.add_server(body["server"]["name"])}}
        if url.startswith("/servers?"):
            return 200, {"servers": list(self.servers.values())}
        server = url.split("/")[2]
        if server not in self.servers:
            return 404, {"itemNotFound": {}}
        if method == "DELETE":
            del self.servers[server]
            return 204, None
        if url.endswith("/action"):
            return 200, {"output": self.console_output}
        if url.endswith("/remote-consoles"):
            self.consoles += 1
            return 200, {"remote_console": {"url": "http://x"}}
        return 200, {"server": self.servers[server]}

    def add_server(self, name: str) -> str:
        number = f"s{len(self.requested_servers)}-{name}"
        self.servers[number] = {
            "id": number,
            "name": name,
            "status": self.status,
            "fault": {"message": "No room."},
            "OS-EXT-SRV-ATTR:host": self.host,
            "addresses": {"private": [{"addr": "127.0.0.1"}]},
        }
        return number


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    new_cloud = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    new_cloud.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    yield new_cloud
    new_cloud.close()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    new_cloud = FakeCloud()
    own = SimpleNamespace(
        token=lambda: "token", compute_url=lambda: "", image_url=lambda: "http://image/v2"
    )
    monkeypatch.setattr(host_verify, "IdentityClient", lambda conf, wait: own)
    monkeypatch.setattr(host_verify, "Http", lambda name, url, seconds: new_cloud)
    monkeypatch.setattr(host_verify, "PAUSE_SECONDS", 0.01)
    new_cloud.name = "service"  # type: ignore[attr-defined]
    return new_cloud


@pytest.fixture
def run_prove(
    tmp_path: Path, store: Store, cloud: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["--config", str(path), "host", "verify", "h1", "--timeout", "1", *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield run
    config.CONF.clear()


def test_host_verify_creates_reaches_and_removes_smallest_server(
    run_prove: Any, cloud: FakeCloud
) -> None:
    status, output, error_output = run_prove()
    assert (status, error_output) == (0, "")
    assert [line.split(":")[0] for line in output.splitlines()] == [
        "created",
        "reached",
        "removed",
        "host h1 is proved",
    ]
    assert cloud.requested_servers == [
        {
            "name": "kilonova-verify-h1",
            "imageRef": "small",
            "flavorRef": "fits",
            "host": "h1",
            "networks": "none",
        }
    ]
    assert cloud.servers == {}


def test_host_verify_first_removes_server_of_earlier_verification(
    run_prove: Any, cloud: FakeCloud
) -> None:
    old_server, other = (
        cloud.add_server("kilonova-verify-h1"),
        cloud.add_server("kilonova-verify-h10"),
    )
    status, _, error_output = run_prove("--image", "large", "--flavor", "huge")
    assert status == 0 and old_server in error_output
    assert list(cloud.servers) == [other]
    assert (cloud.requested_servers[0]["imageRef"], cloud.requested_servers[0]["flavorRef"]) == (
        "large",
        "huge",
    )


def test_host_verify_opens_console_when_guest_prints_nothing(
    run_prove: Any, cloud: FakeCloud
) -> None:
    cloud.console_output = ""
    status, output, _ = run_prove()
    assert status == 0 and "its console can be opened" in output and cloud.consoles == 1


@pytest.mark.parametrize(
    ("status", "host", "says"),
    [
        ("ERROR", "h1", "failed on host h1: No room. Run: kilonova timeline s1-kilonova-verify-h1"),
        ("ACTIVE", "h2", "is on h2, not on h1"),
        ("BUILD", "h1", "its creation took longer than 1 s"),
    ],
)
def test_host_verify_fails_and_removes_server_not_active_on_host(
    run_prove: Any, cloud: FakeCloud, status: str, host: str, says: str
) -> None:
    cloud.status, cloud.host = status, host
    exit_status, output, error_output = run_prove()
    assert exit_status == 1 and says in error_output
    assert "is proved" not in output and cloud.servers == {}


def test_host_verify_refuses_disabled_or_silent_host(
    run_prove: Any, cloud: FakeCloud, store: Store
) -> None:
    [row] = store.read(lambda tx: services.list_all(tx, "h1"))
    store.write(lambda tx: services.set_state(tx, row.uuid, disabled=True))
    assert "is disabled (no reason): kilonova host restore h1" in run_prove()[2]
    store.write(lambda tx: services.set_state(tx, row.uuid, forced_down=True))
    assert "Host h1 is not up; waiting for it took longer than 1 s: see" in run_prove()[2]
    assert cloud.requested_servers == []


@pytest.mark.parametrize(("greeting", "wanted"), [(b"SSH-2.0-x\r\n", 0), (b"HTTP/1.1", 1)])
def test_host_verify_with_network_requires_ssh_greeting(
    run_prove: Any,
    cloud: FakeCloud,
    monkeypatch: pytest.MonkeyPatch,
    greeting: bytes,
    wanted: int,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        port = server.getsockname()[1]
        connect = socket.create_connection
        monkeypatch.setattr(
            "socket.create_connection", lambda where, seconds: connect((where[0], port), seconds)
        )

        def greet() -> None:
            # The test closes the socket at the end.
            with suppress(OSError):
                while True:
                    with server.accept()[0] as guest:
                        guest.sendall(greeting)

        threading.Thread(target=greet, daemon=True).start()
        status, output, error_output = run_prove("--network", "n1")
    assert status == wanted
    assert cloud.requested_servers[0]["networks"] == [{"uuid": "n1"}] and cloud.servers == {}
    if wanted:
        assert "An answer of ssh at 127.0.0.1 took longer" in error_output
    else:
        assert "reached: ssh at 127.0.0.1: SSH-2.0-x" in output
