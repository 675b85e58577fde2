# SPDX-License-Identifier: Apache-2.0
"""A storm of random faults in processes, broker, database and hosts while clients work.

``rage`` measures the time from each fault until a server can be created again. Clients poll, and
repeat requests without effect. Used by test_storm.py.
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
from typing import Protocol, TypeVar
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
#: Time limit of each operation during a storm, in seconds. A fault may last 45 seconds.
PATIENCE = 300
#: MariaDB's error number for a KILL of a connection that does not exist.
NO_SUCH_THREAD = 1094
PROCESSES = ("api", "conductor", "scheduler", "agent", "agent-2")
#: One process of each kind in this cloud. Metadata and console service start in the same way.
SERVICES = ("api", "conductor", "scheduler", "agent", "placement", "image-gateway")


class Worker(Protocol):
    """A client that works until its event is set."""

    def work(self) -> None: ...


W = TypeVar("W", bound=Worker)


@dataclass
class Client:
    """Creates, stops, starts and deletes one server after the other until ``over`` is set.

    ``created`` has the times of each server's request and ACTIVE status, by the monotonic clock.
    The second time is infinite until the server is ACTIVE.
    """

    live: Live
    over: threading.Event
    created: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The SDK does not repeat requests, so its requests end before the storm begins.
        self._image, self._flavor = self.live.image("empty"), self.live.flavor()

    def work(self) -> None:
        rest = self.live.rest()
        while not self.over.is_set():
            requested_at = time.monotonic()
            server = rest.create(
                image=self._image,
                flavor=self._flavor,
                name=f"storm-{uuid.uuid4().hex[:8]}",
                seconds=PATIENCE,
            )
            self.created[server] = requested_at, math.inf
            rest.await_status(server, "ACTIVE", PATIENCE)
            self.created[server] = requested_at, time.monotonic()
            for status, action in (STOP, START):
                await_true(
                    partial(_has_status, rest, server, status, action),
                    PATIENCE,
                    partial(rest.server, server),
                    late=LATE,
                )
            rest.insist("DELETE", f"/servers/{server}", expected=(204, 404), seconds=PATIENCE)
            rest.await_gone(server, PATIENCE)


def _has_status(rest: Rest, server: str, status: str, action: dict[str, None]) -> bool:
    """Return True if the server has this status and no task. Without a task, repeat the action."""
    shown = rest.server(server)
    assert shown["status"] != "ERROR", shown
    if shown["OS-EXT-STS:task_state"] is None and shown["status"] != status:
        try:
            reply = rest.call("POST", f"/servers/{server}/action", action)
        except CUT_OFF:
            return False
        assert reply.status in (202, 409, 503), reply
        return False
    return bool(shown["status"] == status and shown["OS-EXT-STS:task_state"] is None)


@contextmanager
def clients(
    live: Live, count: int, make: Callable[[Live, threading.Event], W]
) -> Iterator[list[W]]:
    """Run clients during the block. Afterwards wait for their last servers and raise failures.

    Args:
        live: The cloud.
        count: The number of clients.
        make: Returns a client of the cloud that ends its work when the event is set.
    """
    over = threading.Event()
    workers = [make(live, over) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        futures: list[Future[None]] = [pool.submit(client.work) for client in workers]
        try:
            yield workers
        finally:
            over.set()
        for future in futures:
            future.result(timeout=2 * PATIENCE)


@dataclass
class Storm:
    """The faults of a cloud.

    Attributes:
        live: The cloud.
        dice: Source of random numbers.
        servers: Database servers of the test, if the cloud uses one.
        database: The kind of the cloud's database server, or "" for a file.
    """

    live: Live
    dice: random.Random
    servers: Servers | None = None
    database: str = ""

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return functions that cause a fault, by name.

        A function also repairs the damage that no supervisor repairs.
        """
        faults: dict[str, Callable[[], None]] = {
            f"{name} killed": partial(self.kill, name) for name in PROCESSES
        }
        faults |= {
            "conductor frozen": lambda: self.freeze("conductor", 5, 15),
            "host frozen": lambda: self.freeze(self.dice.choice(("agent", "agent-2")), 20, 45),
            "broker wiped": self.wipe,
            "broker frozen": lambda: self.freeze("rabbitmq", 3, 15),
        }
        if self.database:
            faults |= {
                "database killed": self.kill_database,
                "database frozen": self.freeze_database,
                "database's connections cut": self.cut,
            }
        return faults

    def kill(self, name: str) -> None:
        """Kill a process with signal 9. The supervisor starts another process."""
        await_true(lambda: find_process(self.live.cloud, name), 30, f"{name} does not run")
        process_control.kill(self.live.cloud, name)

    def measure_restart(self, name: str) -> float:
        """Kill a process with signal 9, and return the seconds until its successor is ready."""
        before = await_true(lambda: find_process(self.live.cloud, name), 30, f"{name} does not run")
        log_size = self.live.cloud.log(name).stat().st_size
        began = time.monotonic()
        process_control.kill(self.live.cloud, name)
        await_true(
            lambda: (
                find_process(self.live.cloud, name) not in (None, before)
                and self._is_ready(name, log_size)
            ),
            60,
            lambda: f"{name} is not ready again; see {self.live.cloud.log(name)}",
        )
        return time.monotonic() - began

    def _is_ready(self, name: str, log_size: int) -> bool:
        """Return True if /healthcheck/ready answers 200, or a process without HTTP logged "ready".

        The first ``log_size`` bytes of the log are ignored.
        """
        cloud = self.live.cloud
        urls = {
            "api": cloud.api_url,
            "placement": cloud.placement_url,
            "image-gateway": cloud.image_gateway_url,
        }
        if name not in urls:
            with cloud.log(name).open("rb") as log:
                log.seek(log_size)
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
        except requests.RequestException:
            # The process does not listen yet, or has no worker yet.
            return False

    def wipe(self) -> None:
        """Delete all data of the broker."""
        for command in ("stop_app", "reset", "start_app"):
            Broker.of(self.live.cloud).control(command)

    def freeze(self, name: str, least: float, most: float) -> None:
        """Stop a process and its children for a random time between two limits in seconds."""
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
        """Kill the database with signal 9 and start it again."""
        assert self.servers is not None
        self.servers.kill(self.database)
        self._wait(0, 5)
        self.servers.restart(self.database)

    def cut(self) -> None:
        """End all connections of the cloud to the database."""
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
            own_id = connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
            for number, command in connection.exec_driver_sql(
                "SELECT id, command FROM information_schema.processlist"
            ):
                if number != own_id and command != "Daemon":
                    _kill(connection, int(number))

    def _wait(self, least: float, most: float) -> None:
        # The duration is part of the fault.
        time.sleep(self.dice.uniform(least, most))


