# SPDX-License-Identifier: Apache-2.0
"""Floods of messages from one host, which must not delay the servers of other hosts.

Any flood uses processor time of the machine and of the broker. So each flood at the conductors is
compared with the same flood into an unrelated queue that no process reads, in turns.
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
#: Limit of the duration of a create, divided by the duration during the unrelated flood.
MAX_RATIO = 2.0
#: Limit for the growth of all conductors together.
MAX_GROWTH_MIB = 100
SETTLE_SECONDS = 3.0


class Flood(NamedTuple):
    """A message and its rate, in messages per second."""

    body: bytes
    rate: float


def floods(target: Target) -> Iterator[Outcome]:
    """With a host's key and user at the broker: send floods of small and of large messages."""
    if len(target.hosts) < 2:
        yield Outcome("flood: one host's messages", untried="this cloud has one host")
        return
    stolen, other = target.stolen, target.hosts[1].name
    key = stolen.keys.newest(stolen.name, Purpose.COMMAND)
    kinds = {
        "5,000 messages a second, not sealed": Flood(b"{}\n" + b"z" * 300, 5000),
        "5,000 messages a second, sealed": Flood(pack(key, "heartbeat", {})[1], 5000),
        "10 MB a second in one report": Flood(_pack_report(key, 150_000), 1),
        "10 MB a second in reports of 900 KB": Flood(_pack_report(key, 13_000), 11),
        "messages of 16 MB": Flood(b"x" * 16_000_000, 1),
    }
    unrelated_queue = answers_queue(PREFIX, "conductor", uuid.uuid4().hex)
    before = _conductor_mib(target)
    for title, flood in kinds.items():
        at_conductors, unrelated = [], []
        for _ in range(ROUNDS):
            with _run_flood(str(target.control), "", "", [unrelated_queue], flood):
                unrelated.append(_measure_create(target, other))
            routes = [f"{REPORTS}.{stolen.name}", f"{HEARTBEATS}.{stolen.name}"]
            with _run_flood(
                str(stolen.file), stolen.keys.transport_url, exchange(PREFIX), routes, flood
            ):
                at_conductors.append(_measure_create(target, other))
        ratio = statistics.median(at_conductors) / statistics.median(unrelated)
        figures = (
            f"a create on another host takes {statistics.median(at_conductors):.2f} s, "
            f"{ratio:.1f} times as long as during an unrelated flood"
        )
        yield Outcome(f"flood: {title} ({figures})", figures if ratio > MAX_RATIO else "")
    growth = _conductor_mib(target) - before
    yield Outcome(
        f"flood: memory of the conductors grows by {growth} MiB",
        f"the limit is {MAX_GROWTH_MIB} MiB" if growth > MAX_GROWTH_MIB else "",
    )


def _pack_report(key: Any, guests: int) -> bytes:
    domains = [
        {"server": str(uuid.UUID(int=number)), "power_state": 1, "fence": 1}
        for number in range(guests)
    ]
    return pack(key, "sync", {"request": {"host": key.host, "session": 1, "domains": domains}})[1]


def _measure_create(target: Target, host: str) -> float:
    """Return the median seconds of some creates, from the request until the server is ACTIVE."""
    seconds = []
    for _ in range(CREATES):
        start = time.monotonic()
        with target.create_server(host):
            seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


@contextmanager
def _run_flood(
    file: str, url: str, exchange_name: str, routes: list[str], flood: Flood
) -> Iterator[None]:
    """Send a flood from another process for the block, at the full rate when the block begins.

    Args:
        file: Configuration file of the sender.
        url: URL of the broker, or "" for the URL in the file.
        exchange_name: Exchange for the messages, or "" to declare a queue with the first route as
            its name.
        routes: Routing keys, used in turns.
        flood: The message and its rate.
    """
    context = multiprocessing.get_context("spawn")
    has_begun, is_over = context.Event(), context.Event()
    sender = context.Process(
        target=_send,
        args=(file, url, exchange_name, routes, flood, has_begun, is_over),
        daemon=True,
    )
    sender.start()
    try:
        assert has_begun.wait(60), "the flood does not begin"
        # Let the flood reach its full rate.
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        is_over.set()
        sender.join(10)
        # The broker may block the sender.
        if sender.is_alive():
            sender.kill()
            sender.join()


def _send(
    file: str,
    url: str,
    exchange_name: str,
    routes: list[str],
    flood: Flood,
    has_begun: Event,
    is_over: Event,
) -> None:
    conf = config.load(file)
    while not is_over.is_set():
        try:
            with opener(conf, url or None)(heartbeat=0) as connection:
                channel: Any = connection.channel()
                if not exchange_name:
                    # This queue fills like the conductors' queue, and no process reads it.
                    channel.queue_declare(
                        routes[0],
                        durable=False,
                        exclusive=True,
                        auto_delete=True,
                        arguments={"x-max-length": 10},
                    )
                _publish(channel, exchange_name, routes, flood, has_begun, is_over)
        except OSError:
            # The broker closed the connection. A thief would connect again.
            time.sleep(0.1)


def _publish(
    channel: Any,
    exchange_name: str,
    routes: list[str],
    flood: Flood,
    has_begun: Event,
    is_over: Event,
) -> None:
    start, count = time.monotonic(), 0
    while not is_over.is_set():
        channel.basic_publish(
            channel.prepare_message(flood.body, content_encoding="binary"),
            exchange=exchange_name,
            routing_key=routes[count % len(routes)],
        )
        count += 1
        has_begun.set()
        ahead = start + count / flood.rate - time.monotonic()
        if ahead > 0.01:
            is_over.wait(ahead)


def _conductor_mib(target: Target) -> int:
    """Return the memory of all conductors of this cloud, in MiB."""
    return round(
        sum(pss(pid) for pid in processes(target.control) if "kilonova-conductor" in command(pid))
    )
