# SPDX-License-Identifier: Apache-2.0
"""Messages between hosts and the control plane over a real RabbitMQ.

A message arrives, or the sender learns of the loss in time. A reader and writer of all queues
can neither forge nor replay a message.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.domain import errors
from common.domain.clock import Clock
from common.domain.models import (
    Access,
    DomainState,
    Heartbeat,
    HeartbeatAnswer,
    ImageRef,
    Result,
    Sync,
    SyncAnswer,
)
from common.domain.wire import to_wire
from common.rpc import (
    agent,
    broker,
    broker_client,
    conductor,
    door_watch,
    host_bindings,
    host_bounds,
    host_link,
    host_queues,
)
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide, HostSide
from common.rpc.host_messages import Header, pack
from common.rpc.transport import Transport
from common.security.broker_names import (
    ANSWERS,
    CONDUCTOR,
    HEARTBEATS,
    REPORTS,
    exchange,
    host_queue,
    names_of,
)
from common.security.host_keys import AllKeys, Generations, Keys, OwnKeys, Purpose, derive
from common.service import config
from common.service.log_repeats import Repeats, without_traceback
from deploy.testing.servers import free_ports
from tests.contract.test_rpc import CallRecorder, expect_no_answer, measure_seconds
from tests.faults import Wire
from tests.log_lines import rendered_lines
from tests.verbs import new_command
from tests.waiting import await_true

SECRETS = {Purpose.COMMAND: "conductors'", Purpose.QUERY: "everybody's"}
COMMAND = replace(
    new_command("ensure_guest", step="build", fence=2, session=3),
    args={"guest": {"name": "ü", "deep": [None, 1.5]}},
)


class World:
    """Both ends of the link for one test. ``generations`` stands for the rows of the database."""

    def __init__(self, url: str, conf: Any = None) -> None:
        self.url, self.prefix = url, f"t{uuid.uuid4().hex[:8]}"
        self.generations = {name: Generations(1) for name in ("h1", "h2", "h3")}
        self.role = CONDUCTOR
        self.conf = conf or config.load()
        self.opened: list[Any] = []

    def keys(self, secrets: dict[Purpose, str] = SECRETS) -> AllKeys:
        return AllKeys(secrets, lambda: dict(self.generations), Clock(), good_for=0)

    def control(self, url: str = "", secrets: dict[Purpose, str] = SECRETS) -> ControlSide:
        self.opened.append(
            ControlSide(
                opener(self.conf, url or self.url), self.keys(secrets), self.prefix, self.role
            )
        )
        return self.opened[-1]

    def host(
        self,
        name: str = "h1",
        url: str = "",
        keys: Keys | None = None,
        purpose: Purpose = Purpose.COMMAND,
    ) -> HostSide:
        self.opened.append(
            HostSide(
                opener(self.conf, url or self.url),
                keys or self.keys().for_host(name),
                name,
                self.prefix,
                purpose,
            )
        )
        return self.opened[-1]

    def serve_host(self, name: str, recorder: CallRecorder, url: str = "") -> HostSide:
        """Start a host's listener.

        Without ``url`` the host's queue is declared first, as after an earlier connection, because
        only conductors declare queues of hosts.
        """
        if not url:
            with opener(self.conf, self.url)() as connection:
                host_queues.declare(connection, [host_queue(self.prefix, name)])
        link = self.host(name, url)
        agent.serve(link, recorder)
        assert link.wait_until_ready(30)
        return link

    def serve_conductor(self, recorder: CallRecorder, url: str = "") -> ControlSide:
        """Start a conductor's listener."""
        link = self.control(url)
        conductor.listen(link, recorder)
        assert link.wait_until_ready(30)
        return link

    def write(self, exchange: str, key: str, body: bytes, times: int = 1) -> None:
        """Publish a message with the broker's own password."""
        with opener(self.conf, self.url)() as connection:
            channel = connection.default_channel
            for _ in range(times):
                channel.basic_publish(
                    channel.prepare_message(body, content_encoding="binary"),
                    exchange=exchange,
                    routing_key=key,
                )

    def read(self, queue: str) -> list[bytes]:
        """Take all messages from a queue and return their bodies."""
        with opener(self.conf, self.url)() as connection:
            channel, bodies = connection.default_channel, []
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                bodies.append(
                    message.body if isinstance(message.body, bytes) else message.body.encode()
                )
            return bodies

    def close(self) -> None:
        for link in self.opened:
            link.close()


