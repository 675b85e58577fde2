# SPDX-License-Identifier: Apache-2.0
"""Consistency of the tables of actions, statuses, event names, workflows and verbs."""

from __future__ import annotations

from collections import Counter

import pytest

from common.domain import states
from common.domain.states import ACTIONS, BY_WORKFLOW, VM_STATES, Action
from common.domain.verbs import VERBS
from conductor.workflows import WORKFLOWS

STRINGS = {
    name: value for name, value in vars(states).items() if name.isupper() and isinstance(value, str)
}
TASK_STATES = {value for value in STRINGS.values() if value not in VM_STATES}
ROWS = pytest.mark.parametrize("row", ACTIONS, ids=lambda row: f"{row.key}{row.when or ''}")


@ROWS
def test_action_row_has_a_policy_and_one_implementation(row: Action) -> None:
    assert row.policy.startswith("os_compute_api:")
    assert [row.workflow, row.query, row.immediate].count(None) == 2
    assert row.workflow is None or row.workflow in WORKFLOWS


@ROWS
def test_action_table_row_has_only_defined_states_and_http_status(row: Action) -> None:
    assert row.vm == states.ANY or set(row.vm) <= set(VM_STATES)
    assert row.task == states.ANY or set(row.task) <= TASK_STATES | {None}
    assert row.after is None or row.after in VM_STATES
    assert row.during is None or row.during in TASK_STATES
    assert row.success in (200, 201, 202, 204)


#: Actions without a task_state, as in Nova's API.
WITHOUT_TASK_STATE = {
    "trigger_crash_dump",
    "attach_interface",
    "detach_interface",
    "addSecurityGroup",
    "removeSecurityGroup",
    "confirmResize",
    "attach_share",
    "detach_share",
    "attach_volume",
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
}
UNCHANGED = WITHOUT_TASK_STATE - {"confirmResize"} | {
    "createImage",
    "createBackup",
    "os-migrateLive",
}


@ROWS
def test_action_row_has_task_state_and_final_state_unless_excepted(row: Action) -> None:
    if row.workflow:
        assert (row.during is None) == (row.key in WITHOUT_TASK_STATE)
        assert (row.after is None) == (row.key in UNCHANGED)
    else:
        assert (row.during, row.after, row.supersedes, row.locked) == (None, None, False, False)


@ROWS
def test_answer_after_of_an_action_is_the_name_of_a_step_of_its_workflow(row: Action) -> None:
    if row.answer_after is not None:
        assert row.workflow is not None
        assert row.answer_after in [step.name for step in WORKFLOWS[row.workflow].steps]


def test_action_rows_are_unique_for_body_and_vm_state() -> None:
    counts = Counter((row.key, row.when, vm_state) for row in ACTIONS for vm_state in row.vm)
    assert [place for place, number in counts.items() if number > 1] == []
    alone = {row.key for row in ACTIONS if row.vm == states.ANY}
    assert all(
        number == 1 for key, number in Counter(row.key for row in ACTIONS).items() if key in alone
    )
    for row in ACTIONS:
        match = states.action(row.key, row.when[1] if row.when else None)
        assert match is not None
        assert (match.key, match.when) == (row.key, row.when)
    assert states.action("reboot", "SIDEWAYS") is None
    assert states.action("os-levitate") is None


@ROWS
def test_action_rows_with_one_workflow_have_the_same_final_state(row: Action) -> None:
    if row.workflow:
        assert BY_WORKFLOW[row.workflow].after == row.after


@pytest.mark.parametrize("during", sorted({row.during for row in ACTIONS if row.during}))
def test_transient_task_state_can_be_superseded_by_delete(during: str) -> None:
    """A superseding action can end the running action, so no server hangs for ever."""
    rows = [row for row in ACTIONS if row.during == during]
    for row in rows:
        exits = [
            other
            for other in ACTIONS
            if other.supersedes and (other.task == states.ANY or during in other.task)
        ]
        assert "delete" in [other.name for other in exits], row.key


@pytest.mark.parametrize(
    "vm_state", sorted({row.after for row in ACTIONS if row.after} | {states.ERROR})
)
def test_final_vm_state_allows_delete_and_unless_deleted_another_action(vm_state: str) -> None:
    ways = [
        row.name for row in ACTIONS if row.workflow and (row.vm == states.ANY or vm_state in row.vm)
    ]
    assert "delete" in ways
    assert vm_state in (states.DELETED, states.BUILDING) or len(ways) > 1


def test_only_kinds_of_reboot_delete_and_evacuate_supersede_running_action() -> None:
    hard = states.action("reboot", "HARD")
    assert hard is not None
    assert states.REBOOTING in hard.task
    assert {row.name for row in ACTIONS if row.supersedes} == {
        "reboot",
        "delete",
        "forceDelete",
        "evacuate",
    }
    assert states.SPAWNING not in hard.task


STATUSES = {
    "BUILD",
    "ACTIVE",
    "REBOOT",
    "HARD_REBOOT",
    "REBUILD",
    "PASSWORD",
    "SHUTOFF",
    "PAUSED",
    "SUSPENDED",
    "ERROR",
    "DELETED",
    "SOFT_DELETED",
    "RESCUE",
    "RESIZE",
    "VERIFY_RESIZE",
    "REVERT_RESIZE",
    "MIGRATING",
    "SHELVED",
    "SHELVED_OFFLOADED",
}


