# SPDX-License-Identifier: Apache-2.0
"""``kilonova host prove``: what it asks for, what it takes for proof, and that nothing stays."""

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
from deploy.operator.hosts import prove as host_prove
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
    """Compute and image service. ``status``: what a server comes to; ``said``: by its console."""

    def __init__(self) -> None:
        self.servers: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.status, self.host, self.said = "ACTIVE", "h1", "login:"
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
            return 200, next(one for one in IMAGES if one["id"] == url.split("/")[-1])
        if url.startswith("/v2/images"):
            return 200, {"images": IMAGES}
        if url.startswith("/flavors"):
            return 200, {"flavors": FLAVORS}
        if method == "POST" and url == "/servers":
            self.asked.append(body["server"])
            return 202, {"server": {"id": self.make(body["server"]["name"])}}
        if url.startswith("/servers?"):
            return 200, {"servers": list(self.servers.values())}
        server = url.split("/")[2]
        if server not in self.servers:
            return 404, {"itemNotFound": {}}
        if method == "DELETE":
            del self.servers[server]
            return 204, None
        if url.endswith("/action"):
            return 200, {"output": self.said}
        if url.endswith("/remote-consoles"):
            self.consoles += 1
            return 200, {"remote_console": {"url": "http://x"}}
        return 200, {"server": self.servers[server]}

    def make(self, name: str) -> str:
        number = f"s{len(self.asked)}-{name}"
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
    made = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    made.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)
        )
    )
    yield made
    made.close()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    made = FakeCloud()
    own = SimpleNamespace(
        token=lambda: "token", compute_url=lambda: "", image_url=lambda: "http://image/v2"
    )
    monkeypatch.setattr(host_prove, "IdentityClient", lambda conf, wait: own)
    monkeypatch.setattr(host_prove, "Http", lambda name, url, seconds: made)
    monkeypatch.setattr(host_prove, "PAUSE_SECONDS", 0.01)
    made.name = "service"  # type: ignore[attr-defined]
    return made


@pytest.fixture
def proves(
    tmp_path: Path, store: Store, cloud: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["--config", str(path), "host", "prove", "h1", "--timeout", "1", *words])
        told = capsys.readouterr()
        return status, told.out, told.err

    yield run
    config.CONF.clear()


def test_a_small_server_is_made_there_reached_and_removed(proves: Any, cloud: FakeCloud) -> None:
    status, said, complained = proves()
    assert (status, complained) == (0, "")
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "created",
        "reached",
        "removed",
        "host h1 is proved",
    ]
    assert cloud.asked == [
        {
            "name": "kilonova-prove-h1",
            "imageRef": "small",
            "flavorRef": "fits",
            "host": "h1",
            "networks": "none",
        }
    ]
    assert cloud.servers == {}


def test_what_an_earlier_proof_left_goes_first(proves: Any, cloud: FakeCloud) -> None:
    left, other = cloud.make("kilonova-prove-h1"), cloud.make("kilonova-prove-h10")
    status, _, complained = proves("--image", "large", "--flavor", "huge")
    assert status == 0 and left in complained
    assert list(cloud.servers) == [other]
    assert (cloud.asked[0]["imageRef"], cloud.asked[0]["flavorRef"]) == ("large", "huge")


def test_a_guest_that_says_nothing_has_a_console(proves: Any, cloud: FakeCloud) -> None:
    cloud.said = ""
    status, said, _ = proves()
    assert status == 0 and "its console can be opened" in said and cloud.consoles == 1


@pytest.mark.parametrize(
    ("status", "host", "says"),
    [
        ("ERROR", "h1", "failed on host h1: No room. kilonova timeline s1-kilonova-prove-h1"),
        ("ACTIVE", "h2", "is on h2, not on h1"),
        ("BUILD", "h1", "its creation took longer than 1 s"),
    ],
)
def test_a_server_that_fails_is_no_proof_and_does_not_stay(
    proves: Any, cloud: FakeCloud, status: str, host: str, says: str
) -> None:
    cloud.status, cloud.host = status, host
    ended, said, complained = proves()
    assert ended == 1 and says in complained
    assert "is proved" not in said and cloud.servers == {}


def test_a_host_that_takes_no_servers_is_refused(
    proves: Any, cloud: FakeCloud, store: Store
) -> None:
    [row] = store.read(lambda tx: services.list_all(tx, "h1"))
    store.write(lambda tx: services.set_state(tx, row.uuid, disabled=True))
    assert "is disabled (no reason): kilonova host restore h1" in proves()[2]
    store.write(lambda tx: services.set_state(tx, row.uuid, forced_down=True))
    assert "Host h1 is not heard; it took longer than 1 s: see journalctl" in proves()[2]
    assert cloud.asked == []


@pytest.mark.parametrize(("greeting", "wanted"), [(b"SSH-2.0-x\r\n", 0), (b"HTTP/1.1", 1)])
def test_with_a_network_ssh_has_to_greet(
    proves: Any,
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
            with suppress(OSError):  # the server is closed
                while True:
                    with server.accept()[0] as guest:
                        guest.sendall(greeting)

        threading.Thread(target=greet, daemon=True).start()
        status, said, complained = proves("--network", "n1")
    assert status == wanted
    assert cloud.asked[0]["networks"] == [{"uuid": "n1"}] and cloud.servers == {}
    if wanted:
        assert "An answer of ssh at 127.0.0.1 took longer" in complained
    else:
        assert "reached: ssh at 127.0.0.1: SSH-2.0-x" in said
