# SPDX-License-Identifier: Apache-2.0
"""The SQL statements and messages of a request in an otherwise idle cloud, with upper limits."""

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
#: Limits with a port. The limit of messages is the same as without.
STATEMENTS_WITH_PORT = {"create": 38, "delete": 35}
#: Additional statements of a create. A hard group needs two each to join the group, to read the
#: group, and to lock and count its places in the claim.
ADDED_STATEMENTS = {"plain": 0, "group": 6, "parts": 2}
#: Threads that read the database periodically and execute no step of these requests, so they are
#: not part of the cost. The thread for FROM_HOSTS answers heartbeats and reads the keys of hosts
#: every five seconds.
INTERVAL = heartbeats.LOOK_INTERVAL_SECONDS
BACKGROUND = {"sweep", "cleanups", "host actions", FROM_HOSTS, *WORKFLOWS.lanes} - {Lane.NETWORK}


@pytest.fixture(autouse=True)
def no_count_of_removed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the scheduler's count of hosts, which is due once a second.

    On a busy machine, the count would occur in each request.
    """
    monkeypatch.setattr(hosts, "COUNT_INTERVAL_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def no_look_without_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conductors look for due actions only after a wakeup message.

    Usually they also look once a second, and when the sweep's own message returns. On a busy
    machine that would occur in each request.
    """

    def mark_loop_back(conductor: Conductor) -> None:
        conductor._own_message_at = conductor.engine.clock.monotonic()

    monkeypatch.setattr(conductor_service, "LOOK_SECONDS", 10.0)
    monkeypatch.setattr(Conductor, "loop_back", mark_loop_back)


def measure_cost(
    cloud: Cloud, request: Callable[[], str], vm_state: str
) -> tuple[Counter[str], Counter[str]]:
    """Return the statements by thread and the messages by method of one request.

    Background threads and the loop-back message of the sweep are left out.
    """
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
                method: number
                for method, number in (cloud.network.sent - messages).items()
                if method != "loop_back"
            }
        ),
    )


def measure_lowest_cost(
    cloud: Cloud, title: str, request: Callable[[], str], vm_state: str
) -> tuple[int, int]:
    """Return the lowest numbers of statements and messages in ``TRIES`` requests.

    A periodic exchange can add to the cost of a request, but not to all of them.
    """
    costs = [measure_cost(cloud, request, vm_state) for _ in range(TRIES)]
    statements, messages = min(costs, key=lambda cost: cost[0].total() + cost[1].total())
    print(
        f"\n{title}: {statements.total()} statements {dict(statements)}, {messages.total()} messages {dict(messages)}"
    )
    return statements.total(), messages.total()


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_request_cost_in_statements_and_messages_is_bounded(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = new_cloud(kind)
    cloud.start()
    cloud.await_state(cloud.create(), states.ACTIVE)
    servers: list[str] = []

    def create() -> str:
        servers.extend(cloud.create())
        return servers[-1]

    def begin_on_next_server(key: str) -> Callable[[], str]:
        remaining = iter(servers)

        def begin() -> str:
            server = next(remaining)
            cloud.begin_action(server, key)
            return server

        return begin

    costs = {
        "create": measure_lowest_cost(cloud, f"{kind} create", create, states.ACTIVE),
        "stop": measure_lowest_cost(
            cloud, f"{kind} stop", begin_on_next_server("os-stop"), states.STOPPED
        ),
        "start": measure_lowest_cost(
            cloud, f"{kind} start", begin_on_next_server("os-start"), states.ACTIVE
        ),
        "delete": measure_lowest_cost(
            cloud, f"{kind} delete", begin_on_next_server("delete"), states.DELETED
        ),
    }
    assert {
        name: cost for name, cost in costs.items() if cost[0] > STATEMENTS or cost[1] > MESSAGES
    } == {}
    assert cloud.findings() == []


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_port_adds_bounded_cost_to_create_and_delete(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
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

    costs = {
        "create": measure_lowest_cost(cloud, f"{kind} create with a port", create, states.ACTIVE),
        "delete": measure_lowest_cost(cloud, f"{kind} delete with a port", delete, states.DELETED),
    }
    assert {
        name: cost
        for name, cost in costs.items()
        if cost[0] > STATEMENTS_WITH_PORT[name] or cost[1] > MESSAGES
    } == {}
    assert cloud.findings() == []
    assert len(cloud.ports.held) == 1


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_hard_server_group_and_dedicated_cpus_add_bounded_cost_to_create(
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
    costs = {
        "plain": measure_lowest_cost(
            cloud, f"{kind} create", lambda: cloud.create()[0], states.ACTIVE
        ),
        "group": measure_lowest_cost(
            cloud,
            f"{kind} create in a hard group",
            lambda: cloud.create(group=group)[0],
            states.ACTIVE,
        ),
        "parts": measure_lowest_cost(
            cloud,
            f"{kind} create with CPUs of its own",
            lambda: cloud.create(flavor=pinned)[0],
            states.ACTIVE,
        ),
    }
    added = {name: cost[0] - costs["plain"][0] for name, cost in costs.items()}
    assert {
        name: number for name, number in added.items() if number > ADDED_STATEMENTS[name]
    } == {}, costs
    assert {cost[1] for cost in costs.values()} == {costs["plain"][1]}, "no message more"
    assert cloud.findings() == []


def test_idle_hosts_cost_bounded_statements_and_only_heartbeat_messages(
    new_cloud: Callable[..., Cloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle hosts cost at most two statements a second, and one every five seconds for the keys.

    They cause no messages except heartbeats and the sweep's own message.
    """
    monkeypatch.setattr(service, "EXCHANGE_PERIOD_SECONDS", (0.2, 0.3))
    # On a busy machine, a lost answer would cause a sync.
    monkeypatch.setattr(service, "ANSWER_TIMEOUTS_SECONDS", (10.0, 2.0, 4.0))
    # No host reports its domains during the test.
    monkeypatch.setattr(heartbeats, "COMPARE_SOON_SECONDS", 3600.0)
    monkeypatch.setattr(heartbeats, "_spread", lambda host: heartbeats.COMPARE_SOON_SECONDS)
    cloud = new_cloud()
    cloud.start(hosts=4)
    cloud.await_state(cloud.create(8), states.ACTIVE)
    cloud.await_idle()
    sent, idle_at = cloud.network.sent, time.monotonic()
    before = sent["heartbeat"]
    # The conductor caches for a second that work waits for a host, which then syncs once more.
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
    statements_by_part = {
        part: number
        for part, number in spent.items()
        if part not in BACKGROUND - {FROM_HOSTS} | {"runner", "scheduler", Lane.NETWORK}
    }
    assert list(statements_by_part) == [FROM_HOSTS], spent
    assert statements_by_part[FROM_HOSTS] <= 2 * looks + looks // GOOD_FOR_SECONDS + 1
    assert set(sent - messages) <= {"heartbeat", "loop_back"}
