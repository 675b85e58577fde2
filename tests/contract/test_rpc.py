# SPDX-License-Identifier: Apache-2.0
"""RPC of the services over a real RabbitMQ.

Lost messages are reported at once or within the call's timeout.
"""

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
from tests.broker_connection import broker_connection
from tests.functional.messages import Network, PrivateTransport
from tests.log_lines import rendered_lines

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.Problem)
]
PROBLEMS = {
    errors.OverQuota: errors.OverQuota({"cores": (4, 18, 20)}),
    errors.Locked: errors.Locked("s1"),
    errors.WrongState: errors.WrongState("stop", "s1", "vm_state", "stopped"),
}
Connect = Callable[[], Any]


@pytest.fixture
def connect(rabbitmq_url: str) -> Iterator[Connect]:
    """Return a function that opens the transport of another process, on topics of this test."""
    conf, network, opened = config.load(), Network(), []

    def make() -> PrivateTransport:
        opened.append(PrivateTransport(Transport(conf, rabbitmq_url), network))
        return opened[-1]

    yield make
    with ThreadPoolExecutor(
        8
    ) as pool:  # Each close waits up to a second for the transport's readers.
        list(pool.map(PrivateTransport.close, opened))


def unreachable() -> Transport:
    return Transport(config.load(), f"rabbit://nobody:none@127.0.0.1:{free_ports(1)}/")


def measure_seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def expect_no_answer(work: Callable[[], Any]) -> Callable[[], Any]:
    def check() -> None:
        with pytest.raises(errors.NoAnswer, match="did not answer"):
            work()

    return check


