# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of idle hosts: when nothing is asked of the database, and when the host is to sync."""

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
    """Hosts that have opened a session, to a conductor that has known them for longer than a
    minute."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    cloud.store.write(lambda tx: services.enrol(tx, "c1", Binary.CONDUCTOR))
    pass_by(cloud, 5)
    cloud.time.pass_by(2 * COMPARE_SOON_SECONDS)
    pass_by(cloud, 15)
    return cloud


def pass_by(cloud: Cloud, seconds: float) -> None:
    """Everybody does what they do every five seconds."""
    for _ in range(int(seconds) // 5 + 1):
        cloud.round()
        cloud.time.pass_by(4)


@contextmanager
def statements(cloud: Cloud) -> Iterator[list[str]]:
    """What is asked of the database meanwhile."""
    said: list[str] = []

    def count(*told: object) -> None:
        said.append(str(told[2]))

    sa.event.listen(cloud.store.engine, "before_cursor_execute", count)
    yield said
    sa.event.remove(cloud.store.engine, "before_cursor_execute", count)


def beat(cloud: Cloud, host: Host) -> bool:
    """Is it answered that nothing waits for the host?"""
    said = host.agent.heartbeat()
    assert said is not None
    return cloud.engine.heartbeats.answer(said)


def test_heartbeats_of_all_hosts_cost_two_statements_a_look(cloud: Cloud) -> None:
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS + 1)
    with statements(cloud) as said:
        assert [beat(cloud, host) for host in cloud.hosts.values()] == [True, True]
    assert len(said) == 2
    with statements(cloud) as said:
        assert [beat(cloud, host) for host in cloud.hosts.values()] == [True, True]
    assert said == []


def test_a_host_without_work_hears_from_nobody_else(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it looks at its domains itself, it syncs only to have them compared."""
    monkeypatch.setattr(heartbeats, "COMPARE_SECONDS", 300.0)
    cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    pass_by(cloud, COMPARE_SOON_SECONDS)
    syncs: list[str] = []
    handle = reports.handle
    monkeypatch.setattr(
        reports,
        "handle",
        lambda engine, said: syncs.extend(one.host for one in said) or handle(engine, said),
    )
    pass_by(cloud, 300)
    assert 1 <= syncs.count("h1") <= 2
    assert cloud.store.read(lambda tx: services.is_up(tx, "h1"))


def test_a_command_or_a_debt_has_its_host_sync(cloud: Cloud) -> None:
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
    said = Heartbeat("h1", cloud.hosts["h1"].agent.session)
    assert not cloud.engine.heartbeats.answer(said)


def test_another_session_or_an_unknown_host_has_to_sync(cloud: Cloud) -> None:
    session = cloud.hosts["h1"].agent.session
    assert not cloud.engine.heartbeats.answer(Heartbeat("h1", session + 1))
    assert not cloud.engine.heartbeats.answer(Heartbeat("h9", session))


def test_domains_that_changed_unseen_are_told_at_the_next_look(cloud: Cloud) -> None:
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    pass_by(cloud, COMPARE_SOON_SECONDS)
    cloud.hosts["h1"].driver.host.power_off(server)
    pass_by(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.STOPPED


def test_a_state_told_during_an_action_is_compared_soon_after_it(cloud: Cloud) -> None:
    """The guest goes off while an action has the server, which then ends without its host."""
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    pass_by(cloud, COMPARE_SOON_SECONDS)
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(action="a")))
    cloud.hosts["h1"].driver.host.power_off(server)
    pass_by(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.ACTIVE
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(action=None)))
    pass_by(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.STOPPED


@pytest.mark.parametrize("first", ["sweep", "heartbeats"])
def test_a_database_that_was_set_back_hears_from_all_hosts_soon(
    cloud: Cloud, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    """Whatever the conductor does first then."""
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    pass_by(cloud, 2 * COMPARE_SOON_SECONDS)
    mine = schema.heartbeats.c.binary == Binary.CONDUCTOR
    cloud.store.write(
        lambda tx: (
            tx.execute(
                sa.update(schema.servers).values(
                    power_state=states.SHUTDOWN, vm_state=states.STOPPED
                )
            ),
            tx.execute(
                sa.update(schema.heartbeats)
                .where(mine)
                .values(seen_at=schema.heartbeats.c.seen_at - 3_000_000)
            ),
        )
    )
    if first == "sweep":
        sweep(cloud.engine, cloud.watch, [], True)
    pass_by(cloud, COMPARE_SOON_SECONDS)
    assert cloud.show(server).vm_state == states.ACTIVE
    assert "set back" in caplog.text


def test_a_host_that_knows_what_the_database_has_lost_makes_all_tell(cloud: Cloud) -> None:
    """The conductor's own sign of life was not among what was lost."""
    one, other = (cloud.create(host=host, forced=True, networks=[])[0] for host in ("h1", "h2"))
    cloud.settle()
    pass_by(cloud, 2 * COMPARE_SOON_SECONDS)
    for key in ("os-stop", "os-start", "os-stop", "os-start"):
        cloud.ask(one, key)
        cloud.settle()
    cloud.store.write(
        lambda tx: (
            tx.execute(sa.update(schema.servers).values(fence=1)),
            tx.execute(
                sa.update(schema.servers)
                .where(schema.servers.c.id == other)
                .values(power_state=states.SHUTDOWN, vm_state=states.STOPPED)
            ),
        )
    )
    cloud.ask(one, "os-stop")
    pass_by(cloud, COMPARE_SOON_SECONDS)
    assert (cloud.show(one).vm_state, cloud.show(other).vm_state) == (states.STOPPED, states.ACTIVE)


def test_while_the_database_says_nothing_no_lease_is_renewed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(work: object) -> None:
        raise ConnectionError("it is gone")

    monkeypatch.setattr(cloud.store, "read", gone)
    cloud.time.pass_by(LOOK_INTERVAL_SECONDS)
    with pytest.raises(ConnectionError):
        beat(cloud, cloud.hosts["h1"])
