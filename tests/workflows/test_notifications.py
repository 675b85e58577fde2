# SPDX-License-Identifier: Apache-2.0
"""Tests of the notifications of workflows and of their order, also after a process was killed."""

from __future__ import annotations

from collections import Counter

import pytest
import sqlalchemy as sa

from common.domain.errors import Conflict
from common.service.notification_options import VM_AND_TASK_STATE, VM_STATE, NotificationSettings
from conductor.workflows import WORKFLOWS
from deploy.operator.store import stuck_actions
from tests.outbox_events import read_outbox, read_server_events
from tests.schemas import memory_store
from tests.workflows.expected_notifications import EVENTS, NAMES, expected
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud, Time
from tests.workflows.test_every_workflow import read_fault_points


def test_scenarios_and_expected_notifications_match_workflow_registry() -> None:
    assert {name.partition(":")[0] for name in SCENARIOS} == set(WORKFLOWS)
    assert set(EVENTS) | set(NAMES) <= set(WORKFLOWS)


@pytest.mark.parametrize(
    ("workflow", "interval"),
    [
        # Each cell of the fault matrix compares notifications, too.
        ("delete", 1),
        pytest.param("create", 1, marks=pytest.mark.slice("operations")),
        pytest.param("resize", 1, marks=pytest.mark.slice("moves")),
        pytest.param("live_migrate", 1, marks=pytest.mark.slice("moves")),
    ],
)
def test_workflow_sends_same_notifications_when_process_is_killed(
    workflow: str, interval: int
) -> None:
    """Each run kills a process at one fault point. The points are ``interval`` apart."""
    for number in range(0, len(read_fault_points(workflow)), interval):
        time = Time()
        cloud = Cloud(memory_store(time), time)
        trial = trial_of(cloud, workflow)
        cloud.store.notify_with(NotificationSettings("api"))
        trial.crash_at(number)
        trial.begin()
        trial.run_through_crashes()
        assert read_server_events(cloud.store, trial.server) == expected(workflow), (
            f"killed at {trial.hits[number]}"
        )
        cloud.store.close()


def test_create_without_valid_host_notifies_error_with_reason(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    for name in cloud.hosts:
        cloud.force_down(name)
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.settle()
    rows = read_outbox(cloud.store)
    assert [row.event for row in rows] == [
        "instance.create.start",
        "compute_task.build_instances.error",
        "instance.create.error",
    ]
    assert {row.body["about"]["fault"]["exception"] for row in rows[1:]} == {"NoValidHost"}


def test_delete_notifies_error_of_superseded_snapshot(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    cloud.advance()
    cloud.ask(trial.server, "delete")
    cloud.settle()
    assert read_server_events(cloud.store, trial.server) == [
        "snapshot.start",
        "snapshot.error",
        *expected("delete"),
    ]
    assert read_outbox(cloud.store)[1].body["about"]["fault"]["exception"] == "Superseded"


def test_kilonova_action_fail_of_overdue_action_notifies_error(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    cloud.store.notify_with(NotificationSettings("api"))
    trial.begin()
    action = cloud.show(trial.server).action
    with pytest.raises(Conflict):
        cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "Enough."))
    assert read_server_events(cloud.store, trial.server) == ["power_off.start"], (
        "the refused settle sent a notification"
    )
    cloud.time.pass_by(700)
    cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "Enough."))
    assert read_server_events(cloud.store, trial.server) == ["power_off.start", "power_off.error"]
    assert read_outbox(cloud.store)[-1].body["object"]["vm_state"] == "error"


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        (VM_STATE, [("active", "stopped")]),
        (VM_AND_TASK_STATE, [(None, "powering-off"), ("powering-off", None)]),
    ],
)
def test_state_changes_are_notified_as_set_by_notify_on_state_change(
    cloud: Cloud, setting: str, changes: list[tuple[str, str]]
) -> None:
    trial = trial_of(cloud, "stop")
    cloud.store.notify_with(NotificationSettings("api", setting))
    trial.begin()
    cloud.settle()
    rows = [row for row in read_outbox(cloud.store) if row.event == "instance.update"]
    name = "state" if setting == VM_STATE else "task_state"
    field = "vm_state" if setting == VM_STATE else "task_state"
    assert [
        (row.body["about"][f"old_{name}"], row.body["object"][field]) for row in rows
    ] == changes


def test_notifications_are_not_written_when_switched_off(cloud: Cloud) -> None:
    trial = trial_of(cloud, "resize")
    trial.begin()
    cloud.settle()
    assert read_outbox(cloud.store) == []


def test_notifications_of_twelve_servers_need_as_few_statements_as_of_one(cloud: Cloud) -> None:
    cloud.equip(1)
    cloud.store.notify_with(NotificationSettings("api"))
    cloud.round()
    statements: list[str] = []

    @sa.event.listens_for(cloud.store.engine, "before_cursor_execute")
    def record(connection: object, cursor: object, statement: str, *more: object) -> None:
        if "notifications" in statement or "key_fingerprint" in statement:
            statements.append(statement.split()[0])

    counts = []
    for number in (1, 12):
        servers = cloud.create(number)
        statements.clear()
        cloud.settle()
        counts.append(Counter(statements))
        assert {tuple(read_server_events(cloud.store, server)) for server in servers} == {
            ("create.start", "create.end")
        }
    assert counts[0] == counts[1] == {"SELECT": 1, "INSERT": 1}
