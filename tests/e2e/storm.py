# SPDX-License-Identifier: Apache-2.0
"""A storm: clients that go on with work while processes, the broker, the database and hosts are
struck, one after the other and drawn at random; how long it took each time until a server could be
created again.

Used by test_storm.py. The clients are patient: they look, and ask again for what has not happened.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import requests
import sqlalchemy as sa

from deploy.one_machine.cloud import certificates, process_control
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.process_control import find_process
from deploy.testing.servers import Servers
from tests.e2e.live import CUT_OFF, LATE, Live, Rest
from tests.waiting import await_true

STOP, START = ("SHUTOFF", {"os-stop": None}), ("ACTIVE", {"os-start": None})
#: Seconds that anything may take during a storm: a fault takes up to 45 of them.
PATIENCE = 300
#: MariaDB's number of the error: the connection that is to be ended is not there.
NO_SUCH_THREAD = 1094
PROCESSES = ("api", "conductor", "scheduler", "agent", "agent-2")
#: One of each kind that this cloud has; metadata and console service start as these do.
SERVICES = ("api", "conductor", "scheduler", "agent", "placement", "image-gateway")


@dataclass
class Client:
    """Lives of servers, one after the other, until it is told to stop. ``made``: when each was
    asked for and was there, by the monotonic clock."""

    live: Live
    over: threading.Event
    made: dict[str, tuple[float, float]] = field(default_factory=dict)

    def work(self) -> None:
        rest, image, flavor = self.live.rest(), self.live.image("empty"), self.live.flavor()
        while not self.over.is_set():
            asked_at = time.monotonic()
            server = rest.create(
                image=image, flavor=flavor, name=f"storm-{uuid.uuid4().hex[:8]}", seconds=PATIENCE
            )
            self.made[server] = asked_at, math.inf
            rest.await_status(server, "ACTIVE", PATIENCE)
            self.made[server] = asked_at, time.monotonic()
            for wanted, action in (STOP, START):
                await_true(
                    partial(_is_so, rest, server, wanted, action),
                    PATIENCE,
                    partial(rest.server, server),
                    late=LATE,
                )
            rest.insist("DELETE", f"/servers/{server}", expected=(204, 404), seconds=PATIENCE)
            rest.await_gone(server, PATIENCE)


def _is_so(rest: Rest, server: str, wanted: str, action: dict[str, None]) -> bool:
    """Is the server in this state? Where nobody is at it, ask again."""
    found = rest.server(server)
    assert found["status"] != "ERROR", found
    if found["OS-EXT-STS:task_state"] is None and found["status"] != wanted:
        try:
            reply = rest.call("POST", f"/servers/{server}/action", action)
        except CUT_OFF:
            return False
        assert reply.status in (202, 409, 503), reply
        return False
    return bool(found["status"] == wanted and found["OS-EXT-STS:task_state"] is None)


@contextmanager
def clients(live: Live, count: int) -> Iterator[list[Client]]:
    """At work; at the end each finishes the life in hand, and what failed is raised."""
    over = threading.Event()
    found = [Client(live, over) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        lives: list[Future[None]] = [pool.submit(one.work) for one in found]
        try:
            yield found
        finally:
            over.set()
        for one in lives:
            one.result(timeout=2 * PATIENCE)


@dataclass
class Storm:
    """What can be struck. ``database``: which of ``servers`` the cloud's is; empty: a file."""

    live: Live
    dice: random.Random
    servers: Servers | None = None
    database: str = ""

    def faults(self) -> dict[str, Callable[[], None]]:
        """By name: each strikes, and puts right again what nobody else would."""
        found: dict[str, Callable[[], None]] = {
            f"{name} killed": partial(self.kill, name) for name in PROCESSES
        }
        found |= {
            "conductor frozen": lambda: self.freeze("conductor", 5, 15),
            "host frozen": lambda: self.freeze(self.dice.choice(("agent", "agent-2")), 20, 45),
            "broker wiped": self.wipe,
            "broker frozen": lambda: self.freeze("rabbitmq", 3, 15),
        }
        if self.database:
            found |= {
                "database killed": self.kill_database,
                "database frozen": self.freeze_database,
                "database's connections cut": self.cut,
            }
        return found

    def kill(self, name: str) -> None:
        """kill -9; the supervisor starts another."""
        await_true(lambda: find_process(self.live.cloud, name), 30, f"{name} does not run")
        process_control.kill(self.live.cloud, name)

    def back_after(self, name: str) -> float:
        """kill -9; the seconds until its successor is ready."""
        before = await_true(lambda: find_process(self.live.cloud, name), 30, f"{name} does not run")
        said = self.live.cloud.log(name).stat().st_size
        began = time.monotonic()
        process_control.kill(self.live.cloud, name)
        await_true(
            lambda: (
                find_process(self.live.cloud, name) not in (None, before)
                and self._is_ready(name, said)
            ),
            60,
            lambda: f"{name} is not ready again; see {self.live.cloud.log(name)}",
        )
        return time.monotonic() - began

    def _is_ready(self, name: str, said: int) -> bool:
        """By its /healthcheck/ready, or, where it serves no HTTP, by its log since that had
        ``said`` bytes."""
        cloud = self.live.cloud
        urls = {
            "api": cloud.api_url,
            "placement": cloud.placement_url,
            "image-gateway": cloud.image_gateway_url,
        }
        if name not in urls:
            with cloud.log(name).open("rb") as log:
                log.seek(said)
                return re.search(rb"\bready$", log.read(), re.MULTILINE) is not None
        parts = urlsplit(urls[name])
        url = f"{parts.scheme}://{parts.netloc}/healthcheck/ready"
        verify = (
            certificate.ca
            if (certificate := certificates.of(cloud, certificates.CONTROL))
            else True
        )
        try:
            return requests.get(url, timeout=5, verify=verify).status_code == 200
        except requests.RequestException:  # it does not listen yet, or has no worker yet
            return False

    def wipe(self) -> None:
        """The broker forgets everything."""
        for command in ("stop_app", "reset", "start_app"):
            Broker.of(self.live.cloud).control(command)

    def freeze(self, name: str, least: float, most: float) -> None:
        """A process and its children stand still for a while."""
        pid = await_true(lambda: find_process(self.live.cloud, name), 30, f"{name} does not run")
        assert pid is not None
        with frozen([pid, *descendants(pid)]):
            self._wait(least, most)

    def freeze_database(self) -> None:
        assert self.servers is not None
        pid = self.servers.pid(self.database)
        with frozen([pid, *descendants(pid)]):
            self._wait(3, 20)

    def kill_database(self) -> None:
        """kill -9 in the middle of whatever it does; it recovers by its own log."""
        assert self.servers is not None
        self.servers.kill(self.database)
        self._wait(0, 5)
        self.servers.restart(self.database)

    def cut(self) -> None:
        """The database ends all connections of the cloud."""
        url = self.live.cloud.database_url or ""
        with sa.create_engine(
            url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
        ).connect() as connection:
            if self.database == "postgresql":
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                    "pg_backend_pid() AND backend_type = 'client backend'"
                )
                return
            mine = connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
            for number, command in connection.exec_driver_sql(
                "SELECT id, command FROM information_schema.processlist"
            ):
                if number != mine and command != "Daemon":
                    _kill(connection, int(number))

    def _wait(self, least: float, most: float) -> None:
        time.sleep(self.dice.uniform(least, most))  # how long it lasts is part of the fault


