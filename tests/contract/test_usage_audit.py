# SPDX-License-Identifier: Apache-2.0
"""The usage audit on SQLite, PostgreSQL and MariaDB.

Each server and completed period has one notification, even if conductors are killed.
"""

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
from tests.contract.test_outbox import Broker, Time, add_servers, new_sender
from tests.outbox_events import read_outbox, read_server_events

MARCH = (parse("2026-03-01T00:00:00Z"), parse("2026-04-01T00:00:00Z"))


@pytest.fixture
def april(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a store at a time when March has just ended."""
    store.notify_with(NotificationSettings("api1"))
    monkeypatch.setattr(usage_audit, "moment", lambda tx: MARCH[1] + 5 * SECOND)
    monkeypatch.setattr(usage_audit, "AT_ONCE", 2)
    monkeypatch.setattr(usage_audit, "LOOKED_AT", 3)
    monkeypatch.setattr(usage_audit, "NEXT", usage_audit.NEXT.limit(3))
    return store


def add_server_with_times(
    store: Store, since: str, until: str | None = None, **values: object
) -> str:
    [server] = add_servers(store)
    times = {
        "launched_at": parse(since),
        "terminated_at": until and parse(until),
        "deleted": int(until is not None),
    }
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(**times | values)
        )
    )
    return server


def audit(store: Store, periods: str = "month") -> None:
    while store.write(lambda tx: usage_audit.step(tx, Periods.of(periods))):
        pass


def test_usage_audit_notifies_once_per_server_active_in_period(april: Store) -> None:
    active_servers = {
        add_server_with_times(april, "2026-03-31T23:00:00Z"),
        add_server_with_times(april, "2025-01-01T00:00:00Z"),
        add_server_with_times(april, "2026-03-02T00:00:00Z"),
        add_server_with_times(april, "2026-02-01T00:00:00Z", "2026-03-01T00:00:01Z"),
        add_server_with_times(april, "2026-02-01T00:00:00Z", "2026-04-01T00:00:01Z"),
    }
    add_server_with_times(april, "2026-02-01T00:00:00Z", "2026-02-28T00:00:00Z")
    add_server_with_times(april, "2026-04-01T00:00:01Z")
    add_server_with_times(april, "2026-02-01T00:00:00Z", vm_state=states.SHELVED_OFFLOADED)
    month = Periods.of("month")
    assert not april.read(lambda tx: usage_audit.is_done(tx, month))
    audit(april)
    assert april.read(lambda tx: usage_audit.is_done(tx, month))
    audit(april)
    rows = read_outbox(april)
    assert [row.event for row in rows] == ["instance.exists"] * 5
    assert {row.key for row in rows} == active_servers
    assert {(*row.body["about"]["period"],) for row in rows} == {MARCH}


def test_usage_audit_skips_old_servers_in_small_steps(april: Store) -> None:
    active_servers = {add_server_with_times(april, "2026-03-02T00:00:00Z") for _ in range(2)}
    for _ in range(9):
        add_server_with_times(april, "2025-02-01T00:00:00Z", "2025-02-28T00:00:00Z")
    steps = 1
    while april.write(lambda tx: usage_audit.step(tx, Periods.of("month"))):
        steps += 1
    assert {row.key for row in read_outbox(april)} == active_servers
    assert steps >= 11 / 3, "each step looks at three"


def test_usage_audit_continues_after_kill_of_conductor(
    april: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conductor completes the unfinished period before the next one."""
    active_servers = sorted(add_server_with_times(april, "2026-03-02T00:00:00Z") for _ in range(5))
    assert april.write(lambda tx: usage_audit.step(tx, Periods()))
    assert [row.key for row in read_outbox(april)] == active_servers[:2]
    monkeypatch.setattr(usage_audit, "moment", lambda tx: parse("2026-05-01T00:00:01Z"))
    audit(april)
    assert [row.key for row in read_outbox(april)] == active_servers
    audit(april)
    assert [row.key for row in read_outbox(april)] == active_servers * 2
    assert [row.body["about"]["period"][1] for row in read_outbox(april)] == [
        *[MARCH[1]] * 5,
        *[parse("2026-05-01T00:00:00Z")] * 5,
    ]


def test_parallel_usage_audits_notify_once_per_server(april: Store) -> None:
    active_servers = sorted(add_server_with_times(april, "2026-03-02T00:00:00Z") for _ in range(9))
    threads = [threading.Thread(target=audit, args=(april,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(row.key for row in read_outbox(april)) == active_servers


def test_usage_audit_runs_only_with_audit_periods_and_once_a_minute(april: Store) -> None:
    server = add_server_with_times(april, "2026-03-02T00:00:00Z")
    sender = new_sender(april, Broker())
    sender.audit_usage()
    assert read_outbox(april) == []
    sender.audit = Periods()
    sender.audit_usage()
    assert read_server_events(april, server) == ["exists"]
    april.write(lambda tx: tx.execute(sa.delete(schema.leases)))
    for seconds, count in ((AUDIT_SECONDS - 1, 1), (AUDIT_SECONDS, 2)):
        cast(Time, sender.clock).seconds = seconds
        sender.audit_usage()
        assert len(read_outbox(april)) == count
