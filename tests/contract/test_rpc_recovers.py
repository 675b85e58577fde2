# SPDX-License-Identifier: Apache-2.0
"""RPC over a real RabbitMQ continues after the broker closed a channel or lost all state."""

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
from kombu.transport.pyamqp import Transport as AmqpTransport

from common.domain import errors
from common.rpc import transport
from common.rpc.transport import CONTROL_EXCHANGE, Transport
from common.service import config
from deploy.testing.servers import Servers
from tests.broker_connection import broker_connection
from tests.e2e.storm import descendants, frozen
from tests.waiting import await_true

FROZEN = 13.0  # seconds, so long that connections to the wiped broker end half open


@pytest.fixture
def transports(rabbitmq_url: str) -> Iterator[tuple[Transport, Transport]]:
    """Yield the transport of a server process and that of a client process."""
    pair = Transport(config.load(), rabbitmq_url), Transport(config.load(), rabbitmq_url)
    yield pair
    for end in pair:
        end.close()


def call_echo(client: Transport, topic: str) -> Any:
    try:
        return client.call(topic, "echo", timeout=1, said="x")
    except errors.NoAnswer:
        return None


@contextmanager
def keep_calling(client: Transport, topic: str) -> Iterator[None]:
    """Call from a thread, repeatedly until the block ends."""
    over = Event()
    caller = Thread(
        target=lambda: [call_echo(client, topic) for _ in iter(lambda: over.wait(0.1), True)]
    )
    caller.start()
    try:
        yield
    finally:
        over.set()
        caller.join(30)


def test_rpc_calls_succeed_again_after_exchange_is_deleted(
    transports: tuple[Transport, Transport], rabbitmq_url: str
) -> None:
    """A message to a missing exchange makes the broker close the channel, not the connection."""
    server, client = transports
    first, second = (f"t-{uuid.uuid4().hex}" for _ in range(2))
    server.serve(first, "a", {"echo": lambda said: said})
    assert call_echo(client, first) == "x"
    with broker_connection(rabbitmq_url) as broker:
        broker.default_channel.exchange_delete(CONTROL_EXCHANGE)
    for _ in range(3):
        call_echo(client, first)
    server.serve(second, "a", {"echo": lambda said: said})
    await_true(lambda: call_echo(client, second) == "x", 20, "calls arrive again")
    assert client.cast(second, "echo", said="y")


def test_rpc_server_serves_again_after_other_connection_took_its_queue(
    transports: tuple[Transport, Transport],
    rabbitmq_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The messaging library alone gives up a queue that it cannot declare again."""
    for name, seconds in (
        ("CHECK_SECONDS", 0.2),
        ("MAX_SILENCE_SECONDS", 1.0),
        ("CALLS_SECONDS", 0.0),
    ):
        monkeypatch.setattr(transport, name, seconds)
    server, client = transports
    topic = f"t-{uuid.uuid4().hex}"
    server.serve(topic, "a", {"echo": lambda said: said})

    def is_taken(broker: Connection) -> bool:
        try:
            with broker.channel() as channel:
                channel.queue_delete(f"{topic}.a")
                channel.queue_declare(f"{topic}.a", exclusive=True)
        except AmqpTransport.channel_errors:
            return False
        return True

    def reach() -> Any:
        try:
            return client.call(topic, "echo", "a", timeout=1, said="x")
        except errors.NoAnswer:
            return None

    assert reach() == "x"
    with broker_connection(rabbitmq_url) as broker:
        await_true(lambda: is_taken(broker))
        # The server opens its connections again in vain.
        time.sleep(2 * transport.MAX_SILENCE_SECONDS)
        assert reach() is None
    await_true(lambda: reach() == "x", 30, "calls arrive again")


@pytest.mark.slice("operations")
def test_rpc_calls_succeed_again_after_broker_is_reset_and_frozen() -> None:
    """The remaining connections then have a dead channel, which the AMQP library never replaces."""
    with tempfile.TemporaryDirectory(prefix="kn-rpc-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            url = servers.start("rabbitmq")
            server, client = Transport(config.load(), url), Transport(config.load(), url)
            server.serve("there", "a", {"echo": lambda said: said})
            await_true(lambda: call_echo(client, "there") == "x", 20, "calls arrive")
            with keep_calling(client, "there"):
                for command in ("stop_app", "reset", "start_app"):
                    servers.broker.control(command)
            await_true(lambda: call_echo(client, "there") == "x", 30, "calls arrive after the wipe")
            pid = servers.pid("rabbitmq")
            with keep_calling(client, "there"), frozen([pid, *descendants(pid)]):
                time.sleep(FROZEN)  # A real broker may freeze for any time.
            await_true(
                lambda: call_echo(client, "there") == "x", 30, "calls arrive after it stood still"
            )
            for end in (client, server):
                end.close()
