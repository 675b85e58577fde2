# SPDX-License-Identifier: Apache-2.0
"""The cells of the fault matrix in the default set, and their dependence on the registry."""

from __future__ import annotations

from conductor.workflows import WORKFLOWS
from tests.fault_matrix.cells import FAULTS, REQUESTS, Cell, Kind, cells
from tests.fault_matrix.default_set import default_cells
from tests.fault_matrix.known import FOUND

EVERY = cells()
DEFAULT = default_cells(EVERY)


def test_fault_matrix_default_cells_cover_the_workflows() -> None:
    assert {*WORKFLOWS} < {cell.workflow for cell in EVERY}
    assert {cell.workflow for cell in EVERY} == {cell.workflow for cell in DEFAULT}


def test_fault_matrix_default_cells_cover_the_faults_of_each_kind() -> None:
    for kind, faults in FAULTS.items():
        if kind is not Kind.PAIR:
            assert {cell.fault for cell in DEFAULT if cell.kind is kind} == {*faults}, kind


def test_fault_matrix_default_cells_cover_the_second_actions_of_pairs() -> None:
    assert {cell.fault for cell in DEFAULT if cell.kind is Kind.PAIR} == {*REQUESTS}


def test_fault_matrix_default_cells_contain_all_cells_with_past_defects() -> None:
    assert {*FOUND} <= {cell.id for cell in DEFAULT}
    assert len(DEFAULT) == len({cell.id for cell in DEFAULT}) < len(EVERY) / 25


def test_new_workflow_adds_fault_matrix_cell_and_replaces_few_others() -> None:
    new = [Cell("new", "step", Kind.COMMAND, fault) for fault in FAULTS[Kind.COMMAND]]
    added = {cell.id for cell in default_cells([*EVERY, *new])}
    assert any(cell.id in added for cell in new)
    assert len({cell.id for cell in DEFAULT} - added) <= len(new)


def test_order_of_registry_does_not_change_fault_matrix_default_cells() -> None:
    assert default_cells(EVERY[::-1]) == DEFAULT