@pytest.mark.parametrize(
    ("vm_state", "task_state", "status"),
    [
        ("building", "spawning", "BUILD"),
        ("active", None, "ACTIVE"),
        ("active", "powering-off", "ACTIVE"),
        ("active", "rebooting", "REBOOT"),
        ("active", "reboot_pending", "REBOOT"),
        ("active", "reboot_started", "REBOOT"),
        ("active", "rebooting_hard", "HARD_REBOOT"),
        ("stopped", None, "SHUTOFF"),
        ("stopped", "rebooting_hard", "HARD_REBOOT"),
        ("paused", None, "PAUSED"),
        ("suspended", None, "SUSPENDED"),
        ("error", None, "ERROR"),
        ("error", "deleting", "ERROR"),
        ("deleted", None, "DELETED"),
        ("soft-delete", None, "SOFT_DELETED"),
        ("rescued", None, "RESCUE"),
        ("resized", None, "VERIFY_RESIZE"),
        ("shelved", None, "SHELVED"),
        ("shelved_offloaded", None, "SHELVED_OFFLOADED"),
        ("active", "rebuilding", "REBUILD"),
        ("stopped", "rebuild_spawning", "REBUILD"),
        ("error", "rebuilding", "REBUILD"),
        ("active", "updating_password", "PASSWORD"),
        ("active", "image_uploading", "ACTIVE"),
        ("no such", None, "UNKNOWN"),
    ],
)
def test_status_of_vm_state_and_task_state_equals_the_status_of_the_api(
    vm_state: str, task_state: str | None, status: str
) -> None:
    assert states.status(vm_state, task_state) == status


def test_statuses_of_all_states_equal_those_of_the_api() -> None:
    assert {
        states.status(vm_state, task) for vm_state in VM_STATES for task in [None, *TASK_STATES]
    } == STATUSES


@pytest.mark.parametrize("name", sorted(STATUSES))
def test_vm_states_of_inverts_status_for_all_vm_and_task_states(name: str) -> None:
    """The expected states follow the rule in the docstring of ``vm_states_of``."""
    states_of_status = dict(states.vm_states_of(name))
    assert states_of_status
    for vm_state in VM_STATES:
        for task in [None, *sorted(TASK_STATES)]:
            if vm_state not in states_of_status:
                matches = False
            elif states_of_status[vm_state]:
                matches = task in states_of_status[vm_state]
            else:
                matches = states.status(vm_state, task) == states.status(vm_state, None)
            assert matches == (states.status(vm_state, task) == name), (vm_state, task)


def test_vm_states_of_unknown_status_is_empty() -> None:
    assert states.vm_states_of("UNKNOWN") == ()
    assert states.vm_states_of("active") == ()


def test_event_names_belong_to_steps_and_cover_the_workflows() -> None:
    steps = {(name, step.name) for name, workflow in WORKFLOWS.items() for step in workflow.steps}
    assert set(states.EVENT_NAMES) <= steps
    assert {workflow for workflow, _ in states.EVENT_NAMES} == set(WORKFLOWS)
    assert states.event_name("stop", "stop") == "compute_stop_instance"
    assert states.event_name("stop", "undo") == "conductor_undo"


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_workflow_steps_have_unique_names_a_reason_and_one_implementation(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow.name == name
    assert name in BY_WORKFLOW
    assert len({step.name for step in workflow.steps}) == len(workflow.steps) > 0
    for step in workflow.steps:
        assert step.why, f"{step.name} does not say why it stands there"
        ways = [way for way in (step.apply, step.command, step.call) if way is not None]
        has_only_undo = (
            step.undo is not None or step.undo_command is not None or step.undo_call is not None
        )
        assert len(ways) == 1 or ways == [step.apply, step.call] or (not ways and has_only_undo), (
            f"{step.name} is neither here, nor a call, nor a command"
        )
        assert step.prepare is None or step.apply is not None
        assert not (step.on_start or step.on_result) or step.command is not None
        assert (step.lane in WORKFLOWS.lanes) and (
            step.call is None or step.name in WORKFLOWS.lanes[step.lane]
        )
    first = workflow.steps[workflow.index(None)]
    assert first == next(step for step in workflow.steps if not step.by_name)
    with pytest.raises(LookupError, match="no step no such step in this release"):
        workflow.index("no such step")


def test_steps_of_equal_name_call_the_same_external_service_or_none() -> None:
    names = [name for steps in WORKFLOWS.lanes.values() for name in steps]
    inside = {
        step.name
        for workflow in WORKFLOWS.values()
        for step in workflow.steps
        if not (step.call or step.undo_call)
    }
    assert len(names) == len(set(names))
    assert inside & set(names) == set()


@pytest.mark.parametrize("name", sorted(VERBS))
def test_verb_with_runs_once_does_not_retry_until_done(name: str) -> None:
    assert not (VERBS[name].runs_once and VERBS[name].retries_until_done)