@pytest.fixture
def world(rabbitmq_url: str) -> Iterator[World]:
    world = World(rabbitmq_url)
    yield world
    world.close()


# --- delivery ---
def test_host_sync_and_answer_arrive_unchanged(world: World) -> None:
    request = Sync(
        "h1",
        3,
        "boot",
        False,
        ["k"],
        [Result("k", "s", 2, "done", {"power_state": 1})],
        None,
        [DomainState("s", 4, 2)],
        cookie="c",
    )
    answer = SyncAnswer(3, ["k"], [COMMAND], {"s": 2}, cookie="d")
    recorder = CallRecorder((answer, Access("http://image", "token")))
    world.serve_conductor(recorder)
    client = conductor.ConductorClient(world.host())
    assert client.sync(request, 5) == (answer, Access("http://image", "token"))
    recorder.answer = (SyncAnswer(0), None)
    assert client.sync(request, 5) == (SyncAnswer(0), None)
    assert recorder.calls == [(request,), (request,)]


def test_host_heartbeat_and_answer_arrive_unchanged(world: World) -> None:
    recorder, beat = CallRecorder(HeartbeatAnswer(True, "c")), Heartbeat("h1", 3, "domains", "b")
    world.serve_conductor(recorder)
    client = conductor.ConductorClient(world.host())
    assert client.heartbeat(beat, 5) == HeartbeatAnswer(True, "c")
    recorder.answer = HeartbeatAnswer(False)
    assert client.heartbeat(beat, 5) == HeartbeatAnswer(False)
    assert set(recorder.calls) == {(beat,)}


def test_agent_do_delivers_commands_only_to_named_host(world: World) -> None:
    here, there = CallRecorder(), CallRecorder()
    world.serve_host("h1", here)
    world.serve_host("h2", there)
    client = agent.AgentClient(world.control())
    assert client.do("h1", [COMMAND, COMMAND], Access("u", "t"))
    assert client.do("h1", [], None)
    assert client.do("h3", [COMMAND], None) is False, "nobody reads for that host"
    assert client.do("h9", [COMMAND], None) is False, "that host has no key"
    assert sorted(here.wait_for(2), key=lambda call: len(call[0])) == [
        ([], None),
        ([COMMAND, COMMAND], Access("u", "t")),
    ]
    assert there.calls == []


def test_agent_cache_images_delivers_images_to_host(world: World) -> None:
    images = [ImageRef("i", "raw", 7, "sha512", "abc", {"os_type": "linux"}), ImageRef("j")]
    here = CallRecorder()
    world.serve_host("h1", here)
    client = agent.AgentClient(world.control())
    assert client.cache_images("h1", images, Access("u", "t"))
    assert client.cache_images("h3", images, Access("u", "t")) is False
    assert here.wait_for(1) == [(images, Access("u", "t"))]


def test_agent_query_returns_answer_and_raises_problem_of_host(world: World) -> None:
    here = CallRecorder({"x": 1})
    world.serve_host("h1", here)
    client = agent.AgentClient(world.control())
    assert client.query("h1", "v", {"a": "ü"}) == {"x": 1}
    assert here.calls == [("v", {"a": "ü"})]

    class Failing(CallRecorder):
        problem: Exception = errors.NotFound("It has none.")

        def query(self, verb: str, arguments: dict[str, Any]) -> Any:
            raise self.problem

    failing = Failing()
    world.serve_host("h2", failing)
    with pytest.raises(errors.NotFound, match="It has none."):
        client.query("h2", "v", {})
    failing.problem = KeyError("/secret/path")
    with pytest.raises(errors.Problem) as caught:
        client.query("h2", "v", {})
    assert (type(caught.value), caught.value.text) == (errors.Problem, errors.Problem().text)


def test_host_report_is_handled_once_when_two_conductors_serve(world: World) -> None:
    both = CallRecorder((SyncAnswer(3), None)), CallRecorder((SyncAnswer(3), None))
    for recorder in both:
        world.serve_conductor(recorder)
    clients = [conductor.ConductorClient(world.host(name)) for name in ("h1", "h2")]
    for number in range(20):
        clients[number % 2].sync(Sync(f"h{number % 2 + 1}", 3, number=number), 5)
    numbers = Counter(request.number for recorder in both for (request,) in recorder.calls)
    assert numbers == Counter(range(20)) and all(recorder.calls for recorder in both)


