# SPDX-License-Identifier: Apache-2.0
"""The usage audit on three databases: who ran in a period that is over is told once, whoever is
killed meanwhile."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.clock import SECOND, parse
from common.notifications.periods import Periods
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.notifications import usage_audit
from conductor.notifications.notification_sender import AUDIT_SECONDS
from tests.contract.test_outbox import Broker, Time, add_servers, teller
from tests.told import read_outbox, read_server_events

MARCH = (parse("2026-03-01T00:00:00Z"), parse("2026-04-01T00:00:00Z"))


@pytest.fixture
def april(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """March has just ended."""
    store.notify_with(NotificationSettings("api1"))
    monkeypatch.setattr(usage_audit, "moment", lambda tx: MARCH[1] + 5 * SECOND)
    monkeypatch.setattr(usage_audit, "AT_ONCE", 2)
    monkeypatch.setattr(usage_audit, "LOOKED_AT", 3)
    monkeypatch.setattr(usage_audit, "NEXT", usage_audit.NEXT.limit(3))
    return store


def ran(store: Store, since: str, until: str | None = None, **values: object) -> str:
    [server] = add_servers(store)
    at = {
        "launched_at": parse(since),
        "terminated_at": until and parse(until),
        "deleted": int(until is not None),
    }
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(**at | values)
        )
    )
    return server


def audit(store: Store, periods: str = "month") -> None:
    while store.write(lambda tx: usage_audit.step(tx, Periods.of(periods))):
        pass


def test_every_server_that_ran_in_a_period_is_told_once(april: Store) -> None:
    used = {
        ran(april, "2026-03-31T23:00:00Z"),
        ran(april, "2025-01-01T00:00:00Z"),
        ran(april, "2026-03-02T00:00:00Z"),
        ran(april, "2026-02-01T00:00:00Z", "2026-03-01T00:00:01Z"),
        ran(april, "2026-02-01T00:00:00Z", "2026-04-01T00:00:01Z"),
    }
    ran(april, "2026-02-01T00:00:00Z", "2026-02-28T00:00:00Z")
    ran(april, "2026-04-01T00:00:01Z")
    ran(april, "2026-02-01T00:00:00Z", vm_state=states.SHELVED_OFFLOADED)
    month = Periods.of("month")
    assert not april.read(lambda tx: usage_audit.is_done(tx, month))
    audit(april)
    assert april.read(lambda tx: usage_audit.is_done(tx, month))
    audit(april)
    rows = read_outbox(april)
    assert [row.event for row in rows] == ["instance.exists"] * 5
    assert {row.key for row in rows} == used
    assert {(*row.body["about"]["period"],) for row in rows} == {MARCH}


def test_servers_of_years_ago_are_passed_by_in_small_steps(april: Store) -> None:
    used = {ran(april, "2026-03-02T00:00:00Z") for _ in range(2)}
    for _ in range(9):
        ran(april, "2025-02-01T00:00:00Z", "2025-02-28T00:00:00Z")
    steps = 1
    while april.write(lambda tx: usage_audit.step(tx, Periods.of("month"))):
        steps += 1
    assert {row.key for row in read_outbox(april)} == used
    assert steps >= 11 / 3, "each step looks at three"


def test_an_audit_goes_on_where_its_conductor_was_killed(
    april: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another goes on, and ends the period that was begun before it looks at the next."""
    used = sorted(ran(april, "2026-03-02T00:00:00Z") for _ in range(5))
    assert april.write(lambda tx: usage_audit.step(tx, Periods()))
    assert [row.key for row in read_outbox(april)] == used[:2]
    monkeypatch.setattr(usage_audit, "moment", lambda tx: parse("2026-05-01T00:00:01Z"))
    audit(april)
    assert [row.key for row in read_outbox(april)] == used
    audit(april)
    assert [row.key for row in read_outbox(april)] == used * 2
    assert [row.body["about"]["period"][1] for row in read_outbox(april)] == [
        *[MARCH[1]] * 5,
        *[parse("2026-05-01T00:00:00Z")] * 5,
    ]


def test_two_conductors_tell_each_server_once(april: Store) -> None:
    used = sorted(ran(april, "2026-03-02T00:00:00Z") for _ in range(9))
    threads = [threading.Thread(target=audit, args=(april,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(row.key for row in read_outbox(april)) == used


def test_an_audit_is_asked_for_and_looks_once_a_minute(april: Store) -> None:
    server = ran(april, "2026-03-02T00:00:00Z")
    one = teller(april, Broker())
    one.audit_usage()
    assert read_outbox(april) == []
    one.audit = Periods()
    one.audit_usage()
    assert read_server_events(april, server) == ["exists"]
    april.write(lambda tx: tx.execute(sa.delete(schema.leases)))
    for seconds, count in ((AUDIT_SECONDS - 1, 1), (AUDIT_SECONDS, 2)):
        cast(Time, one.clock).seconds = seconds
        one.audit_usage()
        assert len(read_outbox(april)) == count