def _kill(connection: sa.Connection, number: int) -> None:
    """End a connection to MariaDB. A connection that does not exist any more is ignored."""
    try:
        connection.exec_driver_sql(f"KILL SOFT CONNECTION {number}")
    except sa.exc.OperationalError as problem:
        if problem.orig is None or problem.orig.args[0] != NO_SUCH_THREAD:
            raise


def find_recovery(workers: Sequence[Client], moment: float) -> float | None:
    """Return the time of the first ACTIVE server that was requested after a moment, or None."""
    times = [
        ended
        for client in workers
        for requested, ended in list(client.created.values())
        if requested > moment and ended < math.inf
    ]
    return min(times, default=None)


def rage(storm: Storm, workers: Sequence[Client], seconds: float) -> dict[str, list[float]]:
    """Cause random faults, one after the other, for so many seconds.

    Returns:
        For each fault, the seconds from each strike until a server could be created.
    """
    took: dict[str, list[float]] = {}
    faults, until = storm.faults(), time.monotonic() + seconds
    pending: list[str] = []
    while time.monotonic() < until:
        # Each fault occurs once before any fault occurs again.
        pending = pending or storm.dice.sample(sorted(faults), len(faults))
        name, began = pending.pop(), time.monotonic()
        faults[name]()
        recovered = await_true(
            partial(find_recovery, workers, began),
            PATIENCE,
            f"a server can be created after: {name}",
        )
        took.setdefault(name, []).append((recovered or math.inf) - began)
        # Random pauses let the faults meet different moments.
        time.sleep(storm.dice.uniform(0, 3))
    return took


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children and of all their descendants."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in path.read_text().split()] if path.exists() else []
    return [process for child in own for process in (child, *descendants(child))]


@contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes for the block with SIGSTOP."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