def test_idle_host_link_closes_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_client, "IDLE", 600.0)
    world.serve_conductor(CallRecorder()).close()
    assert host_link.FROM_HOSTS not in {thread.name for thread in threading.enumerate()}


# --- further names of queues ---
def twice(url: str) -> str:
    """Return the URL of a cluster whose two nodes are the same broker."""
    place = url.removeprefix("rabbit://").removesuffix("/")
    return f"rabbit://{place},{place}/"


def test_conductor_message_reaches_host_reading_further_queue_name(world: World) -> None:
    names = names_of(host_queue(world.prefix, "h1"))
    with opener(world.conf, world.url)() as connection:
        host_queues.declare(connection, names[2:])
    here, recorder = CallRecorder({"x": 1}), CallRecorder((SyncAnswer(3), None))
    link = world.host("h1", twice(world.url))
    agent.serve(link, here)
    assert link.wait_until_ready(30)
    control = world.serve_conductor(recorder, twice(world.url))
    assert agent.AgentClient(control).query("h1", "v", {}) == {"x": 1}
    assert conductor.ConductorClient(link).sync(Sync("h1", 3), 5) == (SyncAnswer(3), None)


def test_api_reaches_host_beside_unread_first_name_of_its_queue(world: World) -> None:
    """The node of the first name has returned, and the host still reads another name."""
    names = names_of(host_queue(world.prefix, "h1"))
    with opener(world.conf, world.url)() as connection:
        host_queues.declare(connection, names[1:])
    here = CallRecorder({"x": 1})
    link = world.host("h1", twice(world.url))
    agent.serve(link, here)
    assert link.wait_until_ready(30)
    with opener(world.conf, world.url)() as connection:
        host_queues.declare(connection, names)
    api = agent.AgentClient(world.control(twice(world.url)))
    assert api.query("h1", "v", {}) == {"x": 1}
    assert here.wait_for(1) == [("v", {})]


def test_conductor_declares_its_deleted_queue_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_watch, "WATCH_SECONDS", 0.2)
    recorder = CallRecorder((SyncAnswer(3), None))
    world.serve_conductor(recorder)
    with opener(world.conf, world.url)() as connection:
        connection.default_channel.queue_delete(f"{world.prefix}-{REPORTS}")
    client = conductor.ConductorClient(world.host())

    def is_answered() -> bool:
        try:
            return client.sync(Sync("h1", 3), 1) == (SyncAnswer(3), None)
        except errors.NoAnswer:
            return False

    await_true(is_answered, 20)


# --- lost messages ---
def test_silent_host_or_conductor_raises_no_answer_within_timeout(world: World) -> None:
    released, client = threading.Event(), agent.AgentClient(world.control())
    assert measure_seconds(expect_no_answer(lambda: client.query("h3", "v", {}, timeout=1))) < 2

    class Slow(CallRecorder):
        def query(self, verb: str, arguments: dict[str, Any]) -> Any:
            released.wait(30)
            return {}

    world.serve_host("h1", Slow())
    assert measure_seconds(expect_no_answer(lambda: client.query("h1", "v", {}, timeout=1))) < 2
    released.set()
    conductor_client = conductor.ConductorClient(world.host("h2"))
    assert measure_seconds(expect_no_answer(lambda: conductor_client.sync(Sync("h2", 3), 1))) < 2
    assert conductor_client.heartbeat(Heartbeat("h2", 3), 0.5) is None


def test_host_link_calls_end_in_time_when_broker_is_unreachable(world: World) -> None:
    nowhere = f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/"
    control, host = world.control(nowhere), world.host("h1", nowhere)
    client = agent.AgentClient(control)
    assert measure_seconds(lambda: client.do("h1", [], None)) < 2
    assert client.do("h1", [], None) is False
    assert measure_seconds(expect_no_answer(lambda: client.query("h1", "v", {}, timeout=1))) < 2.5
    assert (
        measure_seconds(
            expect_no_answer(lambda: conductor.ConductorClient(host).sync(Sync("h1", 3), 1))
        )
        < 2.5
    )
    assert measure_seconds(lambda: (control.close(), host.close())) < 8


