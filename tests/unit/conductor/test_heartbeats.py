# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of hosts: their cost in statements, and the cases in which a host must sync.

The tests run a simulated cloud on a database in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import Heartbeat
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.hosts import services
from conductor.engine import heartbeats, reports
from conductor.engine.heartbeats import COMPARE_SOON_SECONDS, LOOK_INTERVAL_SECONDS
from conductor.engine.sweep import sweep
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Host, Time


@pytest.fixture
def cloud() -> Cloud:
    """Return a cloud with registered hosts that the conductor has watched for over a minute."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    cloud.store.write(lambda tx: services.enrol(tx, "c1", Binary.CONDUCTOR))
    run_rounds(cloud, 5)
    cloud.time.pass_by(2 * COMPARE_SOON_SECONDS)
    run_rounds(cloud, 15)
    return cloud


def run_rounds(cloud: Cloud, seconds: float) -> None:
    """Let hosts and conductor do their periodic work, in rounds of five seconds."""
    for _ in range(int(seconds) // 5 + 1):
        cloud.round()
        cloud.time.pass_by(4)


@contextmanager
def statements(cloud: Cloud) -> Iterator[list[str]]:
    """Yield a list that receives the SQL statements executed in the block."""
    executed: list[str] = []

    def count(*arguments: object) -> None:
        executed.append(str(arguments[2]))

    sa.event.listen(cloud.store.engine, "before_cursor_execute", count)
    yield executed
    sa.event.remove(cloud.store.engine, "before_cursor_execute", count)


def beat(cloud: Cloud, host: Host) -> bool:
    """Return True if the conductor answers the host's heartbeat, so that the host need not sync."""
    heartbeat = host.agent.heartbeat()
    assert heartbeat is not None
    return cloud.engine.heartbeats.answer(heartbeat)


def test_heartbeats_of_all_hosts_cost_two_sql_statements_an_interval(cloud: Cloud) -> None:
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS + 1)
    with statements(cloud) as executed:
        assert [beat(cloud, host) for host in cloud.hosts.values()] == [True, True]
    assert len(executed) == 2
    with statements(cloud) as executed:
        assert [beat(cloud, host) for host in cloud.hosts.values()] == [True, True]
    assert executed == []


def test_idle_host_syncs_only_once_or_twice_per_comparison_period(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle host syncs only for the periodic comparison of its domains."""
    monkeypatch.setattr(heartbeats, "COMPARE_SECONDS", 300.0)
    cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    syncs: list[str] = []
    handle = reports.handle
    monkeypatch.setattr(
        reports,
        "handle",
        lambda engine, reported: (
            syncs.extend(report.host for report in reported) or handle(engine, reported)
        ),
    )
    run_rounds(cloud, 300)
    assert 1 <= syncs.count("h1") <= 2
    assert cloud.store.read(lambda tx: services.is_up(tx, "h1"))


def test_heartbeat_of_host_with_command_or_guest_to_remove_requires_sync(cloud: Cloud) -> None:
    cloud.lose = lambda what: what == "do"
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.advance()
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS)
    assert [beat(cloud, host) for host in cloud.hosts.values()] == [False, True]
    cloud.settle()
    cloud.cut.add("h1")
    cloud.ask(server, "delete")
    cloud.advance()
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS)
    assert (
        beat(cloud, cloud.hosts["h2"]),
        cloud.store.read(lambda tx: tx.execute(sa.select(schema.guests.c.wanted)).scalar()),
    ) == (True, "absent")
    heartbeat = Heartbeat("h1", cloud.hosts["h1"].agent.session)
    assert not cloud.engine.heartbeats.answer(heartbeat)


def test_heartbeat_of_old_session_or_unknown_host_requires_sync(cloud: Cloud) -> None:
    session = cloud.hosts["h1"].agent.session
    assert not cloud.engine.heartbeats.answer(Heartbeat("h1", session + 1))
    assert not cloud.engine.heartbeats.answer(Heartbeat("h9", session))


def test_domain_stopped_without_an_event_is_stored_at_the_next_comparison(cloud: Cloud) -> None:
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    cloud.hosts["h1"].driver.host.power_off(server)
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.STOPPED


def test_guest_stopped_during_an_action_is_stored_as_stopped_after_it(cloud: Cloud) -> None:
    """The guest stops during an action, and the action ends without a message to the host."""
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(action="a")))
    cloud.hosts["h1"].driver.host.power_off(server)
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.ACTIVE
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(action=None)))
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.STOPPED


@pytest.mark.parametrize("first", ["sweep", "heartbeats"])
def test_restored_database_with_old_heartbeat_gets_states_of_all_domains(
    cloud: Cloud, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    """The conductor may notice the jump in its sweep or at a heartbeat."""
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    run_rounds(cloud, 2 * COMPARE_SOON_SECONDS)
    own_row = schema.heartbeats.c.binary == Binary.CONDUCTOR
    cloud.store.write(
        lambda tx: (
            tx.execute(
                sa.update(schema.servers).values(
                    power_state=states.SHUTDOWN, vm_state=states.STOPPED
                )
            ),
            tx.execute(
                sa.update(schema.heartbeats)
                .where(own_row)
                .values(seen_at=schema.heartbeats.c.seen_at - 3_000_000)
            ),
        )
    )
    if first == "sweep":
        sweep(cloud.engine, cloud.watch, [], True)
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.ACTIVE
    assert "set back" in caplog.text


def test_restored_database_with_old_fence_gets_states_of_all_domains(cloud: Cloud) -> None:
    """The conductor's own heartbeat row is not set back, so only a host's fence shows the loss."""
    busy_server, idle_server = (
        cloud.create(host=host, forced=True, networks=[])[0] for host in ("h1", "h2")
    )
    cloud.settle()
    run_rounds(cloud, 2 * COMPARE_SOON_SECONDS)
    for key in ("os-stop", "os-start", "os-stop", "os-start"):
        cloud.ask(busy_server, key)
        cloud.settle()
    cloud.store.write(
        lambda tx: (
            tx.execute(sa.update(schema.servers).values(fence=1)),
            tx.execute(
                sa.update(schema.servers)
                .where(schema.servers.c.id == idle_server)
                .values(power_state=states.SHUTDOWN, vm_state=states.STOPPED)
            ),
        )
    )
    cloud.ask(busy_server, "os-stop")
    run_rounds(cloud, COMPARE_SOON_SECONDS)
    assert (cloud.show(busy_server).vm_state, cloud.show(idle_server).vm_state) == (
        states.STOPPED,
        states.ACTIVE,
    )


def test_heartbeat_answer_raises_while_the_database_is_unreachable(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: object) -> None:
        raise ConnectionError("it is gone")

    monkeypatch.setattr(cloud.store, "read", fail)
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS)
    with pytest.raises(ConnectionError):
        beat(cloud, cloud.hosts["h1"])
