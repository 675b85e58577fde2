# SPDX-License-Identifier: Apache-2.0
"""The embedded volume service with identity and image services, for the tests of volumes."""

import json
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from tests.standalone import Cloud, connect
from tests.waiting import await_true

GIGABYTE = 1024**3
MEGABYTE = 1024**2
HOST = "host-of-volumes"
NEWEST = "volume 3.70"


class Compute:
    """A fake compute service that knows attachments and records events."""

    def __init__(self) -> None:
        events = self.events = []  # type: list[dict[str, str]]
        attachments = self.used = {}  # type: dict[str, str]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                events.extend(json.loads(data)["events"])
                self._answer(200, b'{"events": []}')

            def do_GET(self) -> None:
                volume = self.path.rsplit("/", 1)[-1]
                attachment = attachments.get(volume)
                body = f'{{"volumeAttachment": {{"attachment_id": "{attachment}"}}}}'
                self._answer(200 if attachment else 404, body.encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: Any) -> None:
                """Suppress the log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


class Rig:
    """A running cloud with a volume service, and connections of an admin and of Kilonova."""

    def __init__(self, cloud: Cloud, compute: Compute, options: tuple[str, ...] = ()) -> None:
        self.cloud, self.compute = cloud, compute
        self._options = ("--host", HOST, "--compute-url", compute.url, *options)
        self.url = f"http://127.0.0.1:{cloud.volume_port}/v3"
        self.admin = connect(cloud, "admin", cloud.admin_password, "admin")
        self.service = connect(cloud, "kilonova", cloud.service_password, "service")
        self._stack, self._process = ExitStack(), None  # type: tuple[ExitStack, Any]

    @property
    def folder(self) -> Path:
        return self.cloud.folder / "volume" / "volumes"

    def restart(self) -> None:
        """Start the service, or restart after a kill."""
        self.close()
        self._process = self._stack.enter_context(self.cloud.volume(*self._options))

    def kill(self) -> None:
        """Kill the service and the worker with SIGKILL. No other process gets a signal."""
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._stack.close()

    def path(self, key: str) -> Path:
        return self.folder / f"volume-{key}"

    def ask(self, connection: Any, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Send a request and return the response with any status."""
        headers = {
            "X-Auth-Token": connection.session.get_token(),
            "OpenStack-API-Version": more.pop("version", NEWEST),
        } | more.pop("headers", {})
        return requests.request(
            method, f"{self.url}{path}", json=body, headers=headers, timeout=60, **more
        )

    def volume(self, connection: Any, size: int = 1, status: str = "available", **more: Any) -> str:
        """Create a volume, wait for the status ``status``, and return the id."""
        response = self.ask(connection, "POST", "/volumes", {"volume": {"size": size, **more}})
        assert response.status_code == 202, response.text
        key = str(response.json()["volume"]["id"])
        self.until(connection, key, status)
        return key

    def show(self, connection: Any, key: str, plural: str = "volumes") -> Any:
        response = self.ask(connection, "GET", f"/{plural}/{key}")
        return response.json().get(plural[:-1], {"status": "gone"})

    def until(self, connection: Any, key: str, status: str, plural: str = "volumes") -> None:
        await_true(
            lambda: self.show(connection, key, plural)["status"] == status,
            30,
            f"{plural} {key} {status}: {self.show(connection, key, plural)['status']}",
        )

    def action(self, connection: Any, key: str, name: str, body: Any = None, **more: Any) -> Any:
        return self.ask(connection, "POST", f"/volumes/{key}/action", {name: body}, **more)

    def snapshot(self, connection: Any, volume: str, status: str = "available", **more: Any) -> str:
        response = self.ask(
            connection, "POST", "/snapshots", {"snapshot": {"volume_id": volume, **more}}
        )
        assert response.status_code == 202, response.text
        key = str(response.json()["snapshot"]["id"])
        self.until(connection, key, status, "snapshots")
        return key

    def attach(
        self, connection: Any, volume: str, server: str, host: str = HOST, **more: Any
    ) -> Any:
        body = {"volume_uuid": volume, "instance_uuid": server, "connector": {"host": host}}
        return self.ask(connection, "POST", "/attachments", {"attachment": body | more})

    def complete(self, connection: Any, attachment: str) -> None:
        response = self.ask(
            connection, "POST", f"/attachments/{attachment}/action", {"os-complete": None}
        )
        assert response.status_code == 204, response.text


def person(admin: Any, cloud: Cloud, role: str, project: Any = None) -> Any:
    """Return the connection of a new user with ``role``, in ``project`` or in a new project."""
    name, identity = f"user-{uuid.uuid4().hex[:8]}", admin.identity
    within = project or identity.create_project(name=name, domain_id="default")
    user = identity.create_user(name=name, password="correct horse", domain_id="default")
    identity.assign_project_role_to_user(within, user, identity.find_role(role))
    return connect(cloud, name, "correct horse", within.name)


@contextmanager
def volume_rig(cloud: Cloud, folder: Path, *options: str) -> Iterator[Rig]:
    """Run the volume service of this cloud with all data in ``folder`` until the end of the block.

    At the end, check the log for errors and passwords.
    """
    compute = Compute()
    threading.Thread(target=compute.server.serve_forever, daemon=True).start()
    rig = Rig(replace(cloud, folder=folder), compute, options)
    rig.restart()
    try:
        yield rig
    finally:
        rig.close()
        compute.server.shutdown()
        compute.server.server_close()
    log = (folder / "volume.log").read_text()
    assert "status=500" not in log
    assert "Traceback" not in log
    assert cloud.service_password not in log


def write(path: Path, *places: int) -> None:
    """Write marks at these offsets, in MiB."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place * MEGABYTE)
            file.write(b"mark %06d" % place)


def marks(path: Path, *places: int) -> list[bytes]:
    with path.open("rb") as file:
        return [(file.seek(place * MEGABYTE), file.read(11))[1] for place in places]


def image(cloud: Cloud, connection: Any, data: bytes, form: str = "raw", **more: Any) -> str:
    """Create an image with data and return the id."""
    base = f"{cloud.image_url}/v2/images"
    token = {"X-Auth-Token": connection.session.get_token()}
    body = {"name": "i", "disk_format": form, "container_format": "bare"} | more
    key = requests.post(base, json=body, headers=token, timeout=30).json()["id"]
    octets = token | {"Content-Type": "application/octet-stream"}
    assert requests.put(f"{base}/{key}/file", data=data, headers=octets, timeout=30).ok
    return str(key)


def qcow2(folder: Path, *options: str) -> bytes:
    path = folder / "image.qcow2"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *options, path, "8M"], check=True, timeout=60
    )
    return path.read_bytes()