class CallRecorder:
    """An implementation of every RPC interface that records calls."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.calls = answer, []  # type: Any, list[Any]
        self.condition = threading.Condition()

    def _record(self, *call: Any) -> Any:
        with self.condition:
            self.calls.append(call)
            self.condition.notify_all()
        return self.answer

    def wait_for(self, count: int) -> list[Any]:
        with self.condition:
            assert self.condition.wait_for(lambda: len(self.calls) >= count, timeout=10), self.calls
            return list(self.calls)

    def wake(self, service_calls: bool = False) -> None:
        self._record("wake")

    loop_back = wake

    def sync(self, request: Sync) -> Any:
        return self._record(request)

    def heartbeat(self, beat: Heartbeat) -> Any:
        return self._record(beat)

    def explain(self, spec: RequestSpec) -> Any:
        return self._record(spec)

    def select(self, specs: list[RequestSpec], fresh: bool) -> Any:
        return self._record(specs, fresh)

    def do(self, commands: list[Command], access: Access | None) -> None:
        self._record(commands, access)

    def cache_images(self, images: list[ImageRef], access: Access) -> None:
        self._record(images, access)

    def query(self, verb: str, arguments: dict[str, Any]) -> Any:
        return self._record(verb, arguments)


def test_cast_to_undeclared_queue_returns_false_at_once(
    connect: Connect,
) -> None:
    transport = connect()
    for server in (None, "h1"):
        assert measure_seconds(lambda server=server: transport.cast("nobody", "wake", server)) < 3
        assert transport.cast("nobody", "wake", server) is False


def test_casts_arrive_as_often_as_sent(connect: Connect) -> None:
    recorder = CallRecorder()
    conductor.serve(connect(), "c1", recorder)
    sender = connect()
    for _ in range(5):
        assert sender.cast(conductor.TOPIC, "wake")
    assert recorder.wait_for(5) == [("wake",)] * 5


def test_call_without_server_raises_no_answer_within_timeout(connect: Connect) -> None:
    transport = connect()
    assert (
        measure_seconds(expect_no_answer(lambda: transport.call("nobody", "sync", timeout=2))) < 3
    )


def test_call_to_closed_server_raises_no_answer_within_timeout(
    connect: Connect, rabbitmq_url: str
) -> None:
    client, server = connect(), connect()
    server.serve("gone", "h1", {"ask": lambda: 1})
    assert client.call("gone", "ask", "h1") == 1
    server.close()
    assert (
        measure_seconds(expect_no_answer(lambda: client.call("gone", "ask", "h1", timeout=1))) < 2.5
    )


def test_call_longer_than_timeout_raises_no_answer(connect: Connect) -> None:
    released = threading.Event()
    server = connect()
    server.serve("slow", "s", {"wait": lambda: released.wait(30)})
    assert (
        measure_seconds(expect_no_answer(lambda: connect().call("slow", "wait", timeout=1))) < 2.5
    )
    released.set()


def test_rpc_calls_casts_and_close_end_in_time_when_broker_is_unreachable() -> None:
    transport = unreachable()
    assert (
        measure_seconds(expect_no_answer(lambda: transport.call("nobody", "sync", timeout=1))) < 2
    )
    assert (
        measure_seconds(expect_no_answer(lambda: transport.call("nobody", "sync", timeout=1))) < 2
    )
    assert transport.cast("nobody", "wake") is False
    assert measure_seconds(lambda: transport.cast("nobody", "wake")) < 2
    assert measure_seconds(transport.close) < 5


@contextlib.contextmanager
def delayed_broker(url: str, delay: float) -> Iterator[str]:
    """Yield the URL of a proxy to the broker that is silent for the first seconds."""
    real = urlsplit(url)
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def serve() -> None:
        time.sleep(delay)  # The delay under test.
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


def test_call_timeout_includes_wait_for_slow_broker(rabbitmq_url: str) -> None:
    is_called, released, network = threading.Event(), threading.Event(), Network()

    def keep_waiting() -> None:
        is_called.set()
        released.wait(30)

    server = PrivateTransport(Transport(config.load(), rabbitmq_url), network)
    server.serve("slow", "s", {"wait": keep_waiting})
    with delayed_broker(rabbitmq_url, 3) as url:
        client = PrivateTransport(Transport(config.load(), url), network)
        assert measure_seconds(expect_no_answer(lambda: client.call("slow", "wait", timeout=6))) < 8
        assert is_called.is_set(), "the broker was waited for until the end"
        client.close()
    released.set()
    server.close()


def test_transport_close_logs_no_channel_warning(
    rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Transport(config.load(), rabbitmq_url)
    server.serve(f"t{uuid.uuid4().hex}", "a", {"echo": lambda: None})
    server.close()
    assert "closing channel" not in "\n".join(rendered_lines(caplog))


def test_rpc_call_reraises_problem_of_server_with_same_class_and_text(connect: Connect) -> None:
    problems = {kind.__name__: PROBLEMS.get(kind) or kind("Naïve: it is so.") for kind in KINDS}

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


def test_call_hides_text_of_unexpected_server_exception(connect: Connect) -> None:
    def fail() -> None:
        raise KeyError("/secret/path")

    connect().serve("failing", "s", {"fail": fail})
    with pytest.raises(errors.Problem) as caught:
        connect().call("failing", "fail", timeout=5)
    assert (type(caught.value), caught.value.text) == (errors.Problem, errors.Problem().text)


def test_rpc_call_raises_base_problem_for_unknown_problem_class_of_server(connect: Connect) -> None:
    class TooHot(errors.Conflict):
        pass

    def fail() -> None:
        raise TooHot("It is too hot.")

    connect().serve("failing", "s", {"fail": fail})
    with pytest.raises(errors.Problem, match="It is too hot.") as caught:
        connect().call("failing", "fail", timeout=5)
    assert type(caught.value) is errors.Problem


def test_scheduler_select_over_rpc_returns_selection_unchanged(connect: Connect) -> None:
    spec = RequestSpec("s", "p", {"VCPU": 1}, hints={"same": ["x"]})
    selection = Selection("s", ["h1"], "because", {"h2": "full"}, {"h1": "nova"})
    recorder = CallRecorder([selection])
    scheduler.serve(connect(), "s1", recorder)
    assert scheduler.SchedulerClient(connect()).select([spec], True) == [selection]
    assert recorder.calls == [([spec], True)]


def test_scheduler_explain_over_rpc_returns_explanation_unchanged(connect: Connect) -> None:
    spec = RequestSpec("s", "p", {"VCPU": 1})
    recorder = CallRecorder(
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
    scheduler.serve(connect(), "s1", recorder)
    assert scheduler.SchedulerClient(connect()).explain(spec) == recorder.answer
    assert recorder.calls == [(spec,)]


def test_cast_to_named_conductor_reaches_no_other_conductor(connect: Connect) -> None:
    both = CallRecorder(), CallRecorder()
    for number, recorder in enumerate(both):
        conductor.serve(connect(), f"c{number}", recorder)
    sender = connect()
    for _ in range(4):
        assert sender.cast(conductor.TOPIC, "wake", "c1")
    assert both[1].wait_for(4) == [("wake",)] * 4
    assert both[0].calls == []


def test_call_of_unserved_method_raises_problem(connect: Connect) -> None:
    connect().serve("topic", "s", {"known": lambda: 1})
    client = connect()
    assert client.call("topic", "known", timeout=5) == 1
    for method in ("unknown", "__init__", "__class__"):
        with pytest.raises(errors.Problem):
            client.call("topic", method, timeout=2)


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/octet-stream", "application/x-unknown"]
)
def test_malformed_rpc_message_is_dropped_and_next_cast_is_received(
    connect: Connect, rabbitmq_url: str, content_type: str
) -> None:
    recorder, server, client = CallRecorder(), connect(), connect()
    server.serve("odd", "s", {"wake": recorder.wake})
    queue = server._own("odd")
    with broker_connection(rabbitmq_url) as broker:
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
        assert recorder.wait_for(1) == [("wake",)]
        server.close()
        assert broker.default_channel.queue_declare(queue, passive=True).message_count == 0, (
            "none is delivered again"
        )


def test_conductor_wakeups_during_sending_are_merged_into_one(connect: Connect) -> None:
    """Wakeups during the sending of another wakeup are sent as one."""
    recorder = CallRecorder()
    conductor.serve(connect(), "c1", recorder)
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
    assert recorder.wait_for(2) == [("wake",)] * 2
    assert casts == ["wake", "wake"]


def test_conductor_wakeup_does_not_block_when_broker_is_unreachable() -> None:
    transport = unreachable()
    wakeup = conductor.ConductorWakeup(transport)
    assert measure_seconds(lambda: [wakeup.wake() for _ in range(10_000)]) < 1
    transport.close()


def test_conductor_wakeup_is_sent_although_previous_send_raised() -> None:
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


def test_idle_rpc_server_and_client_close_within_seconds(connect: Connect) -> None:
    server, client = connect(), connect()
    server.serve("idle", "c1", {"ask": lambda: 1})
    assert client.call("idle", "ask", timeout=5) == 1
    time.sleep(5)  # Idleness under test: an idle connection polls less and less often.
    assert measure_seconds(server.close) < 5
    assert measure_seconds(client.close) < 5
