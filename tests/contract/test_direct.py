# SPDX-License-Identifier: Apache-2.0
"""Small questions on a real RabbitMQ: answered, or known to be unanswered in time, whatever becomes of the broker."""
from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import config, errors
from common.models import Heartbeat
from common.rpc import conductor
from common.rpc.direct import FRESH
from common.rpc.transport import Transport
from tests.contract.test_rpc import Told, unreachable
from tests.faults import Wire
from tests.functional.messages import Network, PrivateTransport
from tests.waiting import await_true

Connect = Callable[..., Any]


@pytest.fixture
def connect(rabbitmq_url: str) -> Iterator[Connect]:
    """Each call is another process's transport."""
    conf, opened = config.load(), []

    def make(url: str = rabbitmq_url) -> Transport:
        opened.append(Transport(conf, url))
        return opened[-1]
    yield make
    for transport in opened:
        transport.close()


@pytest.fixture
def queue() -> str:
    return f"questions-{uuid.uuid4().hex[:8]}"


def test_each_question_is_answered_once_by_some_server(connect: Connect, queue: str) -> None:
    asked: Counter[str] = Counter()

    def server(name: str) -> Callable[[Any], Any]:
        def answer(question: Any) -> Any:
            asked[name] += 1
            return {"twice": question["number"] * 2, "ü": None}
        return answer
    for name in ("a", "b"):
        connect().answer(queue, server(name))
    clients = [connect() for _ in range(3)]
    await_true(lambda: clients[0].ask(queue, {"number": 1}, 1) is not None)
    asked.clear()
    for number in range(30):
        assert clients[number % 3].ask(queue, {"number": number}, 5) == {"twice": number * 2, "ü": None}
    assert (asked.total(), min(asked["a"], asked["b"]) > 0) == (30, True)


def test_a_question_to_nobody_has_no_answer_in_its_time_and_is_dropped(connect: Connect, queue: str) -> None:
    heard: list[Any] = []
    client, first = connect(), connect()
    first.answer(queue, heard.append)
    await_true(lambda: client.ask(queue, "first", 1) is None and heard)
    first.close()
    began = time.monotonic()
    assert client.ask(queue, "nobody is there", 0.5) is None
    assert 0.5 <= time.monotonic() - began < 1.5
    time.sleep(FRESH)     # that it is dropped after this time is what is tried
    connect().answer(queue, lambda question: heard.append(question) or True)
    await_true(lambda: client.ask(queue, "again", 1))
    assert "nobody is there" not in heard


def test_a_late_answer_is_none_to_the_next_question(connect: Connect, queue: str) -> None:
    released, client = threading.Event(), connect()

    def answer(question: Any) -> Any:
        if question == "slow":
            released.wait(10)
        return question
    connect().answer(queue, answer)
    await_true(lambda: client.ask(queue, "quick", 1))
    assert client.ask(queue, "slow", 0.2) is None
    released.set()
    assert client.ask(queue, "next", 5) == "next"


def test_what_cannot_be_answered_holds_up_nothing(connect: Connect, queue: str) -> None:
    problems: list[Exception] = [errors.Unavailable("The database is away."), KeyError("nobody foresaw this")]

    def answer(question: Any) -> Any:
        if question == "bad":
            raise problems.pop()
        return True
    connect().answer(queue, answer)
    client = connect()
    await_true(lambda: client.ask(queue, "good", 1))
    assert [client.ask(queue, one, 1) for one in ("bad", "good", "bad", "good")] == [None, True, None, True]


@pytest.mark.parametrize("cut", ["the client's", "the server's"])
def test_a_connection_that_is_cut_is_made_again(connect: Connect, rabbitmq_url: str, queue: str, cut: str) -> None:
    wire = Wire(rabbitmq_url)
    through = wire.url.render_as_string(hide_password=False)
    server, client = (connect(through if cut == whose else rabbitmq_url) for whose in ("the server's", "the client's"))
    server.answer(queue, lambda question: question)
    await_true(lambda: client.ask(queue, 1, 1) == 1)
    wire.cut()
    if cut == "the client's":
        assert client.ask(queue, 2, 5) == 2, "at once: it was cut while nobody asked"
    await_true(lambda: client.ask(queue, 2, 1) == 2, 10)
    wire.freeze()
    began = time.monotonic()
    assert client.ask(queue, 3, 1) is None
    assert time.monotonic() - began < 2
    wire.thaw()
    await_true(lambda: client.ask(queue, 4, 1) == 4, 10)
    wire.close()


def test_with_the_broker_unreachable_a_question_ends_in_time() -> None:
    transport = unreachable()
    began = time.monotonic()
    assert transport.ask("nobody", 1, 1) is None
    assert time.monotonic() - began < 4
    transport.close()


def test_a_heartbeat_arrives_as_it_was_said(rabbitmq_url: str) -> None:
    network, told = Network(), Told(True)
    server, client = (PrivateTransport(Transport(config.load(), rabbitmq_url), network) for _ in range(2))
    conductor.serve(server, "c1", told)  # type: ignore[arg-type]  # the same interface
    agent, said = conductor.Client(client), Heartbeat("h1", 3, "domains")  # type: ignore[arg-type]
    await_true(lambda: agent.heartbeat(said, 1))
    told.answer = False
    assert agent.heartbeat(said, 5) is False
    assert set(told.told) == {(said,)}
    for transport in (client, server):
        transport.close()
