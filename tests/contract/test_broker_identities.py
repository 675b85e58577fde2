# SPDX-License-Identifier: Apache-2.0
"""What a host may at a real RabbitMQ: its own queue, and to speak in its own name; all else is refused there."""
from __future__ import annotations

import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import AccessRefused, AMQPError
from kombu.connection import Connection

from common import broker_identities, errors
from common.broker_identities import exchange, host_queue
from common.models import Heartbeat, HeartbeatAnswer
from common.rpc import agent, conductor
from deploy.broker import SCRIPTS, USER, Broker, definitions
from deploy.cli.broker_users import Management
from deploy.servers import Servers, free_ports
from tests.contract.test_host_link import World
from tests.contract.test_rpc import Told
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")
PREFIX = broker_identities.PREFIX


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """A node that knows two hosts."""
    with tempfile.TemporaryDirectory(prefix="kn-id-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            servers.start("rabbitmq")
            assert servers.broker is not None
            known = replace(servers.broker, hosts=("h1", "h2"))
            known._write("definitions.json", definitions(known))
            (known.folder / "definitions.json").chmod(0o644)
            known.learn_users()
            yield known


@pytest.fixture
def world(broker: Broker) -> Iterator[World]:
    made = World(broker.url)
    made.prefix = PREFIX
    yield made
    made.close()


def test_a_host_does_its_work_with_what_it_may(world: World, broker: Broker) -> None:
    told, here = Told(HeartbeatAnswer(True)), Told({"x": 1})
    control = world.listening(told)
    link = world.serving("h1", here, broker.host_url("h1"))
    assert conductor.Client(link).heartbeat(Heartbeat("h1", 3), 5) == HeartbeatAnswer(True)
    assert agent.Client(control).query("h1", "v", {}) == {"x": 1}
    assert agent.Client(control).do("h1", [], None)
    assert here.wait_for(2)


def consume(queue: str) -> Callable[[Any], Any]:
    return lambda channel: channel.basic_consume(queue, no_ack=True)


def publish(where: str, key: str) -> Callable[[Any], Any]:
    def attempt(channel: Any) -> None:
        channel.basic_publish(channel.prepare_message(b"x", content_encoding="binary"), exchange=where, routing_key=key)
        channel.queue_declare(host_queue(PREFIX, "h1"), passive=True)       # what was refused is said before the answer
    return attempt


#: What a thief of h1 tries.
ATTEMPTS: dict[str, Callable[[Any], Any]] = {
    "read another host's queue": consume(host_queue(PREFIX, "h2")),
    "read what hosts report": consume(f"{PREFIX}-reports"),
    "take the next of another host's messages": lambda channel: channel.basic_get(host_queue(PREFIX, "h2")),
    "make another host's queue": lambda channel: channel.queue_declare(host_queue(PREFIX, "h2"), durable=True),
    "remove another host's queue": lambda channel: channel.queue_delete(host_queue(PREFIX, "h2")),
    "empty another host's queue": lambda channel: channel.queue_purge(host_queue(PREFIX, "h2")),
    "hear what others say": lambda channel: channel.queue_bind(host_queue(PREFIX, "h1"), exchange(PREFIX), "#"),
    "remove the hosts' exchange": lambda channel: channel.exchange_delete(exchange(PREFIX)),
    "make an exchange": lambda channel: channel.exchange_declare("mine", "topic"),
    "make a queue": lambda channel: channel.queue_declare("mine"),
    "make a queue of any name": lambda channel: channel.queue_declare(""),
    "write into another host's queue": publish("", host_queue(PREFIX, "h2")),
    "write into a queue of the control plane": publish("", f"{PREFIX}-reports"),
    "report in another host's name": publish(exchange(PREFIX), "reports.h2"),
    "report in a name that begins like another's": publish(exchange(PREFIX), "reports.h1.h2"),
    "beat in another host's name": publish(exchange(PREFIX), "heartbeats.h2"),
    "ring at the conductors'": publish("kilonova", "kilonova-conductor"),
    "answer in another host's name": publish(exchange(PREFIX), f"answers.{'0' * 32}.h2"),
    "write to RabbitMQ's own exchange": publish("amq.topic", "x")}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_stolen_host_is_refused_all_else(world: World, broker: Broker, attempt: str) -> None:
    world.listening(Told())
    world.serving("h1", Told(), broker.host_url("h1"))
    world.serving("h2", Told(), broker.host_url("h2"))
    with Connection(broker.url.replace("rabbit://", "amqp://")) as admin:
        admin.default_channel.exchange_declare("kilonova", "topic", durable=True, auto_delete=False)
    with Connection(broker.host_url("h1").replace("rabbit://", "amqp://")) as stolen, pytest.raises(AccessRefused):
        ATTEMPTS[attempt](stolen.channel())


def run(broker: Broker, *arguments: str) -> None:
    subprocess.run([str(SCRIPTS / "rabbitmq-plugins"), *arguments], env=broker.environment, check=True, timeout=120,
                   stdin=subprocess.DEVNULL, capture_output=True, user=USER, cwd=broker.folder)


def test_the_management_makes_changes_and_removes_users(broker: Broker) -> None:
    port = free_ports(1)
    broker.control("eval", f"application:set_env(rabbitmq_management, tcp_config, [{{port, {port}}}, "
                           '{ip, "127.0.0.1"}]).')
    run(broker, "enable", "rabbitmq_management")
    broker.control("set_user_tags", "kilonova", "administrator")
    users = Management(f"http://kilonova:{broker.password}@127.0.0.1:{port}")
    identity = broker_identities.of_host("h7", secrets.token_hex(8))

    def connects(password: str) -> bool:
        try:
            with Connection(f"amqp://{identity.user}:{password}@127.0.0.1:{broker.port}//") as connection:
                channel = connection.channel()
                channel.queue_declare(host_queue(PREFIX, "h7"), auto_delete=True)
                with pytest.raises(AccessRefused):
                    channel.basic_get(host_queue(PREFIX, "h1"))
        except AMQPError:
            return False
        return True
    await_true(lambda: users.make(identity, "/") == "", 20)
    assert connects(identity.password) and not connects("another")
    newer = replace(identity, password=secrets.token_hex(8))
    open_still = Connection(f"amqp://{identity.user}:{identity.password}@127.0.0.1:{broker.port}//").connect()
    users.make(newer, "/")
    assert connects(newer.password) and not connects(identity.password)
    time.sleep(6)      # the management sees a connection at its next count, every five seconds
    users.disconnect(identity.user)
    with pytest.raises((AMQPError, OSError)):
        open_still.drain_events(timeout=10)
    for _ in range(2):
        users.remove(identity.user)
    assert not connects(newer.password)
    with pytest.raises(errors.Unavailable, match="refuses PUT users"):
        Management(f"http://kilonova:wrong@127.0.0.1:{port}").make(identity, "/")
    with pytest.raises(errors.Unavailable, match="does not answer"):
        Management(f"http://kilonova:x@127.0.0.1:{free_ports(1)}").remove("x")
