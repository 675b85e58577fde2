# SPDX-License-Identifier: Apache-2.0
"""A storm: every second some process is killed and once the broker forgets everything, while clients go on with work.

Two hosts in memory, so that many servers live and die meanwhile. What is struck follows from ``SEED``
(KILONOVA_E2E_SEED for another storm); the clients are patient: they look, and ask again for what has not happened. No
server may end in ERROR, get stuck, be doubled or leave anything.
"""
from __future__ import annotations

import os
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e.live import CUT_OFF, SETTLE, Live, Rest
from tests.waiting import await_true

SEED = int(os.environ.get("KILONOVA_E2E_SEED", "1"))
CLIENTS, STRIKES, EVERY = 6, 15, 1.0      # seconds
VICTIMS = ("api", "conductor", "scheduler", "agent", "agent-2")
STOP, START = ("SHUTOFF", {"os-stop": None}), ("ACTIVE", {"os-start": None})


class Client:
    """Lives of servers, one after the other, until it is told to stop."""

    def __init__(self, cloud: Live, over: threading.Event) -> None:
        self.rest, self._over = cloud.rest(), over
        self._image, self._flavor = cloud.image("empty"), cloud.flavor()
        self.made: list[str] = []

    def live(self) -> None:
        while not self._over.is_set():
            server = self.rest.create(image=self._image, flavor=self._flavor, name=f"storm-{uuid.uuid4().hex[:8]}")
            self.made.append(server)
            self.rest.await_status(server, "ACTIVE")
            for wanted, action in (STOP, START):
                self._reach(server, wanted, action)
            self.rest.insist("DELETE", f"/servers/{server}", fine=(204, 404))
            self.rest.await_gone(server)

    def _reach(self, server: str, wanted: str, action: dict[str, None]) -> None:
        def reached() -> bool:
            found = self.rest.server(server)
            assert found["status"] != "ERROR", found
            if found["OS-EXT-STS:task_state"] is None and found["status"] != wanted:
                try:
                    reply = self.rest.call("POST", f"/servers/{server}/action", action)
                except CUT_OFF:
                    return False
                assert reply.status in (202, 409, 503), reply
                return False
            return bool(found["status"] == wanted and found["OS-EXT-STS:task_state"] is None)
        await_true(reached, SETTLE, lambda: self.rest.server(server))


def strike(cloud: Live, dice: random.Random) -> list[str]:
    """Kill one process a second; in the middle wipe the broker. Returns what was struck."""
    struck = []
    for number in range(STRIKES):
        began = time.monotonic()
        if number == STRIKES // 2:
            struck.append("broker")
            for command in ("stop_app", "reset", "start_app"):
                cloud.cloud.broker.control(command)
        victim = dice.choice(VICTIMS)
        await_true(partial(cloud.cloud.pid, victim), 30, partial("{} does not run".format, victim))
        struck.append(victim)
        cloud.cloud.kill(victim)
        pause = EVERY * dice.uniform(0.5, 1.5) - (time.monotonic() - began)
        threading.Event().wait(max(0.0, pause))
    return struck


def test_nothing_is_lost_doubled_or_stuck(in_memory: Live, capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()
    clients = [Client(in_memory, over) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        lives = [pool.submit(client.live) for client in clients]
        try:
            struck = strike(in_memory, random.Random(SEED))
        finally:
            over.set()
        for life in lives:
            life.result(timeout=2 * SETTLE)
    made = [server for client in clients for server in client.made]
    with capsys.disabled():
        print(f"\n{len(made)} servers lived through storm {SEED}: {', '.join(struck)}")
    assert len(made) >= CLIENTS
    await_true(lambda: not any(in_memory.remains(server) for server in made), SETTLE,
               lambda: [in_memory.remains(server) for server in made])
    everybody: Rest = in_memory.rest("kilonova-admin")
    assert [server["name"] for server in everybody.call("GET", "/servers?all_tenants=1").body["servers"]
            if server["name"].startswith("storm-")] == []
    in_memory.judge()
