# SPDX-License-Identifier: Apache-2.0
"""What a request costs in SQL statements and messages when nothing else happens: counted, and kept
small."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.domain import states
from common.domain.models import HostInventory, NumaNode
from common.rpc.host_link import FROM_HOSTS
from common.security.host_keys import GOOD_FOR_SECONDS
from compute_agent import service
from conductor import service as conductor_service
from conductor.engine import heartbeats
from conductor.engine.engine import Lane
from conductor.service import Conductor
from conductor.workflows import WORKFLOWS
from scheduler import hosts
from tests.functional.cloud import FLAVOR, Cloud

STATEMENTS, MESSAGES, TRIES = 30, 6, 4
WITH_A_PORT = {"create": 38, "delete": 35}  #: statements; messages are as without
#: Statements. A hard group: two each for joining it, for looking at it and for its lock and places
#: in the claim.
ADDED = {"plain": 0, "group": 6, "parts": 2}
#: Threads that look every second or few, whatever is asked, and have no step of these requests: no
#: part of their cost. So has the one that answers heartbeats, and looks every five seconds which
#: keys of hosts count.
INTERVAL = heartbeats.LOOK_INTERVAL_SECONDS
BACKGROUND = {"sweep", "cleanups", "host actions", FROM_HOSTS, *WORKFLOWS.lanes} - {Lane.NETWORK}


@pytest.fixture(autouse=True)
def no_look_for_hosts_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's, which is due once a second: on a busy machine that is with each request."""
    monkeypatch.setattr(hosts, "COUNT_INTERVAL_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def no_look_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conductor looks for due actions once a second, and when the sweep's ring of each second
    comes back to it: on a busy machine, where a request takes longer, that is with each of them."""

    def comes_back(conductor: Conductor) -> None:
        conductor._own_message_at = conductor.engine.clock.monotonic()

    monkeypatch.setattr(conductor_service, "LOOK_SECONDS", 10.0)
    monkeypatch.setattr(Conductor, "loop_back", comes_back)


def cost_of(
    cloud: Cloud, request: Callable[[], str], vm_state: str
) -> tuple[Counter[str], Counter[str]]:
    """Statements by thread and messages by method that one request took, the loop-back of the sweep
    left out."""
    cloud.await_quiet()
    statements, messages = Counter(cloud.statements), Counter(cloud.network.sent)
    server = request()
    cloud.await_state([server], vm_state)
    cloud.await_quiet()
    spent = cloud.statements - statements
    return (
        Counter({part: number for part, number in spent.items() if part not in BACKGROUND}),
        Counter(
            {
                what: number
                for what, number in (cloud.network.sent - messages).items()
                if what != "loop_back"
            }
        ),
    )


def cheapest(cloud: Cloud, what: str, request: Callable[[], str], vm_state: str) -> tuple[int, int]:
    """Of several tries the one into which no periodic exchange fell."""
    found = [cost_of(cloud, request, vm_state) for _ in range(TRIES)]
    statements, messages = min(found, key=lambda cost: cost[0].total() + cost[1].total())
    print(
        f"\n{what}: {statements.total()} statements {dict(statements)}, {messages.total()} messages {dict(messages)}"
    )
    return statements.total(), messages.total()


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_statements_and_messages_of_one_request(new_cloud: Callable[..., Cloud], kind: str) -> None:
    cloud = new_cloud(kind)
    cloud.start()
    cloud.await_state(cloud.create(), states.ACTIVE)
    servers: list[str] = []

    def create() -> str:
        servers.extend(cloud.create())
        return servers[-1]

    def of_the_next(key: str) -> Callable[[], str]:
        left = iter(servers)

        def begin() -> str:
            server = next(left)
            cloud.begin_action(server, key)
            return server

        return begin

    found = {
        "create": cheapest(cloud, f"{kind} create", create, states.ACTIVE),
        "stop": cheapest(cloud, f"{kind} stop", of_the_next("os-stop"), states.STOPPED),
        "start": cheapest(cloud, f"{kind} start", of_the_next("os-start"), states.ACTIVE),
        "delete": cheapest(cloud, f"{kind} delete", of_the_next("delete"), states.DELETED),
    }
    assert {
        name: cost for name, cost in found.items() if cost[0] > STATEMENTS or cost[1] > MESSAGES
    } == {}
    assert cloud.findings() == []


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_what_a_port_adds(new_cloud: Callable[..., Cloud], kind: str) -> None:
    cloud = new_cloud(kind)
    cloud.start()
    cloud.await_state(cloud.create(networks=[{"network": "n1"}]), states.ACTIVE)
    servers: list[str] = []

    def create() -> str:
        servers.extend(cloud.create(networks=[{"network": "n1"}]))
        return servers[-1]

    def delete() -> str:
        server = servers.pop()
        cloud.begin_action(server, "delete")
        return server

    found = {
        "create": cheapest(cloud, f"{kind} create with a port", create, states.ACTIVE),
        "delete": cheapest(cloud, f"{kind} delete with a port", delete, states.DELETED),
    }
    assert {
        name: cost
        for name, cost in found.items()
        if cost[0] > WITH_A_PORT[name] or cost[1] > MESSAGES
    } == {}
    assert cloud.findings() == []
    assert len(cloud.ports.held) == 1


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_what_a_hard_group_and_parts_of_the_host_add(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = new_cloud(kind)
    cloud.start(
        sizes=[
            HostInventory(
                "memory",
                1,
                "h1",
                64,
                65536,
                1000,
                pcpus=64,
                numa_nodes=[NumaNode(0, [64], list(range(64)), 65536)],
            )
        ]
    )
    group, pinned = (
        cloud.group("affinity"),
        replace(FLAVOR, extra_specs={"hw:cpu_policy": "dedicated"}),
    )
    cloud.await_state([*cloud.create(group=group), *cloud.create(flavor=pinned)], states.ACTIVE)
    found = {
        "plain": cheapest(cloud, f"{kind} create", lambda: cloud.create()[0], states.ACTIVE),
        "group": cheapest(
            cloud,
            f"{kind} create in a hard group",
            lambda: cloud.create(group=group)[0],
            states.ACTIVE,
        ),
        "parts": cheapest(
            cloud,
            f"{kind} create with CPUs of its own",
            lambda: cloud.create(flavor=pinned)[0],
            states.ACTIVE,
        ),
    }
    added = {name: cost[0] - found["plain"][0] for name, cost in found.items()}
    assert {name: number for name, number in added.items() if number > ADDED[name]} == {}, found
    assert {cost[1] for cost in found.values()} == {found["plain"][1]}, "no message more"
    assert cloud.findings() == []


def test_idle_hosts_cost_what_one_does(
    new_cloud: Callable[..., Cloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look a second, of two statements, one each five seconds for the keys, and two messages for
    each heartbeat, however many hosts there are."""
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.2, 0.3))
    # on a busy machine none is to sync in its place
    monkeypatch.setattr(service, "ANSWER_TIMEOUTS_SECONDS", (10.0, 2.0, 4.0))
    # none is to report its domains by and by
    monkeypatch.setattr(heartbeats, "COMPARE_SOON_SECONDS", 3600.0)
    monkeypatch.setattr(heartbeats, "_spread", lambda host: heartbeats.COMPARE_SOON_SECONDS)
    cloud = new_cloud()
    cloud.start(hosts=4)
    cloud.await_state(cloud.create(8), states.ACTIVE)
    cloud.await_idle()
    sent, idle_at = cloud.network.sent, time.monotonic()
    before = sent["heartbeat"]
    # A look that is a second old still says that something waits for a host, which then syncs once
    # more.
    cloud.await_true(
        lambda: sent["heartbeat"] > before + 20 and time.monotonic() > idle_at + 3 * INTERVAL,
        20,
        "all are idle",
    )
    statements, messages, began = Counter(cloud.statements), Counter(sent), time.monotonic()
    cloud.await_true(
        lambda: sent["heartbeat"] >= messages["heartbeat"] + 100, 20, "fifty heartbeats"
    )
    looks = int((time.monotonic() - began) / INTERVAL) + 1
    spent = cloud.statements - statements
    found = {
        part: number
        for part, number in spent.items()
        if part not in BACKGROUND - {FROM_HOSTS} | {"runner", "scheduler", Lane.NETWORK}
    }
    assert list(found) == [FROM_HOSTS], spent
    assert found[FROM_HOSTS] <= 2 * looks + looks // GOOD_FOR_SECONDS + 1
    assert set(sent - messages) <= {"heartbeat", "loop_back"}
