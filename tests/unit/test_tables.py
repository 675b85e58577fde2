# SPDX-License-Identifier: Apache-2.0
"""The tables, row by row: actions, statuses, event names and workflows say nothing that contradicts
itself."""

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
def test_every_action_has_a_policy_and_somebody_who_does_it(row: Action) -> None:
    assert row.policy.startswith("os_compute_api:")
    assert [row.workflow, row.query, row.immediate].count(None) == 2
    assert row.workflow is None or row.workflow in WORKFLOWS


@ROWS
def test_every_action_speaks_of_known_states(row: Action) -> None:
    assert row.vm == states.ANY or set(row.vm) <= set(VM_STATES)
    assert row.task == states.ANY or set(row.task) <= TASK_STATES | {None}
    assert row.after is None or row.after in VM_STATES
    assert row.during is None or row.during in TASK_STATES
    assert row.success in (200, 201, 202, 204)


#: Actions that no task_state shows, as the API has it, and those that leave the server as it was.
UNSEEN = {
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
UNCHANGED = UNSEEN - {"confirmResize"} | {"createImage", "createBackup", "os-migrateLive"}


@ROWS
def test_what_changes_a_server_can_be_seen_meanwhile_and_afterwards(row: Action) -> None:
    if row.workflow:
        assert (row.during is None) == (row.key in UNSEEN)
        assert (row.after is None) == (row.key in UNCHANGED)
    else:
        assert (row.during, row.after, row.supersedes, row.locked) == (None, None, False, False)


@ROWS
def test_an_action_that_waits_for_a_step_waits_for_one_that_exists(row: Action) -> None:
    if row.answer_after is not None:
        assert row.workflow is not None
        assert row.answer_after in [step.name for step in WORKFLOWS[row.workflow].steps]


def test_no_two_rows_answer_to_the_same_body_in_the_same_state() -> None:
    taken = Counter((row.key, row.when, vm_state) for row in ACTIONS for vm_state in row.vm)
    assert [place for place, number in taken.items() if number > 1] == []
    alone = {row.key for row in ACTIONS if row.vm == states.ANY}
    assert all(
        number == 1 for key, number in Counter(row.key for row in ACTIONS).items() if key in alone
    )
    for row in ACTIONS:
        found = states.action(row.key, row.when[1] if row.when else None)
        assert found is not None
        assert (found.key, found.when) == (row.key, row.when)
    assert states.action("reboot", "SIDEWAYS") is None
    assert states.action("os-levitate") is None


@ROWS
def test_rows_that_share_a_workflow_agree_how_it_ends(row: Action) -> None:
    if row.workflow:
        assert BY_WORKFLOW[row.workflow].after == row.after


@pytest.mark.parametrize("during", sorted({row.during for row in ACTIONS if row.during}))
def test_every_transient_state_has_an_exit(during: str) -> None:
    """While it is in hand a superseding action can end it: nothing can hang for ever."""
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
def test_every_state_that_is_reached_can_be_left(vm_state: str) -> None:
    ways = [
        row.name for row in ACTIONS if row.workflow and (row.vm == states.ANY or vm_state in row.vm)
    ]
    assert "delete" in ways
    assert vm_state in (states.DELETED, states.BUILDING) or len(ways) > 1


def test_hard_reboot_ends_a_hanging_reboot_and_what_is_worse_only_delete_and_evacuate_do() -> None:
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
def test_a_server_shows_the_apis_status(vm_state: str, task_state: str | None, status: str) -> None:
    assert states.status(vm_state, task_state) == status


def test_every_state_has_a_status() -> None:
    assert {
        states.status(vm_state, task) for vm_state in VM_STATES for task in [None, *TASK_STATES]
    } == STATUSES


@pytest.mark.parametrize("name", sorted(STATUSES))
def test_vm_states_of_is_the_inverse_of_status(name: str) -> None:
    """By the rule of its docstring: listed tasks, or all but those shown otherwise."""
    found = dict(states.vm_states_of(name))
    assert found
    for vm_state in VM_STATES:
        for task in [None, *sorted(TASK_STATES)]:
            if vm_state not in found:
                matches = False
            elif found[vm_state]:
                matches = task in found[vm_state]
            else:
                matches = states.status(vm_state, task) == states.status(vm_state, None)
            assert matches == (states.status(vm_state, task) == name), (vm_state, task)


def test_a_status_that_no_server_can_have_has_no_states() -> None:
    assert states.vm_states_of("UNKNOWN") == ()
    assert states.vm_states_of("active") == ()


def test_every_event_name_is_of_a_step_and_every_workflow_has_one() -> None:
    steps = {(name, step.name) for name, workflow in WORKFLOWS.items() for step in workflow.steps}
    assert set(states.EVENT_NAMES) <= steps
    assert {workflow for workflow, _ in states.EVENT_NAMES} == set(WORKFLOWS)
    assert states.event_name("stop", "stop") == "compute_stop_instance"
    assert states.event_name("stop", "undo") == "conductor_undo"


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_workflow_is_well_formed(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow.name == name
    assert name in BY_WORKFLOW
    assert len({step.name for step in workflow.steps}) == len(workflow.steps) > 0
    for step in workflow.steps:
        assert step.why, f"{step.name} does not say why it stands there"
        ways = [way for way in (step.apply, step.command, step.call) if way is not None]
        only_back = (
            step.undo is not None or step.undo_command is not None or step.undo_call is not None
        )
        assert len(ways) == 1 or ways == [step.apply, step.call] or (not ways and only_back), (
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


def test_a_steps_name_belongs_to_one_lane() -> None:
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
def test_a_verb_that_is_done_once_may_not_insist(name: str) -> None:
    assert not (VERBS[name].runs_once and VERBS[name].retries_until_done)
