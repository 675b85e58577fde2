# SPDX-License-Identifier: Apache-2.0
"""The metrics: gauges that are read from each database, and the counters of a server's actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.service import metrics
from common.store import schema
from common.store.engine import Store, now
from common.store.views import gauges
from conductor.gauges import KEEP_SECONDS, DatabaseGauges
from tests.functional.cloud import Cloud
from tests.unit.common.test_metrics import new_conf

MAX_STATEMENTS = 10


@pytest.fixture
def metrics_process() -> Iterator[None]:
    metrics.start(new_conf(1), "conductor")
    yield
    metrics.stop()


def index_samples(samples: list[gauges.Sample]) -> dict[tuple[Any, ...], float]:
    return {(name, *labels): value for name, labels, value in samples}


@pytest.mark.parametrize("kind", ["sqlite", "mariadb", "postgresql"])
def test_gauges_are_read_from_each_database_with_ten_statements(
    new_cloud: Callable[..., Cloud], kind: str
) -> None:
    cloud = new_cloud(kind)
    cloud.start()
    [server] = cloud.create()
    cloud.await_state([server], states.ACTIVE)
    cloud.await_idle()
    store = cloud.watcher
    store.write(lambda tx: _add_stuck_action_and_cleanup(tx, server))
    statements: list[str] = []
    sa.event.listen(
        store.engine, "before_cursor_execute", lambda *event: statements.append(event[2])
    )
    gauge_values = index_samples(store.read(lambda tx: list(gauges.read(tx))))
    assert (
        len([statement for statement in statements if statement.startswith("SELECT")])
        == MAX_STATEMENTS
    )
    assert gauge_values["actions", "create", "boot", "stuck"] == 1
    assert 99 < gauge_values["actions_oldest_seconds", "create", "boot", "stuck"] < 200
    assert gauge_values["actions_due_late_seconds",] < 60
    assert (
        gauge_values["cleanups", "ports"],
        gauge_values["outbox",],
        gauge_values["pending_removals",],
    ) == (
        1,
        0,
        0,
    )
    assert 49 < gauge_values["cleanups_oldest_seconds", "ports"] < 150
    assert gauge_values["service_up", "h1", "nova-compute"] == 1
    assert gauge_values["service_silence_seconds", "h1", "nova-compute"] < 60
    assert (
        gauge_values["host_used", "h1", "VCPU"] == 1 < gauge_values["host_capacity", "h1", "VCPU"]
    )
    assert {name for name, *_ in gauge_values} <= set(gauges.GAUGES)


def _add_stuck_action_and_cleanup(tx: Any, server: str) -> None:
    old = tx.execute(sa.select(schema.actions).where(schema.actions.c.server_id == server)).first()
    stuck = {"id": ids.new(), "state": "stuck", "step": "boot", "due_at": None}
    row = {**old._mapping, **stuck, "created_at": now() - 100_000_000}
    tx.execute(sa.insert(schema.actions).values(row))
    tx.execute(
        sa.insert(schema.cleanups).values(
            kind="ports",
            target=server,
            place="",
            args={},
            server_id=server,
            project_id="project",
            why="it does not answer",
            created_at=now() - 50_000_000,
            due_at=now() + 3600_000_000,
        )
    )


def test_metrics_count_actions_claims_steps_and_commands_of_create(
    metrics_process: None, cloud: Cloud
) -> None:
    [server] = cloud.create()
    cloud.await_state([server], states.ACTIVE)
    cloud.await_idle()
    cloud.await_true(
        lambda: 'kilonova_host_commands_total{event="done"' in metrics.text(), 10, "a count"
    )
    text = metrics.text()
    for line in (
        'kilonova_actions_ended_total{state="done",workflow="create"} 1.0',
        'kilonova_claims_total{result="taken"} 1.0',
        'kilonova_scheduler_selections_total{result="hosts"} 1.0',
        'kilonova_action_steps_total{event="succeeded",step="place",workflow="create"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert 'kilonova_host_exchange_seconds_count{result="answered"}' in text


class FakeStore:
    """A store that can be down, and counts its reads."""

    def __init__(self) -> None:
        self.reads, self.is_away = 0, False

    def read(self, work: Callable[[Any], Any]) -> list[gauges.Sample]:
        self.reads += 1
        if self.is_away:
            raise errors.NoStore()
        return [("pending_removals", (), 3.0)]


def test_gauges_are_cached_and_left_out_when_database_is_down(metrics_process: None) -> None:
    store, at = FakeStore(), [0.0]
    fake_store: Store = store  # type: ignore[assignment]  # the same method
    metrics.collect(DatabaseGauges(fake_store, lambda: at[0]))
    for _ in range(5):
        assert "kilonova_pending_removals 3.0" in metrics.text()
    assert store.reads == 1
    at[0], store.is_away = KEEP_SECONDS, True
    assert "kilonova_pending_removals 3.0" not in metrics.text()
    store.is_away = False
    assert "kilonova_pending_removals 3.0" in metrics.text()
