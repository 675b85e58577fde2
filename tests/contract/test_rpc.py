# SPDX-License-Identifier: Apache-2.0
"""Messages on a real RabbitMQ: what is lost is known at once or in time, and nobody waits for
ever."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from kombu.connection import Connection

from common.domain import errors
from common.domain.models import (
    Access,
    Command,
    Explanation,
    Heartbeat,
    ImageRef,
    RequestSpec,
    Selection,
    Sync,
)
from common.rpc import conductor, scheduler
from common.rpc.transport import Transport
from common.service import config
from deploy.testing.servers import free_ports
from tests.functional.messages import Network, PrivateTransport

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.Problem)
]
MADE = {
    errors.OverQuota: errors.OverQuota({"cores": (4, 18, 20)}),
    errors.Locked: errors.Locked("s1"),
    errors.WrongState: errors.WrongState("stop", "s1", "vm_state", "stopped"),
}
Connect = Callable[[], Any]


@pytest.fixture
def connect(rabbitmq_url: str) -> Iterator[Connect]:
    """Each call is another process's transport; they share topics that no other test uses."""
    conf, network, opened = config.load(), Network(), []

    def make() -> PrivateTransport:
        opened.append(PrivateTransport(Transport(conf, rabbitmq_url), network))
        return opened[-1]

    yield make
    with ThreadPoolExecutor(8) as pool:  # Each waits up to a second for its own readers.
        list(pool.map(PrivateTransport.close, opened))


