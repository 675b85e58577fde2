# SPDX-License-Identifier: Apache-2.0
"""Permissions of hosts and of services at a real RabbitMQ.

A host may use only its own queue and send only in its own name. The broker refuses the rest.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import AccessRefused, AMQPError, PreconditionFailed

from common.domain import errors
from common.domain.models import Heartbeat, HeartbeatAnswer
from common.notifications.message import Message
from common.rpc import agent, conductor
from common.rpc.host_queues import QUEUE_ARGUMENTS
from common.rpc.notifier import Notifier
from common.rpc.transport import Transport
from common.security import broker_identities, broker_names
from common.security.broker_names import (
    API,
    CONDUCTOR,
    CONSOLE,
    SCHEDULER,
    answers_queue,
    exchange,
    host_queue,
)
from common.security.host_joins import JoinToken
from common.security.host_keys import Purpose, derive
from common.service import config
from common.store.engine import Store
from common.store.hosts import host_keys
from common.store.upgrades import upgrade
from deploy.one_machine.cloud.broker import MAX_MESSAGE_BYTES, SCRIPTS, USER, Broker, definitions
from deploy.operator.hosts.broker_users import Management
from deploy.operator.main import main
from deploy.testing.servers import Servers, free_ports
from tests.broker_attempts import attempts
from tests.broker_connection import broker_connection
from tests.contract.test_host_link import SECRETS, World
from tests.contract.test_host_secrets import BOTH, NEW, OLD, SWAPPED, make_rig
from tests.contract.test_rpc import CallRecorder
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")
PREFIX = broker_names.PREFIX


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Yield a broker node with users for two hosts."""
    with tempfile.TemporaryDirectory(prefix="kn-id-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Servers(Path(folder)) as servers:
            servers.start("rabbitmq")
            assert servers.broker is not None
            node = replace(servers.broker, hosts=("h1", "h2"))
            definitions_file = node.folder / "definitions.json"
            definitions_file.write_text(definitions(node))
            definitions_file.chmod(0o644)
            node.learn_users()
            yield node


@pytest.fixture
def world(broker: Broker) -> Iterator[World]:
    world = World(broker.url)
    world.prefix = PREFIX
    yield world
    world.close()


def test_broker_lets_host_user_send_heartbeats_and_answer_commands(
    world: World, broker: Broker
) -> None:
    recorder, here = CallRecorder(HeartbeatAnswer(True)), CallRecorder({"x": 1})
    control = world.serve_conductor(recorder)
    link = world.serve_host("h1", here, broker.host_url("h1"))
    assert conductor.ConductorClient(link).heartbeat(Heartbeat("h1", 3), 5) == HeartbeatAnswer(True)
    assert agent.AgentClient(control).query("h1", "v", {}) == {"x": 1}
    assert agent.AgentClient(control).do("h1", [], None)
    assert here.wait_for(2)


def limits_of(broker: Broker, user: str) -> Any:
    text = broker.control("list_user_limits", "--user", user, "--formatter", "json", "--silent")
    return json.loads(json.loads(text)["message"])


def test_host_at_connection_limit_is_refused_and_other_host_connects(broker: Broker) -> None:
    url = broker.host_url("h1").replace("rabbit://", "amqp://")
    with ExitStack() as opened:
        for _ in range(broker_identities.HOST_LIMITS["max-connections"]):
            opened.enter_context(broker_connection(url)).connect()
        with pytest.raises(AMQPError), broker_connection(url) as extra:
            extra.connect()
        with broker_connection(broker.host_url("h2")) as other:
            other.connect()


def test_broker_refuses_message_over_maximum_size(world: World, broker: Broker) -> None:
    world.serve_conductor(CallRecorder())
    with broker_connection(broker.host_url("h1")) as connection:
        channel = connection.channel()
        message = channel.prepare_message(b"x" * (MAX_MESSAGE_BYTES + 1), content_encoding="binary")
        channel.basic_publish(message, exchange(PREFIX), "reports.h1")
        with pytest.raises(PreconditionFailed, match="larger than configured max size"):
            connection.drain_events(timeout=10)


ATTEMPTS = attempts("h1", "h2")


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_broker_refuses_operations_of_stolen_host_credentials(
    world: World, broker: Broker, attempt: str
) -> None:
    world.serve_conductor(CallRecorder())
    world.serve_host("h1", CallRecorder(), broker.host_url("h1"))
    world.serve_host("h2", CallRecorder(), broker.host_url("h2"))
    with broker_connection(broker.url) as admin:
        admin.default_channel.exchange_declare(
            "kilonova", "topic", durable=False, auto_delete=False
        )
    with (
        broker_connection(broker.host_url("h1")) as stolen,
        pytest.raises(AccessRefused),
    ):
        ATTEMPTS[attempt](stolen.channel())


# --- the queue of a host ---
def test_conductor_declares_lost_host_queue_again(world: World, broker: Broker) -> None:
    world.serve_conductor(CallRecorder(), broker.role_url(CONDUCTOR))
    here = CallRecorder({"x": 1})
    world.serve_host("h1", here, broker.host_url("h1"))
    control = agent.AgentClient(world.control())
    with broker_connection(broker.url) as admin:
        for number in (1, 2):
            admin.channel().queue_delete(host_queue(PREFIX, "h1"))
            await_true(lambda: control.do("h1", [], None), 10)
            assert here.wait_for(number)


def test_conductor_replaces_host_queue_declared_with_wrong_arguments(
    world: World, broker: Broker
) -> None:
    queue = host_queue(PREFIX, "h2")
    arguments = {
        "x-dead-letter-exchange": exchange(PREFIX),
        "x-dead-letter-routing-key": "reports.h1",
    }
    world.serve_conductor(CallRecorder(), broker.role_url(CONDUCTOR))
    with broker_connection(broker.url) as admin:
        admin.channel().queue_delete(queue)
        admin.channel().queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
        world.serve_host("h2", CallRecorder(), broker.host_url("h2"))

        def is_replaced() -> bool:
            try:
                admin.channel().queue_declare(
                    queue, durable=True, auto_delete=False, arguments=QUEUE_ARGUMENTS
                )
                return True
            except PreconditionFailed:
                return False

        await_true(is_replaced, 10)
        await_true(lambda: agent.AgentClient(world.control()).do("h2", [], None), 10)


def test_conductor_log_names_command_when_user_may_not_declare_queues(
    world: World, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a user with permissions that an operator set by hand."""
    configure = r"^(kilonova-hosts|kilonova-(reports|heartbeats)|kilonova-answers-.*)$"
    broker.control("add_user", "narrow", "5ecret")
    broker.control("set_permissions", "-p", "/", "narrow", configure, ".*", ".*")
    with broker_connection(broker.url) as admin:
        admin.channel().queue_delete(host_queue(PREFIX, "h2"))
    world.serve_conductor(CallRecorder(), f"rabbit://narrow:5ecret@127.0.0.1:{broker.port}/")
    assert not world.host("h2", broker.host_url("h2")).wait_until_ready(3)
    assert "run: kilonova broker restore" in caplog.text


# --- holders of a join token ---
def test_join_token_user_may_only_send_requests_to_conductors(world: World, broker: Broker) -> None:
    world.serve_conductor(CallRecorder())
    world.serve_host("h1", CallRecorder(), broker.host_url("h1"))
    joins = broker_identities.of_join("h1", "5ecret")
    broker.control("add_user", joins.user, joins.password)
    broker.control(
        "set_permissions", "-p", "/", joins.user, joins.configure, joins.write, joins.read
    )
    for topic in joins.topics:
        broker.control(
            "set_topic_permissions", "-p", "/", joins.user, topic.exchange, topic.write, topic.read
        )
    url = f"amqp://{joins.user}:{joins.password}@127.0.0.1:{broker.port}//"
    own, there = broker_names.join_queue(PREFIX, "h1"), exchange(PREFIX)
    key = derive(SECRETS[Purpose.COMMAND], "h1", 1, Purpose.JOIN)
    token = JoinToken("h1", 1, key.secret.hex(), url.replace("amqp:", "rabbit:")[:-1])
    link = world.host("h1", token.transport_url, token.keys, Purpose.JOIN)
    assert link.wait_until_ready(10)
    link.close()
    with broker_connection(url) as connection:
        channel = connection.channel()
        channel.basic_get(own)
        channel.basic_publish(channel.prepare_message(b"x"), there, "reports.h1")
        channel.queue_declare(own, passive=True)  # A refusal would arrive before this answer.
    tries: list[Callable[[Any], Any]] = [
        lambda channel: channel.queue_declare(own, durable=True, arguments=QUEUE_ARGUMENTS),
        lambda channel: channel.queue_delete(own),
        lambda channel: channel.basic_get(host_queue(PREFIX, "h1")),
        lambda channel: channel.queue_purge(host_queue(PREFIX, "h1")),
        lambda channel: channel.basic_get(f"{PREFIX}-reports"),
        lambda channel: channel.basic_get(broker_names.join_queue(PREFIX, "h2")),
        lambda channel: channel.queue_declare(broker_names.join_queue(PREFIX, "h2")),
        lambda channel: channel.queue_bind(own, there, "#"),
        lambda channel: channel.exchange_delete(there),
        *(
            partial(_publish, own, where, key)
            for where, key in (
                (there, "reports.h2"),
                (there, "heartbeats.h1"),
                (there, f"answers.{'0' * 32}.h1"),
                ("", host_queue(PREFIX, "h1")),
            )
        ),
    ]
    for attempt in tries:
        with broker_connection(url) as connection, pytest.raises(AccessRefused):
            attempt(connection.channel())


def _publish(own: str, target: str, key: str, channel: Any) -> None:
    channel.basic_publish(channel.prepare_message(b"x"), target, key)
    channel.queue_declare(own, passive=True)  # A refusal arrives before this answer.


# --- roles of the control plane ---
@pytest.fixture(scope="module")
def roles(broker: Broker) -> Iterator[dict[str, Any]]:
    """Messages between services and hosts, each sender with a separate broker user."""
    world = World(broker.url)
    world.prefix = PREFIX
    recorder, here, conf = CallRecorder(HeartbeatAnswer(True)), CallRecorder({"x": 1}), world.conf
    conductor_link = world.control(broker.role_url(CONDUCTOR))
    conductor.listen(conductor_link, recorder)
    assert conductor_link.wait_until_ready(5)
    link = world.serve_host("h1", here, broker.host_url("h1"))
    opened = {
        role: Transport(conf, broker.role_url(role), role) for role in (API, CONDUCTOR, SCHEDULER)
    }
    woken = threading.Event()
    opened[CONDUCTOR].serve("kilonova-conductor", "h/1", {"wake": woken.set})
    opened[SCHEDULER].serve("kilonova-scheduler", "h/1", {"select": lambda: "chosen"})
    with broker_connection(broker.url) as admin:
        admin.default_channel.exchange_declare("nova", "topic", auto_delete=False, durable=False)
    yield {"world": world, "link": link, "here": here, "rung": woken, "transports": opened}
    for transport in opened.values():
        transport.close()
    world.close()


def test_broker_lets_service_roles_send_their_messages(
    roles: dict[str, Any], broker: Broker
) -> None:
    world, opened = roles["world"], roles["transports"]
    assert conductor.ConductorClient(roles["link"]).heartbeat(
        Heartbeat("h1", 3), 5
    ) == HeartbeatAnswer(True)
    assert opened[API].cast("kilonova-conductor", "wake") and roles["rung"].wait(5)
    roles["rung"].clear()
    assert opened[CONDUCTOR].cast("kilonova-conductor", "wake", server="h/1") and roles[
        "rung"
    ].wait(5)
    assert opened[CONDUCTOR].call("kilonova-scheduler", "select") == "chosen"
    for role in (API, CONSOLE, CONDUCTOR):
        world.role = role
        assert agent.AgentClient(world.control(broker.role_url(role))).query("h1", "v", {}) == {
            "x": 1
        }
    notifier = Notifier(world.conf, broker.role_url(CONDUCTOR))
    notifier.send(Message(False, "compute:h1", "compute.instance.create.end", {}))
    notifier.close()


def try_bind(where: str, key: str) -> Callable[[Any, str], Any]:
    """Return an attempt to bind the role's own queue."""

    def attempt(channel: Any, role: str) -> None:
        own = (
            f"kilonova-{SCHEDULER}.mine"
            if role == SCHEDULER
            else answers_queue(PREFIX, role, "a" * 32)
        )
        channel.queue_declare(own, auto_delete=True)
        channel.queue_bind(own, where, key)

    return attempt


def try_publish(where: str, key: str) -> Callable[[Any, str], Any]:
    def attempt(channel: Any, role: str) -> None:
        channel.basic_publish(
            channel.prepare_message(b"x", content_encoding="binary"),
            exchange=where,
            routing_key=key,
        )
        # A refusal arrives before this answer.
        channel.exchange_declare(where, "topic", passive=True)

    return attempt


def try_consume(queue: str) -> Callable[[Any, str], Any]:
    return lambda channel, role: channel.basic_consume(queue, no_ack=True)


STOLEN_ROLES = (API, CONSOLE, SCHEDULER)
OTHERS = (f"{PREFIX}-answers-conductor.{'0' * 32}", f"reply_{PREFIX}-conductor_{'0' * 32}")
#: Attempt -> the roles that make it with stolen credentials, and the operation.
ROLE_ATTEMPTS: dict[str, tuple[tuple[str, ...], Callable[[Any, str], Any]]] = {
    "read a host's queue": (STOLEN_ROLES, try_consume(host_queue(PREFIX, "h1"))),
    "read reports of hosts": (STOLEN_ROLES, try_consume(f"{PREFIX}-reports")),
    "read wakeups of conductors": (STOLEN_ROLES, try_consume("kilonova-conductor")),
    "take wakeup of one conductor": (
        STOLEN_ROLES,
        lambda channel, role: channel.basic_get("kilonova-conductor.h/1"),
    ),
    "empty the conductors' queue": (
        STOLEN_ROLES,
        lambda channel, role: channel.queue_purge("kilonova-conductor"),
    ),
    "remove a host's queue": (
        STOLEN_ROLES,
        lambda channel, role: channel.queue_delete(host_queue(PREFIX, "h1")),
    ),
    "remove the hosts' exchange": (
        STOLEN_ROLES,
        lambda channel, role: channel.exchange_delete(exchange(PREFIX)),
    ),
    "report in a host's name": (STOLEN_ROLES, try_publish(exchange(PREFIX), "reports.h1")),
    "answer in a host's name": (
        STOLEN_ROLES,
        try_publish(exchange(PREFIX), f"answers.{'0' * 32}.h1"),
    ),
    "read a conductor's answers": (STOLEN_ROLES, try_consume(OTHERS[0])),
    "read a conductor's replies": (STOLEN_ROLES, try_consume(OTHERS[1])),
    "make a queue of any name": (STOLEN_ROLES, lambda channel, role: channel.queue_declare("")),
    "bind wakeups of conductors": (STOLEN_ROLES, try_bind("kilonova", "kilonova-conductor")),
    "bind reports of hosts": (STOLEN_ROLES, try_bind(exchange(PREFIX), "reports.#")),
    "bind all answers": (STOLEN_ROLES, try_bind(exchange(PREFIX), "answers.#")),
    "read requests to schedulers": ((API, CONSOLE), try_consume("kilonova-scheduler")),
    "send requests to schedulers": (STOLEN_ROLES, try_publish("kilonova", "kilonova-scheduler")),
    "wake conductors": ((CONSOLE, SCHEDULER), try_publish("kilonova", "kilonova-conductor")),
    "send notifications": (STOLEN_ROLES, try_publish("nova", "notifications.info")),
}


@pytest.mark.parametrize("attempt", ROLE_ATTEMPTS)
def test_broker_refuses_operations_of_stolen_service_role(
    roles, broker: Broker, attempt: str
) -> None:
    thieves, tries = ROLE_ATTEMPTS[attempt]
    with broker_connection(broker.url) as admin:
        for name in OTHERS:
            admin.default_channel.queue_declare(name, auto_delete=True)
        for role in thieves:
            url = broker.role_url(role).replace("rabbit://", "amqp://")
            with broker_connection(url) as stolen, pytest.raises(AccessRefused):
                tries(stolen.channel(), role)


def run(broker: Broker, *arguments: str) -> None:
    subprocess.run(
        [str(SCRIPTS / "rabbitmq-plugins"), *arguments],
        env=broker.environment,
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        user=USER,
        cwd=broker.folder,
    )


def test_restored_user_of_host_connects_with_its_old_password(
    broker: Broker, tmp_path: Path
) -> None:
    store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(store)
    store.write(lambda tx: host_keys.ensure(tx, "h8"))
    conf, path = tmp_path / "k.conf", tmp_path / "restored.json"
    conf.write_text(
        f"[DEFAULT]\ntransport_url = {broker.url}\n[database]\nurl = sqlite:///{tmp_path}/k.db\n"
        f"[host_keys]\ncommand_secret = {'c' * 32}\n"
    )
    keys = host_keys.of_all(store, config.load(str(conf)))
    password = keys.broker_password("h8", keys.newest("h8", Purpose.COMMAND).generation)
    url = f"amqp://{broker_names.user_of('h8')}:{password}@127.0.0.1:{broker.port}//"
    with pytest.raises(AMQPError), broker_connection(url) as connection:
        connection.connect()
    assert main(["--config", str(conf), "broker", "restore", "--file", str(path)]) == 0
    with path.open() as definitions_file:
        broker.control("import_definitions", stdin=definitions_file)
    with broker_connection(url) as connection, pytest.raises(AccessRefused):
        connection.channel().basic_get(host_queue(PREFIX, "h1"))
    assert limits_of(broker, broker_names.user_of("h8")) == broker_identities.HOST_LIMITS


def test_broker_management_creates_changes_and_removes_users(broker: Broker) -> None:
    port = free_ports(1)
    broker.control(
        "eval",
        f"application:set_env(rabbitmq_management, tcp_config, [{{port, {port}}}, "
        '{ip, "127.0.0.1"}]).',
    )
    run(broker, "enable", "rabbitmq_management")
    broker.control("set_user_tags", "kilonova", "administrator")
    users = Management(f"http://kilonova:{broker.password}@127.0.0.1:{port}")
    identity = broker_identities.of_host("h7", secrets.token_hex(8))

    def connects(password: str) -> bool:
        try:
            with broker_connection(
                f"amqp://{identity.user}:{password}@127.0.0.1:{broker.port}//"
            ) as connection:
                channel = connection.channel()
                with pytest.raises(AccessRefused):
                    channel.basic_get(host_queue(PREFIX, "h1"))
        except AMQPError:
            return False
        return True

    await_true(lambda: users.make(identity, "/") == "", 20)
    assert users.users_without_rights([identity], "/") == []
    older = replace(identity, write="^nothing$")
    assert users.users_without_rights([older, identity], "/") == [identity.user]
    users.remove(identity.user)
    assert users.users_without_rights([identity], "/") == [identity.user]
    assert not connects(identity.password)
    users.load(broker_identities.definitions([identity]))
    assert connects(identity.password) and not connects("another")
    assert limits_of(broker, identity.user) == broker_identities.HOST_LIMITS
    newer = replace(identity, password=secrets.token_hex(8))
    open_connection = broker_connection(
        f"amqp://{identity.user}:{identity.password}@127.0.0.1:{broker.port}//"
    ).connect()
    users.make(newer, "/")
    assert connects(newer.password) and not connects(identity.password)
    time.sleep(6)  # The management plugin lists a connection after the next count, every 5 s.
    users.disconnect(identity.user)
    with pytest.raises((AMQPError, OSError)):
        open_connection.drain_events(timeout=10)
    for _ in range(2):
        users.remove(identity.user)
    assert not connects(newer.password)
    with pytest.raises(errors.Unavailable, match="refuses PUT users"):
        Management(f"http://kilonova:wrong@127.0.0.1:{port}").make(identity, "/")
    with pytest.raises(errors.Unavailable, match="does not answer"):
        Management(f"http://kilonova:x@127.0.0.1:{free_ports(1)}").remove("x")


def test_agent_logs_in_with_either_password_while_secret_is_changed(
    broker: Broker, tmp_path: Path
) -> None:
    """The broker has the old password, and after ``kilonova broker restore`` the new one."""
    world = World(broker.url)
    world.prefix = PREFIX
    before, after = (world.keys(step).broker_password("h1", 1) for step in (OLD, NEW))
    url = broker.host_url("h1").replace(broker._derive_password("h1"), before)

    def set_password(password: str) -> None:
        users = [broker_identities.of_host("h1", password)]
        (path := tmp_path / "users.json").write_text(
            json.dumps(broker_identities.definitions(users))
        )
        with path.open() as definitions_file:
            broker.control("import_definitions", stdin=definitions_file)

    set_password(before)
    rig = make_rig(world, tmp_path, url)
    for step in (OLD, BOTH, SWAPPED):
        rig.configure(step)
        rig.send_heartbeat()
    assert rig.keys.own.other_passwords == (before,) and after in rig.keys.own.transport_url
    set_password(after)
    rig.link.change_broker(rig.file.connect(rig.keys.own))
    rig.configure(NEW)
    rig.send_heartbeat()
    assert rig.is_current() and rig.keys.own.other_passwords == ()
    world.close()
