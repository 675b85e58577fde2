# SPDX-License-Identifier: Apache-2.0
"""Tests of ``scenarios.watch``: the doctor runs after rounds with changes, and every 30 seconds."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from common.store import schema
from tests.workflows.scenarios import trial_of, watch
from tests.workflows.simulator import Cloud


def change(cloud: Cloud, table: sa.Table, **values: object) -> None:
    cloud.store.write(lambda tx: tx.execute(sa.update(table).values(values)))


def test_simulator_watcher_finds_damaged_row_after_heartbeat_rounds(cloud: Cloud) -> None:
    trial_of(cloud, "live_migrate")
    before = cloud.changes()
    for _ in range(3):
        cloud.round()
    assert cloud.changes() == before, "heartbeats count as changes"
    change(cloud, schema.servers, vcpus=99)
    with pytest.raises(AssertionError, match="are counted for the quota"):
        cloud.round()


def test_simulator_watcher_finds_damage_in_first_round_of_copied_cloud(cloud: Cloud) -> None:
    """The copy and the original have the same count of changes, so the watcher starts anew."""
    trial_of(cloud, "live_migrate")
    change(cloud, schema.servers, vcpus=99)
    with pytest.raises(AssertionError, match="are counted for the quota"):
        cloud.round()


def test_simulator_watcher_finds_overdue_action_after_unchanged_rounds(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    watch(cloud)
    trial.begin()
    change(cloud, schema.actions, workflow="unknown")
    cloud.round()
    with pytest.raises(AssertionError, match="no conductor takes the action"):
        cloud.idle(1200)