def _kill(connection: sa.Connection, number: int) -> None:
    """End a connection to MariaDB, which may have ended since it was listed."""
    try:
        connection.exec_driver_sql(f"KILL SOFT CONNECTION {number}")
    except sa.exc.OperationalError as problem:
        if problem.orig is None or problem.orig.args[0] != NO_SUCH_THREAD:
            raise


def recovered_at(found: Sequence[Client], moment: float) -> float | None:
    """When the first server that was asked for after this moment was there."""
    there = [
        ended
        for one in found
        for asked, ended in list(one.made.values())
        if asked > moment and ended < math.inf
    ]
    return min(there, default=None)


def rage(storm: Storm, found: Sequence[Client], seconds: float) -> dict[str, list[float]]:
    """Strike again and again; by fault, the seconds from each strike until a server could be
    created."""
    took: dict[str, list[float]] = {}
    faults, until = storm.faults(), time.monotonic() + seconds
    left: list[str] = []
    while time.monotonic() < until:
        # each once before any a second time
        left = left or storm.dice.sample(sorted(faults), len(faults))
        name, began = left.pop(), time.monotonic()
        faults[name]()
        recovered = await_true(
            partial(recovered_at, found, began), PATIENCE, f"a server can be created after: {name}"
        )
        took.setdefault(name, []).append((recovered or math.inf) - began)
        time.sleep(storm.dice.uniform(0, 3))  # a storm has no rhythm
    return took


def descendants(pid: int) -> list[int]:
    """Children, and their children."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in path.read_text().split()] if path.exists() else []
    return [one for child in own for one in (child, *descendants(child))]


@contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """They stand still for the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
