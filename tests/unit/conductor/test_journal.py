# SPDX-License-Identifier: Apache-2.0
"""Arguments and data of workflows, and their form in the journal."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from common.domain.models import HardwareAssignment
from conductor.engine.action_data import ActionData, Failure, journal
from conductor.workflows import WORKFLOWS
from conductor.workflows.resize import MIGRATE, REVERT_RESIZE

FLAVOR = {"id": "1", "name": "m1.nano", "vcpus": 1, "memory_mb": 128, "root_gb": 1}
MOVE = {
    "was": "active",
    "migration": "m",
    "source": "h1",
    "old_flavor": FLAVOR,
    "new_flavor": FLAVOR,
}
#: The journal of a cold migration whose undo has failed in part.
STORED = {
    "after": "a0",
    "placed": True,
    "dest": "h2",
    "source": "h1",
    "zone": "nova",
    "shared": False,
    "transfer": "h1:5900",
    "to": {"uri": "qemu+tls://h2"},
    "failed_hosts": ["h2"],
    "blamed": ["h2"],
    "polls": 3,
    "plugged": [{"port": "p", "active": False}],
    "paused": True,
    "knows_old_assignment": True,
    "switched": True,
    "problem": {"text": "It broke.", "details": "why", "retryable": True, "status": None},
    "undo_failures": {"stop": "It is on fire: really."},
    "of_a_later_release": {"kept": True},
}


@dataclass
class Row:
    """The columns of an action that ``Workflow.run`` reads."""

    args: Any
    data: Any = field(default_factory=dict)


def test_workflow_run_reads_the_journal_into_typed_data() -> None:
    data = MIGRATE.run(Row(MOVE, STORED), None, ()).data  # type: ignore[arg-type]
    assert (data.after, data.dest, data.polls, data.paused, data.shared) == (
        "a0",
        "h2",
        3,
        True,
        False,
    )
    assert data.problem == Failure(text="It broke.", details="why", retryable=True)
    assert data.undo_failures == {"stop": "It is on fire: really."}
    assert data.knows_old_assignment and data.old_assignment is None


def test_journal_keeps_fields_of_a_later_release_and_leaves_out_defaults() -> None:
    run = MIGRATE.run(Row(MOVE, STORED), None, ())  # type: ignore[arg-type]
    run.data.add_undo_failure("install", "No disk.")
    run.data.assignment, run.data.placed = HardwareAssignment(devices=["0000:81:00.1"]), False
    written = journal(run.data, STORED)
    assert written["undo_failures"] == {"stop": "It is on fire: really.", "install": "No disk."}
    assert written["problem"]["text"] == "It broke." and written["of_a_later_release"] == {
        "kept": True
    }
    assert written["shared"] is False and written["plugged"] == STORED["plugged"]
    assert "placed" not in written
    assert written["assignment"]["devices"] == ["0000:81:00.1"]


def test_journal_has_no_undo_failures_after_they_are_cleared() -> None:
    run = REVERT_RESIZE.run(Row({**MOVE, "before": "active", "resized": 2}, STORED), None, ())  # type: ignore[arg-type]
    run.data.clear_undo_failures()
    written = journal(run.data, STORED)
    assert "undo_failures" not in written


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_new_data_of_a_workflow_has_an_empty_journal(name: str) -> None:
    data = WORKFLOWS[name].data()
    assert isinstance(data, ActionData) and journal(data, {}) == {}


@pytest.mark.parametrize(
    ("args", "data"), [(7, {}), (MOVE, ["no dictionary"]), ({"was": "active"}, {})]
)
def test_workflow_run_refuses_malformed_row_or_row_of_another_workflow(
    args: Any, data: Any
) -> None:
    with pytest.raises(TypeError):
        MIGRATE.run(Row(args, data), None)  # type: ignore[arg-type]


def test_copy_data_to_copies_only_fields_changed_by_prepare() -> None:
    row: Any = Row(MOVE, {"polls": 3})
    plan, run = MIGRATE.run(row, row, ()), MIGRATE.run(row, row, ())
    plan.data.hosts_with_removals, run.data.polls = ["h3"], 4
    plan.copy_data_to(run)
    assert (run.data.hosts_with_removals, run.data.polls) == (["h3"], 4)
    assert {
        data_field.name
        for data_field in fields(run.data)
        if getattr(run.data, data_field.name) != getattr(plan.data, data_field.name)
    } == {"polls"}
