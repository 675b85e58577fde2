# SPDX-License-Identifier: Apache-2.0
"""The default set's part of the fault matrix represents the whole, and only the registry decides
it."""

from __future__ import annotations

from conductor.workflows import WORKFLOWS
from tests.fault_matrix.cells import ASKED, FAULTS, Cell, Kind, cells
from tests.fault_matrix.default_set import default_cells
from tests.fault_matrix.known import FOUND

EVERY = cells()
DEFAULT = default_cells(EVERY)


def test_default_cells_have_every_step_of_every_workflow() -> None:
    steps = {
        (workflow.name, step.name) for workflow in WORKFLOWS.values() for step in workflow.steps
    }
    assert steps <= {(cell.workflow, cell.step) for cell in EVERY}
    assert {(cell.workflow, cell.step) for cell in EVERY} == {
        (cell.workflow, cell.step) for cell in DEFAULT
    }


def test_default_cells_have_every_fault_of_each_kind() -> None:
    for kind, faults in FAULTS.items():
        if kind is not Kind.PAIR:
            assert {cell.fault for cell in DEFAULT if cell.kind is kind} == {*faults}, kind


def test_default_cells_have_every_action_first_and_second_in_pair() -> None:
    pairs = [cell for cell in DEFAULT if cell.kind is Kind.PAIR]
    assert {cell.workflow for cell in pairs} == {*WORKFLOWS}
    assert {cell.fault for cell in pairs} == {*ASKED}


def test_default_cells_have_each_cell_that_found_defect() -> None:
    assert {*FOUND} <= {cell.id for cell in DEFAULT}
    assert len(DEFAULT) == len({cell.id for cell in DEFAULT}) < len(EVERY) / 15


def test_new_step_adds_its_cell_and_moves_few_others() -> None:
    step = [Cell("stop", "new_step", Kind.COMMAND, fault) for fault in FAULTS[Kind.COMMAND]]
    added = {cell.id for cell in default_cells([*EVERY, *step])}
    assert any(cell.id in added for cell in step)
    assert len({cell.id for cell in DEFAULT} - added) <= len(step)


def test_order_of_registry_does_not_change_default_cells() -> None:
    assert default_cells(EVERY[::-1]) == DEFAULT
