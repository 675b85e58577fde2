# SPDX-License-Identifier: Apache-2.0
"""Tests of the fault matrix with real processes: the order of cells, and the files of orders.

An order is a file that makes a process inject a fault.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.fault_matrix.cells import Cell, Kind, cells
from tests.fault_matrix.processes.choice import assign_to_worlds, order_cells
from tests.fault_matrix.processes.faults import explain_exclusion
from tests.fault_matrix.processes.orders import ANY, Folder, Order, Orders
from tests.fault_matrix.processes.seams import read_role
from tests.fault_matrix.processes.world import KINDS, VICTIMS

POINT = ("agent", "stop", "before")
#: Without cells of transactions, because tracing their places in the simulator takes time.
TABLED = [cell for cell in cells() if cell.kind is not Kind.TRANSACTION]
FIT = [cell for cell in TABLED if not explain_exclusion(cell)]


def _create_folder(path: Path) -> Folder:
    folder = Folder(path)
    folder.make()
    return folder


def test_order_cells_covers_each_step_and_each_fault_in_first_half() -> None:
    cells_in_order = order_cells(FIT)
    assert sorted(cell.id for cell in cells_in_order) == sorted(cell.id for cell in FIT)
    single_cells = [cell for cell in cells_in_order if cell.kind is not Kind.PAIR]
    first = single_cells[: len(single_cells) // 2]
    assert {(cell.workflow, cell.step) for cell in first} == {
        (cell.workflow, cell.step) for cell in single_cells
    }
    assert {cell.fault for cell in first} == {cell.fault for cell in single_cells}


def test_assign_to_worlds_assigns_each_fault_matrix_cell_to_one_world() -> None:
    shares = assign_to_worlds(FIT)
    assert shares.keys() == set(KINDS)
    assert sorted(cell.id for share in shares.values() for cell in share) == sorted(
        cell.id for cell in FIT
    )


def test_explain_exclusion_permits_process_faults_and_excludes_unfit_cells() -> None:
    for fault in ("agent-kill-mid", "request-lost", "partition-past-lease", "host-gone"):
        assert not explain_exclusion(Cell("stop", "stop", Kind.COMMAND, fault))
    assert explain_exclusion(Cell("resize_here", "stop", Kind.COMMAND, "agent-kill-mid"))
    assert explain_exclusion(Cell("stop", "stop", Kind.COMMAND, "hypervisor-hangs"))


def test_read_role_maps_process_names_to_the_roles_hit_by_faults() -> None:
    assert {read_role(name) for name in ("api", "conductor-2", "agent-5", "scheduler")} == set(
        VICTIMS
    )


def test_fault_order_is_taken_by_one_process_once(tmp_path: Path) -> None:
    folder = _create_folder(tmp_path)
    first, other = Orders(folder, "agent"), Orders(folder, "agent-2")
    folder.give(Order("o", "server", ("agent", ANY, "before"), "kill"))
    assert other.take(POINT, ["another"]) is None
    assert first.take(("agent", "stop", "after"), ["server"]) is None
    assert folder.read_taker("o") is None
    assert first.take(POINT, ["server"]) is not None
    assert folder.read_taker("o") == ("agent", os.getpid())
    assert other.take(POINT, ["server"]) is None


def test_fault_order_with_one_pass_is_taken_only_at_second_arrival(tmp_path: Path) -> None:
    folder = _create_folder(tmp_path)
    orders = Orders(folder, "agent")
    folder.give(Order("o", "server", POINT, "kill", passes=1))
    assert [bool(orders.take(POINT, ["server"])) for _ in range(3)] == [False, True, False]


def test_permanent_fault_order_is_taken_repeatedly_until_withdrawn(tmp_path: Path) -> None:
    folder = _create_folder(tmp_path)
    orders = Orders(folder, "agent")
    folder.give(Order("o", "server", POINT, "refuse", stays=True))
    assert orders.take(POINT, ["server"]) and orders.take(POINT, ["server"])
    folder.withdraw("o")
    assert orders.take(POINT, ["server"]) is None


def test_fault_order_for_server_name_is_taken_only_after_id_is_recorded(tmp_path: Path) -> None:
    folder = _create_folder(tmp_path)
    orders = Orders(folder, "conductor")
    folder.give(Order("o", "cell-1", POINT, "kill"))
    assert orders.has_order_for("cell-1") and not orders.has_order_for("cell-2")
    assert orders.take(POINT, ["server"]) is None
    folder.record_server_id("cell-1", "server")
    assert orders.take(POINT, ["server"]) is not None