def test_metrics_count_lost_messages_and_connections_of_both_transports(world: World) -> None:
    registry = CollectorRegistry()
    for metric in (broker.LOST_MESSAGES, broker.CONNECTIONS):
        metric.begin(registry)
    try:
        for url in (f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/", world.url):
            agent.AgentClient(world.control(url)).do("h1", [], None)
            transport = Transport(world.conf, url)
            transport.cast("no-topic", "wake")
            transport.close()
    finally:
        for metric in (broker.LOST_MESSAGES, broker.CONNECTIONS):
            metric.begin(None)

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"kilonova_{name}_total", labels) or 0

    assert value("lost_messages", to="hosts") == 2
    assert value("lost_messages", to="services") == 2
    assert value("broker_connections", result="failed") >= 2
    assert value("broker_connections", result="opened") >= 2


def test_host_link_log_shows_repeated_connection_failure_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    host = world.host("h1", f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/")
    assert not host.wait_until_ready(3)
    records = [record for record in caplog.records if "is opened again" in record.message]
    assert len(records) > 1
    repeats = Repeats()
    lines = [line for record in records for line in repeats.news(without_traceback(record))]
    assert [line.levelname for line in lines] == ["WARNING"]


def test_busy_host_link_listener_keeps_its_connection(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """RabbitMQ closes a connection after two heartbeats without traffic."""
    broker.address_of(world.conf)  # registers the options
    world.conf.set_override("heartbeat_timeout_threshold", 1, group=broker.RABBIT)
    try:
        recorder = CallRecorder(HeartbeatAnswer(True))
        world.serve_conductor(recorder)
    finally:
        world.conf.clear_override("heartbeat_timeout_threshold", group=broker.RABBIT)
    client = conductor.ConductorClient(world.host())
    until = time.monotonic() + 6
    while time.monotonic() < until:
        assert client.heartbeat(Heartbeat("h1", 3), 5) == HeartbeatAnswer(True)
        time.sleep(0.2)  # Messages arrive more often than an idle listener polls.
    assert "is opened again" not in caplog.text


@pytest.mark.parametrize("cut", ["the host's", "the conductor's"])
def test_host_link_reconnects_after_cut_connection(world: World, cut: str) -> None:
    wire = Wire(world.url)
    through = wire.url.render_as_string(hide_password=False)
    recorder = CallRecorder(HeartbeatAnswer(True))
    world.serve_conductor(recorder, through if cut == "the conductor's" else "")
    client = conductor.ConductorClient(world.host("h1", through if cut == "the host's" else ""))
    beat = Heartbeat("h1", 3)
    await_true(lambda: client.heartbeat(beat, 1))
    wire.cut()
    await_true(lambda: client.heartbeat(beat, 1), 10)
    wire.freeze()
    assert measure_seconds(lambda: client.heartbeat(beat, 1)) < 3
    wire.thaw()
    await_true(lambda: client.heartbeat(beat, 1), 15)
    wire.close()


def test_conductor_answers_newest_report_first_and_drops_stale_reports(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts repeat a request while no answer comes, and ignore all earlier answers."""
    monkeypatch.setattr(host_link, "AT_ONCE", 1)
    monkeypatch.setattr(host_link, "STALE_SECONDS", 1.0)
    released, numbers = threading.Event(), list[int]()

    class Hanging(CallRecorder):
        def sync(self, request: Sync) -> Any:
            numbers.append(request.number)
            released.wait(30)
            return SyncAnswer(3), None

    def number_of(item: Any) -> int:
        _, _, content = item
        return int(content["request"]["number"])

    link = world.serve_conductor(Hanging())
    client = conductor.ConductorClient(world.host())
    for number in range(1, 6):
        expect_no_answer(lambda number=number: client.sync(Sync("h1", 3, number=number), 0.4))()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(client.sync, Sync("h1", 3, number=6), 5)
        await_true(
            lambda: any(number_of(item) == 6 for _, item in list(link._pool.waiting)),
            5,
            "the last request waits for the thread",
        )
        released.set()
        assert last.result()[0].session == 3
    await_true(lambda: not link._pool.waiting, 5, "all others are dropped or answered")
    assert numbers[:2] == [1, 6] and len(numbers) <= 4, numbers


def test_host_with_hanging_queries_still_takes_commands(world: World) -> None:
    released = threading.Event()

    class Hanging(CallRecorder):
        def query(self, verb: str, arguments: dict[str, Any]) -> Any:
            released.wait(30)
            return {}

    here, client = Hanging(), agent.AgentClient(world.control())
    world.serve_host("h1", here)
    query_threads = [threading.Thread(target=client.query, args=("h1", "v", {})) for _ in range(20)]
    for thread in query_threads:
        thread.start()
    assert client.do("h1", [], None)
    assert here.wait_for(1) == [([], None)]
    released.set()
    for thread in query_threads:
        thread.join()


# --- readers and writers at the broker ---
def test_command_secrets_are_not_readable_at_broker(world: World) -> None:
    link = world.serve_host("h1", CallRecorder())
    # The messages of a closed host stay in its queue.
    link.close()
    secret = replace(COMMAND, args={"guest": {"admin_pass": "S3CRET"}})
    assert agent.AgentClient(world.control()).do("h1", [secret], Access("http://image", "T0KEN"))
    bodies = world.read(host_queue(world.prefix, "h1"))
    assert len(bodies) == 1 and b"S3CRET" not in bodies[0] and b"T0KEN" not in bodies[0]
    assert json.loads(bodies[0].partition(b"\n")[0])["host"] == "h1"


def test_host_executes_replayed_command_once_and_refuses_repeats(world: World) -> None:
    here = CallRecorder()
    link = world.serve_host("h1", here)
    _, body = pack(
        derive("conductors'", "h1", 1, Purpose.COMMAND), "do", {"commands": [], "access": None}
    )
    for _ in range(3):
        world.write("", host_queue(world.prefix, "h1"), body)
    await_true(lambda: link.refusals.counted["h1"] == 2)
    assert here.calls == [([], None)]


@pytest.mark.parametrize(
    "forged",
    # The API's key cannot sign a command.
    [
        derive("guessed", "h1", 1, Purpose.COMMAND),  # no key of this cloud
        derive("conductors'", "h2", 1, Purpose.COMMAND),  # another host's command
        derive("conductors'", "h1", 2, Purpose.COMMAND),  # another generation
        derive("everybody's", "h1", 1, Purpose.QUERY),
    ],
    ids=["guessed", "another host's", "another generation", "the API's"],
)
def test_host_refuses_command_with_wrong_key(world: World, forged: Any) -> None:
    here = CallRecorder()
    link = world.serve_host("h1", here)
    world.write(
        "", host_queue(world.prefix, "h1"), pack(forged, "do", {"commands": [], "access": None})[1]
    )
    await_true(lambda: link.refusals.counted["h1"] == 1)
    assert here.calls == []


def test_malformed_messages_do_not_block_host_or_conductor(world: World) -> None:
    here, recorder = CallRecorder({}), CallRecorder((SyncAnswer(3), None))
    link, control = world.serve_host("h1", here), world.serve_conductor(recorder)
    good = pack(
        derive("conductors'", "h1", 1, Purpose.COMMAND), "do", {"commands": [], "access": None}
    )[1]
    head = json.loads(good.partition(b"\n")[0])
    bad = [
        b"",
        b"\n",
        b"{}",
        b"{}\n",
        b"[]\nx",
        good[:-1],
        good.replace(b'"do"', b'"query"', 1),
        b"\xff\xfe\n\x00",
        json.dumps({**head, "purpose": "root"}).encode() + b"\nx",
        json.dumps({**head, "host": 7}).encode() + b"\nx",
        json.dumps({**head, "generation": "1"}).encode() + b"\nx",
        b"[" * 100_000 + b"\n",
    ]
    for body in bad:
        world.write("", host_queue(world.prefix, "h1"), body)
        world.write(exchange(world.prefix), f"{REPORTS}.h1", body)
        world.write(exchange(world.prefix), f"{HEARTBEATS}.h1", body)
    assert agent.AgentClient(control).query("h1", "v", {}) == {}
    assert conductor.ConductorClient(world.host("h2")).sync(Sync("h2", 3), 5) == (
        SyncAnswer(3),
        None,
    )
    assert (link.refusals.counted["h1"], here.calls) == (len(bad), [("v", {})])
    assert recorder.calls == [(Sync("h2", 3),)]


def test_flood_of_one_host_does_not_delay_report_of_other_host(world: World) -> None:
    recorder = CallRecorder((SyncAnswer(3), None))
    control = world.serve_conductor(recorder)
    number, began = host_bounds.FLOOD_MESSAGES, time.monotonic()
    flood(world, f"{REPORTS}.h1", number)
    link = conductor.ConductorClient(world.host("h2"))
    assert link.sync(Sync("h2", 3), 30) == (SyncAnswer(3), None)
    assert await_true(
        lambda: sum(control.refusals.counted.values()) == number,
        60,
        lambda: control.refusals.counted,
    )
    allowed = host_bounds.MESSAGES_A_SECOND * (time.monotonic() - began + 1)
    refused = control.refusals.counted["h1"]
    assert refused >= number - allowed, "refused before their header was read"
    assert control.refusals.take()["h1"] == refused
    assert not control.refusals.take()


def flood(world: World, routing_key: str, number: int) -> None:
    world.write(exchange(world.prefix), routing_key, b"x" * 300, number)


def was_dropped(world: World, routing_key: str) -> bool:
    """Return True if the broker has no queue for a message with this routing key."""
    returned: list[Any] = []
    with opener(world.conf, world.url)(confirm_publish=True) as connection:
        channel = connection.default_channel
        channel.events["basic_return"].add(lambda *why: returned.append(why))
        channel.basic_publish(
            channel.prepare_message(b"x", content_encoding="binary"),
            exchange=exchange(world.prefix),
            routing_key=routing_key,
            mandatory=True,
        )
    return bool(returned)


@pytest.mark.parametrize("door", [REPORTS, HEARTBEATS])
def test_broker_drops_flood_of_host_and_conductor_answers_other_host(
    world: World, door: str
) -> None:
    recorder = CallRecorder((SyncAnswer(3), None))
    world.serve_conductor(recorder)
    flood(world, f"{door}.h1", 4 * host_bounds.FLOOD_MESSAGES)
    await_true(lambda: was_dropped(world, f"{door}.h1"), 30)
    assert was_dropped(world, f"{REPORTS}.h1")
    assert was_dropped(world, f"{HEARTBEATS}.h1")
    link = conductor.ConductorClient(world.host("h2"))
    assert link.sync(Sync("h2", 3), 5) == (SyncAnswer(3), None)


def test_new_conductor_lifts_quarantine_of_host_after_close_of_first(world: World) -> None:
    recorder = CallRecorder((SyncAnswer(3), None))
    first = world.serve_conductor(recorder)
    flood(world, f"{REPORTS}.h1", 4 * host_bounds.FLOOD_MESSAGES)
    await_true(lambda: was_dropped(world, f"{REPORTS}.h1"), 30)
    first.close()
    world.serve_conductor(recorder)
    link = conductor.ConductorClient(world.host("h1"))
    assert link.sync(Sync("h1", 3), 5) == (SyncAnswer(3), None)


def test_queue_of_host_added_during_quarantine_of_other_host_is_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_bindings, "REPEAT_SECONDS", 0.2)
    recorder = CallRecorder((SyncAnswer(3), None))
    world.serve_conductor(recorder)
    flood(world, f"{REPORTS}.h1", 4 * host_bounds.FLOOD_MESSAGES)
    await_true(lambda: was_dropped(world, f"{REPORTS}.h1"), 30)
    world.generations["h4"] = Generations(1)
    await_true(lambda: not was_dropped(world, f"{REPORTS}.h4"), 30)
    assert was_dropped(world, f"{REPORTS}.h1")


def test_query_of_host_flooding_answers_fails_and_others_answer(world: World) -> None:
    world.serve_host("h2", CallRecorder({}))
    control = world.control()
    world.serve_host("h1", CallRecorder({})).close()  # The thief reads the queue.
    api = agent.AgentClient(control)
    expect_no_answer(lambda: api.query("h1", "v", {}, 1))()
    questions = world.read(host_queue(world.prefix, "h1"))
    answer_to = Header.read(questions[-1].partition(b"\n")[0]).answer_to
    flood(world, f"{ANSWERS}.{answer_to}.h1", 4 * host_bounds.FLOOD_MESSAGES)
    await_true(lambda: was_dropped(world, f"{ANSWERS}.{answer_to}.h1"), 30)
    with pytest.raises(errors.NoAnswer, match="is in quarantine"):
        api.query("h1", "v", {}, 5)
    assert api.query("h2", "v", {}) == {}


def test_host_report_with_too_many_guests_is_refused_and_next_is_answered(world: World) -> None:
    recorder = CallRecorder((SyncAnswer(3), None))
    control = world.serve_conductor(recorder)
    link = conductor.ConductorClient(world.host("h1"))
    most = host_bounds.MAX_ITEMS
    domains = [DomainState(f"s{number}", 1, 2) for number in range(most + 1)]
    expect_no_answer(lambda: link.sync(Sync("h1", 3, domains=domains), 1))()
    assert (recorder.calls, control.refusals.counted) == ([], {"h1": 1})
    assert link.sync(Sync("h1", 3, domains=domains[:most]), 5) == (SyncAnswer(3), None)


def test_malformed_command_does_not_block_other_commands(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The malformed command is in a separate message, or in the answer to a report."""
    here, wire_command = CallRecorder({}), to_wire(COMMAND)
    world.serve_host("h1", here)
    secret = {**wire_command, "args": {"secret": "5ecret"}}
    malformed: list[Any] = [
        {name: secret[name] for name in secret.keys() - {missing}} for missing in ("fence", "verb")
    ]
    malformed += [7, [], None]
    control = world.control()
    assert control.cast(
        "h1", "do", Purpose.COMMAND, {"commands": [*malformed, wire_command], "access": None}
    )
    assert here.wait_for(1) == [([COMMAND], None)]
    answer = {**to_wire(SyncAnswer(3, ["k"])), "commands": [*malformed, wire_command]}
    assert conductor.read_answer(answer) == SyncAnswer(3, ["k"], [COMMAND])
    log = "\n".join(rendered_lines(caplog))
    assert log.count("a faulty command is ignored") == 2 * len(malformed) and "5ecret" not in log


def test_conductor_refuses_host_report_under_other_name(world: World) -> None:
    """Neither the report nor the sender's name may name another host than the owner of the key."""
    recorder = CallRecorder((SyncAnswer(3), None))
    control = world.serve_conductor(recorder)
    stolen = conductor.ConductorClient(world.host("h1"))
    assert measure_seconds(expect_no_answer(lambda: stolen.sync(Sync("h2", 3), 1))) < 2
    assert stolen.heartbeat(Heartbeat("h2", 3), 0.5) is None
    own = world.keys().for_host("h1")
    lying = world.host("h2", keys=OwnKeys("h2", 1, own.secrets))
    expect_no_answer(lambda: conductor.ConductorClient(lying).sync(Sync("h2", 3), 1))()
    assert recorder.calls == []
    assert control.refusals.counted == {"h1": 2, "h2": 1}


def test_conductor_refuses_report_with_other_host_in_content(world: World) -> None:
    """The content may contain a host name. The conductor accepts only the key's host."""
    recorder = CallRecorder((SyncAnswer(3), None))
    control = world.serve_conductor(recorder)
    content = {"host": "h2", "request": to_wire(Sync("h2", 3))}
    expect_no_answer(lambda: world.host("h1").ask(REPORTS, "sync", content, 1))()
    assert (recorder.calls, control.refusals.counted) == ([], {"h1": 1})


def test_query_ignores_answer_with_key_of_other_host(world: World) -> None:
    world.serve_host("h2", CallRecorder()).close()
    control = world.control()
    queue = host_queue(world.prefix, "h2")
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(agent.AgentClient(control).query, "h2", "v", {}, timeout=20)
        questions: list[bytes] = []
        await_true(lambda: questions.extend(world.read(queue)) or questions)
        header = Header.read(questions[0].partition(b"\n")[0])
        for host, value in (("h1", "forged"), ("h2", "genuine")):
            key = derive("everybody's", host, 1, Purpose.QUERY)
            answer = pack(key, "answer", {"result": value}, header.id)[1]
            world.write(exchange(world.prefix), f"answers.{header.answer_to}.{host}", answer)
        assert result.result() == "genuine"
    assert control.refusals.counted == {"h1": 1}


def test_conductor_ignores_host_with_revoked_key(world: World) -> None:
    recorder = CallRecorder((SyncAnswer(3), None))
    world.serve_conductor(recorder)
    link = world.host("h1")
    client = conductor.ConductorClient(link)
    assert client.sync(Sync("h1", 3), 5)[0].session == 3
    world.generations["h1"] = Generations(2)
    assert measure_seconds(expect_no_answer(lambda: client.sync(Sync("h1", 3), 1))) < 2
    link.close()
    assert conductor.ConductorClient(world.host("h1")).sync(Sync("h1", 3), 5)[0].session == 3, (
        "with its new key it is"
    )
