# SPDX-License-Identifier: Apache-2.0
"""Who sends goes on sending when the broker has closed a channel of its connection."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from kombu.connection import Connection

from common.domain import errors
from common.rpc.transport import CONTROL_EXCHANGE, Transport
from common.service import config
from deploy.testing.servers import Servers
from tests.e2e.storm import descendants, frozen
from tests.waiting import await_true

FROZEN = 13.0  # seconds: so long that the connections of a broker that was wiped end half made


@pytest.fixture
def transports(rabbitmq_url: str) -> Iterator[tuple[Transport, Transport]]:
    """Of a process that serves, and of one that calls."""
    made = Transport(config.load(), rabbitmq_url), Transport(config.load(), rabbitmq_url)
    yield made
    for transport in made:
        transport.close()


def answers(client: Transport, topic: str) -> Any:
    try:
        return client.call(topic, "echo", timeout=1, said="x")
    except errors.NoAnswer:
        return None


@contextmanager
def calling(client: Transport, topic: str) -> Iterator[None]:
    """A thread calls again and again for the block."""
    over = Event()
    caller = Thread(
        target=lambda: [answers(client, topic) for _ in iter(lambda: over.wait(0.1), True)]
    )
    caller.start()
    try:
        yield
    finally:
        over.set()
        caller.join(30)


def test_calls_arrive_again_after_the_broker_forgot_the_exchange(
    transports: tuple[Transport, Transport], rabbitmq_url: str
) -> None:
    """What is sent to an exchange that is not there closes its channel, and the connection
    stays."""
    server, client = transports
    first, second = (f"t-{uuid.uuid4().hex}" for _ in range(2))
    server.serve(first, "a", {"echo": lambda said: said})
    assert answers(client, first) == "x"
    with Connection(rabbitmq_url.replace("rabbit://", "amqp://")) as broker:
        broker.default_channel.exchange_delete(CONTROL_EXCHANGE)
    for _ in range(3):
        answers(client, first)
    server.serve(second, "a", {"echo": lambda said: said})
    await_true(lambda: answers(client, second) == "x", 20, "calls arrive again")
    assert client.cast(second, "echo", said="y")


@pytest.mark.slice("operations")
def test_calls_arrive_again_after_the_broker_was_wiped_and_stood_still() -> None:
    """What is left of the connections then has a dead channel, which the library alone keeps for
    ever."""
    with tempfile.TemporaryDirectory(prefix="kn-rpc-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            url = servers.start("rabbitmq")
            server, client = Transport(config.load(), url), Transport(config.load(), url)
            server.serve("there", "a", {"echo": lambda said: said})
            await_true(lambda: answers(client, "there") == "x", 20, "calls arrive")
            with calling(client, "there"):
                for command in ("stop_app", "reset", "start_app"):
                    servers.broker.control(command)
            await_true(lambda: answers(client, "there") == "x", 30, "calls arrive after the wipe")
            pid = servers.pid("rabbitmq")
            with calling(client, "there"), frozen([pid, *descendants(pid)]):
                time.sleep(FROZEN)  # nobody can tell how long a broker stands still
            await_true(
                lambda: answers(client, "there") == "x", 30, "calls arrive after it stood still"
            )
            for transport in (client, server):
                transport.close()
