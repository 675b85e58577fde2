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


def test_default_cells_have_every_workflow() -> None:
    assert {*WORKFLOWS} < {cell.workflow for cell in EVERY}
    assert {cell.workflow for cell in EVERY} == {cell.workflow for cell in DEFAULT}


def test_default_cells_have_every_fault_of_each_kind() -> None:
    for kind, faults in FAULTS.items():
        if kind is not Kind.PAIR:
            assert {cell.fault for cell in DEFAULT if cell.kind is kind} == {*faults}, kind


def test_default_cells_have_every_action_second_in_pair() -> None:
    assert {cell.fault for cell in DEFAULT if cell.kind is Kind.PAIR} == {*ASKED}


def test_default_cells_have_each_cell_that_found_defect() -> None:
    assert {*FOUND} <= {cell.id for cell in DEFAULT}
    assert len(DEFAULT) == len({cell.id for cell in DEFAULT}) < len(EVERY) / 25


def test_new_workflow_adds_its_cell_and_moves_few_others() -> None:
    new = [Cell("new", "step", Kind.COMMAND, fault) for fault in FAULTS[Kind.COMMAND]]
    added = {cell.id for cell in default_cells([*EVERY, *new])}
    assert any(cell.id in added for cell in new)
    assert len({cell.id for cell in DEFAULT} - added) <= len(new)


def test_order_of_registry_does_not_change_default_cells() -> None:
    assert default_cells(EVERY[::-1]) == DEFAULT
