# SPDX-License-Identifier: Apache-2.0
"""An image gateway process, the access that conductors send to hosts, and a fake image service.

The fake image service can break off, refuse or stay silent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

from common.domain.models import Access, ImageRef
from common.domain.verbs import EnsureGuest, Snapshot, Verb
from common.domain.wire import from_wire
from common.security.host_keys import Purpose
from common.security.image_tickets import Gateway, Tickets
from common.security.vault import Vault
from conductor.service import Messages
from deploy.testing.servers import free_ports
from tests.standalone import Cloud
from tests.verbs import VALUES, new_command

KEY = "the secret of this cloud"
HOST = "h1"


class Wire:
    """A link to hosts that records casts."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def cast(self, host: str, method: str, purpose: Purpose, content: dict[str, Any]) -> bool:
        self.sent.append(content)
        return True


class Process:
    """A running kilonova-image-gateway with a log."""

    def __init__(self, folder: Path, conf: str) -> None:
        folder.mkdir(exist_ok=True)
        port = free_ports(1)
        self.url, self.conf, self._log = (
            f"http://127.0.0.1:{port}",
            folder / "kilonova.conf",
            folder / "gateway.log",
        )
        self.conf.write_text(
            f"[DEFAULT]\nsecret_key = {KEY}\n[image_gateway]\nport = {port}\nurl = {self.url}\n{conf}"
        )
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notices.bind(str(folder / "notify"))
        notices.settimeout(30)
        with notices, self._log.open("wb") as log:
            self.started = subprocess.Popen(
                [sys.executable, "-m", "compute_api.image_gateway.service"],
                stderr=log,
                env={
                    **os.environ,
                    "KILONOVA_CONF": str(self.conf),
                    "NOTIFY_SOCKET": str(folder / "notify"),
                },
            )
            assert b"READY=1" in notices.recv(1000)

    def log(self) -> str:
        return self._log.read_text()

    def access(self, verb: Verb) -> Access:
        """Return the access that a conductor sends with a command for this verb."""
        wire = Wire()
        Messages(wire, wire, Gateway(self.url, Tickets(Vault(KEY)))).do(  # type: ignore[arg-type]  # it casts only
            HOST, [new_command(verb)]
        )
        return from_wire(Access, wire.sent[0]["access"])

    def read_access(self, image: str) -> Access:
        guest = replace(VALUES["guest"], image=ImageRef(image))
        return self.access(EnsureGuest(guest=guest))

    def write_access(self, image: str) -> Access:
        return self.access(Snapshot(image_id=image))

    def peak_memory(self) -> int:
        """Return the peak memory of the largest process of the gateway, in MiB."""
        own = self.started.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return max(_peak_memory(int(pid)) for pid in (own, *children))

    def end(self) -> None:
        self.started.send_signal(signal.SIGTERM)
        assert self.started.wait(20) == 0


def _peak_memory(pid: int) -> int:
    [line] = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) // 1024


@contextmanager
def running(
    folder: Path,
    cloud: Cloud,
    *,
    user: str = "kilonova",
    password: str | None = None,
    image: str = "",
) -> Iterator[Process]:
    """Yield a gateway with the service user ``user``.

    ``image`` is the URL of the image service. If empty, the URL comes from the catalogue.
    """
    process = Process(
        folder,
        f"[identity]\nauth_url = {cloud.auth_url}\nusername = {user}\nproject_name = service\n"
        f"password = {password or cloud.service_password}\n"
        + (f"[image]\nendpoint = {image}\n" if image else ""),
    )
    yield process
    process.end()


def send_request(method: str, url: str, token: str, **more: Any) -> requests.Response:
    """Send one request with this token."""
    with requests.Session() as session:
        session.trust_env = False
        return session.request(
            method,
            url,
            headers={"X-Auth-Token": token, "Content-Type": "application/octet-stream"},
            timeout=30,
            **more,
        )


class Service:
    """An image service. The function ``does`` gets each connection and request head."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.does: Callable[[socket.socket, str], Any] = lambda client, head: None
        self.request_heads: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(
                    target=self._serve, args=self._listener.accept()[:1], daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(30)
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(1)
            self.request_heads.append(head.decode())
            self.does(client, head.decode())
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)

    def respond_with(self, text: bytes) -> None:
        """Answer each request with this text and close the connection."""
        self.does = lambda client, head: client.sendall(text)

    def close(self) -> None:
        self._listener.close()
