# SPDX-License-Identifier: Apache-2.0
"""Lives of servers that go on while the processes of a cloud change their version.

A request may be refused, cut off, or answered with 503 while a process restarts. It is then
repeated. No other error is accepted, and each server must reach each status.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.e2e.live import CUT_OFF, SETTLE, Live, Rest
from tests.waiting import await_true

#: Statuses that mean: repeat the request. 409 comes while an earlier copy of the action runs.
REPEATED = (409, 503)
#: The answer to a live migration, with status 400 as in Nova, while the host of the server is down.
HOST_IS_DOWN = "is unavailable at this time"


@dataclass
class Client:
    """Creates servers one after the other, and leads each through a whole life.

    Attributes:
        live: The cloud.
        over: Set to end after the current life.
        network: The network of the servers.
        begun: The time at which each complete life began, by the monotonic clock.
        repeated: Number of requests that were repeated.
    """

    live: Live
    over: threading.Event
    network: str
    begun: list[float] = field(default_factory=list)
    repeated: int = 0

    def work(self) -> None:
        self._rest, self._admin = self.live.rest(), self.live.rest("kilonova-admin")
        image, flavor = self.live.image("empty"), self.live.flavor()
        larger = self.live.flavor("m1.tiny")
        while not self.over.is_set():
            began = time.monotonic()
            server = self._rest.create(
                image=image,
                flavor=flavor,
                name=f"upgrade-{uuid.uuid4().hex[:8]}",
                seconds=SETTLE,
                networks=[{"uuid": self.network}],
            )
            self._rest.await_status(server, "ACTIVE")
            volume = self._make_volume()
            self._attach(server, volume)
            self._act(server, "os-stop", None, lambda shown: shown["status"] == "SHUTOFF")
            self._act(server, "os-start", None, lambda shown: shown["status"] == "ACTIVE")
            self._migrate(server)
            self._act(
                server,
                "resize",
                {"flavorRef": larger},
                lambda shown: shown["status"] == "VERIFY_RESIZE",
            )
            self._act(server, "confirmResize", None, lambda shown: shown["status"] == "ACTIVE")
            self._rest.insist("DELETE", f"/servers/{server}", expected=(204, 404), seconds=SETTLE)
            self._rest.await_gone(server)
            self.live.seed.demo.block_storage.wait_for_status(
                self.live.seed.demo.block_storage.get_volume(volume), "available", wait=SETTLE
            )
            self.live.seed.demo.block_storage.delete_volume(volume)
            self.begun.append(began)

    def _make_volume(self) -> str:
        block_storage = self.live.seed.demo.block_storage
        volume = block_storage.create_volume(size=1, name="upgrade")
        block_storage.wait_for_status(volume, "available", wait=SETTLE)
        return str(volume.id)

    def _attach(self, server: str, volume: str) -> None:
        body = {"volumeAttachment": {"volumeId": volume}}
        path = f"/servers/{server}/os-volume_attachments"

        def is_attached() -> bool:
            found = self._rest.insist("GET", path, expected=(200,)).body["volumeAttachments"]
            if not found:
                self._send(self._rest, path, body, 200)
                return False
            return bool(self.live.seed.demo.block_storage.get_volume(volume).status == "in-use")

        await_true(is_attached, SETTLE, lambda: f"{volume} is not attached to {server}", pause=0.3)

    def _migrate(self, server: str) -> None:
        """Live-migrate the server to the other host, and wait until it runs there."""
        before = self._admin.server(server)["OS-EXT-SRV-ATTR:host"]
        self._act(
            server,
            "os-migrateLive",
            {"host": None, "block_migration": "auto"},
            lambda shown: shown["status"] == "ACTIVE" and shown["OS-EXT-SRV-ATTR:host"] != before,
        )

    def _act(
        self, server: str, action: str, value: Any, has_worked: Callable[[dict[str, Any]], bool]
    ) -> None:
        """Request the action until the server shows that it has worked."""
        path = f"/servers/{server}/action"

        def is_there() -> bool:
            shown = self._admin.server(server)
            assert shown["status"] != "ERROR", shown
            if shown["OS-EXT-STS:task_state"] is not None:
                return False
            if has_worked(shown):
                return True
            self._send(self._admin, path, {action: value}, 202, 204)
            return False

        await_true(is_there, SETTLE, lambda: f"{action}: {self._admin.server(server)}", pause=0.3)

    def _send(self, rest: Rest, path: str, body: Any, *accepted: int) -> None:
        try:
            reply = rest.call("POST", path, body)
        except (*CUT_OFF, requests.Timeout):
            self.repeated += 1
            return
        is_repeated = reply.status in REPEATED or HOST_IS_DOWN in str(reply.body)
        self.repeated += is_repeated
        assert is_repeated or reply.status in accepted, reply


def await_lives(clients: list[Client], seconds: float = 3 * SETTLE) -> None:
    """Wait until each client has completed a life that began after this call."""
    since = time.monotonic()
    await_true(
        lambda: all(any(began > since for began in client.begun) for client in clients),
        seconds,
        lambda: f"complete lives: {[len(client.begun) for client in clients]}",
        pause=0.5,
    )
