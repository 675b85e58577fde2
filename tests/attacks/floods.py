# SPDX-License-Identifier: Apache-2.0
"""One host that sends as much as the broker takes: other hosts' servers must not wait for it.

Any flood uses processor time of the machine and of the broker. So each flood at the conductors is
compared with the same flood into a queue that no process reads, in turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from common.rpc.broker import opener
from common.rpc.host_messages import pack
from common.security.broker_names import HEARTBEATS, PREFIX, REPORTS, answers_queue, exchange
from common.security.host_keys import Purpose
from common.service import config
from tests.attacks.target import Outcome, Target, command, processes
from tests.bench.figures import pss

ROUNDS, CREATES = 3, 3
MAX_RATIO = 2.0  #: of the seconds of a create, beside the unrelated flood
MAX_GROWTH_MIB = 100  #: of all conductors together
SETTLE_SECONDS = 3.0


class Flood(NamedTuple):
    """A message, and how often it is sent in a second."""

    body: bytes
    rate: float


def floods(target: Target) -> Iterator[Outcome]:
    """With one host's key and its user at the broker: floods of small and of large messages."""
    if len(target.hosts) < 2:
        yield Outcome("flood: one host's messages", untried="this cloud has one host")
        return
    stolen, other = target.stolen, target.hosts[1].name
    key = stolen.keys.newest(stolen.name, Purpose.COMMAND)
    kinds = {
        "5,000 messages a second without a key": Flood(b"{}\n" + b"z" * 300, 5000),
        "5,000 messages a second, sealed": Flood(pack(key, "heartbeat", {})[1], 5000),
        "10 MB a second in one report": Flood(_report(key, 150_000), 1),
        "10 MB a second in reports of 900 KB": Flood(_report(key, 13_000), 11),
        "messages of 16 MB": Flood(b"x" * 16_000_000, 1),
    }
    unrelated_queue = answers_queue(PREFIX, "conductor", uuid.uuid4().hex)
    before = _conductor_mib(target)
    for what, flood in kinds.items():
        at_conductors, unrelated = [], []
        for _ in range(ROUNDS):
            with _flooding(str(target.control), "", "", [unrelated_queue], flood):
                unrelated.append(_seconds_of_a_create(target, other))
            routes = [f"{REPORTS}.{stolen.name}", f"{HEARTBEATS}.{stolen.name}"]
            with _flooding(
                str(stolen.file), stolen.keys.transport_url, exchange(PREFIX), routes, flood
            ):
                at_conductors.append(_seconds_of_a_create(target, other))
        ratio = statistics.median(at_conductors) / statistics.median(unrelated)
        figures = (
            f"a create on another host takes {statistics.median(at_conductors):.2f} s, "
            f"{ratio:.1f} times as long as beside an unrelated flood"
        )
        yield Outcome(f"flood: {what} ({figures})", figures if ratio > MAX_RATIO else "")
    grown = _conductor_mib(target) - before
    yield Outcome(
        f"flood: memory of the conductors grows by {grown} MiB",
        f"at most {MAX_GROWTH_MIB}" if grown > MAX_GROWTH_MIB else "",
    )


def _report(key: Any, guests: int) -> bytes:
    domains = [
        {"server": str(uuid.UUID(int=number)), "power_state": 1, "fence": 1}
        for number in range(guests)
    ]
    return pack(key, "sync", {"request": {"host": key.host, "session": 1, "domains": domains}})[1]


def _seconds_of_a_create(target: Target, host: str) -> float:
    """The median of some, from the request until the server is ACTIVE."""
    seconds = []
    for _ in range(CREATES):
        begun = time.monotonic()
        with target.server(host):
            seconds.append(time.monotonic() - begun)
    return statistics.median(seconds)


@contextmanager
def _flooding(file: str, url: str, where: str, routes: list[str], flood: Flood) -> Iterator[None]:
    """Another process sends the messages for the block, and has begun when the block begins."""
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    sender = context.Process(
        target=_send, args=(file, url, where, routes, flood, begun, over), daemon=True
    )
    sender.start()
    try:
        assert begun.wait(60), "the flood does not begin"
        time.sleep(SETTLE_SECONDS)  # the flood is at its full rate
        yield
    finally:
        over.set()
        sender.join(10)
        if sender.is_alive():  # the broker blocks it
            sender.kill()
            sender.join()


def _send(
    file: str, url: str, where: str, routes: list[str], flood: Flood, begun: Event, over: Event
) -> None:
    conf = config.load(file)
    while not over.is_set():
        try:
            with opener(conf, url or None)(heartbeat=0) as connection:
                channel: Any = connection.channel()
                if not where:  # filled like the conductors' queue, and read by no process
                    channel.queue_declare(
                        routes[0],
                        durable=False,
                        exclusive=True,
                        auto_delete=True,
                        arguments={"x-max-length": 10},
                    )
                _publish(channel, where, routes, flood, begun, over)
        except OSError:
            time.sleep(0.1)  # the broker closed the connection: a thief connects again


def _publish(
    channel: Any, where: str, routes: list[str], flood: Flood, begun: Event, over: Event
) -> None:
    start, sent = time.monotonic(), 0
    while not over.is_set():
        channel.basic_publish(
            channel.prepare_message(flood.body, content_encoding="binary"),
            exchange=where,
            routing_key=routes[sent % len(routes)],
        )
        sent += 1
        begun.set()
        ahead = start + sent / flood.rate - time.monotonic()
        if ahead > 0.01:
            over.wait(ahead)


def _conductor_mib(target: Target) -> int:
    """The memory of all conductors of this cloud."""
    return round(
        sum(pss(pid) for pid in processes(target.control) if "kilonova-conductor" in command(pid))
    )