def unreachable() -> Transport:
    return Transport(config.load(), f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/")


def seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def no_answer(work: Callable[[], Any]) -> Callable[[], Any]:
    def wanted() -> None:
        with pytest.raises(errors.NoAnswer, match="did not answer"):
            work()

    return wanted


class Told:
    """Serves every interface; keeps what it was told."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.told = answer, []  # type: Any, list[Any]
        self.heard = threading.Condition()

    def _hear(self, *what: Any) -> Any:
        with self.heard:
            self.told.append(what)
            self.heard.notify_all()
        return self.answer

    def wait_for(self, count: int) -> list[Any]:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.told) >= count, timeout=10), self.told
            return list(self.told)

    def wake(self, neighbours: bool = False) -> None:
        self._hear("wake")

    loop_back = wake

    def sync(self, request: Sync) -> Any:
        return self._hear(request)

    def heartbeat(self, beat: Heartbeat) -> Any:
        return self._hear(beat)

    def explain(self, spec: RequestSpec) -> Any:
        return self._hear(spec)

    def select(self, specs: list[RequestSpec], fresh: bool) -> Any:
        return self._hear(specs, fresh)

    def do(self, commands: list[Command], access: Access | None) -> None:
        self._hear(commands, access)

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        self._hear(images, access)

    def query(self, verb: str, arguments: dict[str, Any]) -> Any:
        return self._hear(verb, arguments)


def test_a_cast_to_a_queue_that_nobody_declared_is_known_to_be_lost_at_once(
    connect: Connect,
) -> None:
    transport = connect()
    for server in (None, "h1"):
        assert seconds(lambda server=server: transport.cast("nobody", "wake", server)) < 3
        assert transport.cast("nobody", "wake", server) is False


def test_a_cast_arrives_as_often_as_it_was_sent(connect: Connect) -> None:
    told = Told()
    conductor.serve(connect(), "c1", told)
    sender = connect()
    for _ in range(5):
        assert sender.cast(conductor.TOPIC, "wake")
    assert told.wait_for(5) == [("wake",)] * 5


def test_a_call_that_nobody_serves_is_unanswered_within_its_time(connect: Connect) -> None:
    transport = connect()
    assert seconds(no_answer(lambda: transport.call("nobody", "sync", timeout=2))) < 3


def test_a_call_to_a_server_that_is_gone_is_unanswered_within_its_time(
    connect: Connect, rabbitmq_url: str
) -> None:
    client, server = connect(), connect()
    server.serve("gone", "h1", {"ask": lambda: 1})
    assert client.call("gone", "ask", "h1") == 1
    server.close()
    assert seconds(no_answer(lambda: client.call("gone", "ask", "h1", timeout=1))) < 2.5


def test_a_call_that_takes_longer_than_its_time_is_unanswered_in_time(connect: Connect) -> None:
    released = threading.Event()
    server = connect()
    server.serve("slow", "s", {"wait": lambda: released.wait(30)})
    assert seconds(no_answer(lambda: connect().call("slow", "wait", timeout=1))) < 2.5
    released.set()


def test_with_the_broker_unreachable_calls_end_in_time_casts_at_once_and_it_closes() -> None:
    transport = unreachable()
    assert seconds(no_answer(lambda: transport.call("nobody", "sync", timeout=1))) < 2
    assert seconds(no_answer(lambda: transport.call("nobody", "sync", timeout=1))) < 2
    assert transport.cast("nobody", "wake") is False
    assert seconds(lambda: transport.cast("nobody", "wake")) < 2
    assert seconds(transport.close) < 5


@contextlib.contextmanager
def late(url: str, seconds: float) -> Iterator[str]:
    """The broker by another address, where it says nothing before this time is over."""
    real = urlsplit(url)
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def serve() -> None:
        time.sleep(seconds)  # lateness is what is tried
        with contextlib.suppress(OSError):
            while True:
                pair = door.accept()[0], socket.create_connection((real.hostname, real.port))
                ends.extend(pair)
                for way in (pair, pair[::-1]):
                    threading.Thread(target=pump, args=way, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=serve, daemon=True).start()
        yield real._replace(
            netloc=f"{real.username}:{real.password}@127.0.0.1:{door.getsockname()[1]}"
        ).geturl()
        for end in (door, *ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_waiting_for_the_broker_is_part_of_a_calls_time(rabbitmq_url: str) -> None:
    asked, released, network = threading.Event(), threading.Event(), Network()

    def keep_waiting() -> None:
        asked.set()
        released.wait(30)

    server = PrivateTransport(Transport(config.load(), rabbitmq_url), network)
    server.serve("slow", "s", {"wait": keep_waiting})
    with late(rabbitmq_url, 3) as url:
        client = PrivateTransport(Transport(config.load(), url), network)
        assert seconds(no_answer(lambda: client.call("slow", "wait", timeout=6))) < 8
        assert asked.is_set(), "the broker was waited for until the end"
        client.close()
    released.set()
    server.close()


def test_a_server_that_is_closed_leaves_nothing_to_complain_of(
    rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Transport(config.load(), rabbitmq_url)
    server.serve(f"t{uuid.uuid4().hex}", "a", {"echo": lambda: None})
    server.close()
    assert "closing channel" not in caplog.text


def test_every_problem_travels_with_its_class_and_text(connect: Connect) -> None:
    problems = {kind.__name__: MADE.get(kind) or kind("Naïve: it is so.") for kind in KINDS}

    def fail(name: str) -> None:
        raise problems[name]

    connect().serve("failing", "s", {"fail": fail})
    client = connect()
    for name, sent in problems.items():
        with pytest.raises(errors.Problem) as caught:
            client.call("failing", "fail", timeout=5, name=name)
        assert (type(caught.value), caught.value.text, str(caught.value)) == (
            type(sent),
            sent.text,
            sent.text,
        )
        assert (caught.value.status, caught.value.retryable) == (sent.status, sent.retryable)


def test_what_nobody_foresaw_is_a_problem_whose_text_tells_nothing(connect: Connect) -> None:
    def fail() -> None:
        raise KeyError("/secret/path")

    connect().serve("failing", "s", {"fail": fail})
    with pytest.raises(errors.Problem) as caught:
        connect().call("failing", "fail", timeout=5)
    assert (type(caught.value), caught.value.text) == (errors.Problem, errors.Problem().text)


def test_a_problem_that_only_a_newer_sender_knows_is_a_plain_one(connect: Connect) -> None:
    class TooHot(errors.Conflict):
        pass

    def fail() -> None:
        raise TooHot("It is too hot.")

    connect().serve("failing", "s", {"fail": fail})
    with pytest.raises(errors.Problem, match="It is too hot.") as caught:
        connect().call("failing", "fail", timeout=5)
    assert type(caught.value) is errors.Problem


def test_the_schedulers_answer_arrives_as_it_was_said(connect: Connect) -> None:
    spec = RequestSpec("s", "p", {"VCPU": 1}, hints={"same": ["x"]})
    selection = Selection("s", ["h1"], "because", {"h2": "full"}, {"h1": "nova"})
    told = Told([selection])
    scheduler.serve(connect(), "s1", told)
    assert scheduler.SchedulerClient(connect()).select([spec], True) == [selection]
    assert told.told == [([spec], True)]


def test_an_explanation_arrives_as_it_was_said(connect: Connect) -> None:
    spec = RequestSpec("s", "p", {"VCPU": 1})
    told = Told(
        Explanation(
            2,
            1,
            ["h1"],
            {"nova": 3},
            [{"hosts": 1, "text": "disabled"}],
            "because",
            {"h2": "disabled"},
        )
    )
    scheduler.serve(connect(), "s1", told)
    assert scheduler.SchedulerClient(connect()).explain(spec) == told.answer
    assert told.told == [(spec,)]


def test_one_of_many_conductors_hears_a_ring_and_a_named_one_its_own(connect: Connect) -> None:
    both = Told(), Told()
    for number, told in enumerate(both):
        conductor.serve(connect(), f"c{number}", told)
    sender = connect()
    for _ in range(4):
        assert sender.cast(conductor.TOPIC, "wake", "c1")
    assert both[1].wait_for(4) == [("wake",)] * 4
    assert both[0].told == []


def test_only_what_is_served_can_be_called(connect: Connect) -> None:
    connect().serve("topic", "s", {"known": lambda: 1})
    client = connect()
    assert client.call("topic", "known", timeout=5) == 1
    for method in ("unknown", "__init__", "__class__"):
        with pytest.raises(errors.Problem):
            client.call("topic", method, timeout=2)


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/octet-stream", "application/x-unknown"]
)
def test_what_is_no_message_is_taken_from_the_queue_once(
    connect: Connect, rabbitmq_url: str, content_type: str
) -> None:
    told, server, client = Told(), connect(), connect()
    server.serve("odd", "s", {"wake": told.wake})
    queue = server._own("odd")
    with Connection(rabbitmq_url.replace("rabbit://", "amqp://")) as broker:
        producer = broker.Producer()
        bodies = (
            b"",
            b"{",
            b"7",
            b"[]",
            b"null",
            b'{"oslo.message": 7}',
            b'{"oslo.message": "{"}',
            b"\xff\x00",
            b'{"oslo.version": "9.0", "oslo.message": "{}"}',
            b'{"method": 7, "args": []}',
            b"[" * 20_000,
            b'{"oslo.version": "2.0", "oslo.message": "{\\"method\\": \\"ring\\", \\"args\\": 7}"}',
        )
        for body in bodies:
            producer.publish(
                body, routing_key=queue, content_type=content_type, content_encoding="utf-8"
            )
        assert client.cast("odd", "wake")
        assert told.wait_for(1) == [("wake",)]
        server.close()
        assert broker.default_channel.queue_declare(queue, passive=True).message_count == 0, (
            "none is delivered again"
        )


def test_a_bell_that_is_rung_arrives_and_coalesces(connect: Connect) -> None:
    """Wakeups that come while one is being sent become one."""
    told = Told()
    conductor.serve(connect(), "c1", told)
    transport, gate, busy, casts = connect(), threading.Event(), threading.Event(), []

    class Gated:
        def cast(
            self, topic: str, method: str, server: str | None = None, **arguments: Any
        ) -> bool:
            casts.append(method)
            busy.set()
            gate.wait(10)
            return transport.cast(topic, method, server, **arguments)

    wakeup = conductor.ConductorWakeup(Gated())  # type: ignore[arg-type]
    wakeup.wake()
    assert busy.wait(5)
    for _ in range(1000):
        wakeup.wake()
    gate.set()
    assert told.wait_for(2) == [("wake",)] * 2
    assert casts == ["wake", "wake"]


def test_a_bell_never_blocks_even_when_the_broker_is_away() -> None:
    transport = unreachable()
    wakeup = conductor.ConductorWakeup(transport)
    assert seconds(lambda: [wakeup.wake() for _ in range(10_000)]) < 1
    transport.close()


def test_a_bell_rings_again_whatever_happened_to_a_ring() -> None:
    woken = threading.Semaphore(0)

    class Broken:
        def cast(
            self, topic: str, method: str, server: str | None = None, **arguments: Any
        ) -> bool:
            woken.release()
            raise ValueError("nobody foresaw this")

    wakeup = conductor.ConductorWakeup(Broken())  # type: ignore[arg-type]
    for _ in range(3):
        wakeup.wake()
        assert woken.acquire(timeout=5)


def test_a_server_stops_promptly_however_long_it_was_idle(connect: Connect) -> None:
    server, client = connect(), connect()
    server.serve("idle", "c1", {"ask": lambda: 1})
    assert client.call("idle", "ask", timeout=5) == 1
    time.sleep(5)  # idleness is what is tried: an idle connection looks up less and less often
    assert seconds(server.close) < 5
    assert seconds(client.close) < 5
