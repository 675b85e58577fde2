# SPDX-License-Identifier: Apache-2.0
"""The cells that are run with real processes: which they are, and that an order is carried out
once."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fault_matrix.cells import Cell, Kind, cells
from tests.fault_matrix.processes.choice import by_world, ordered
from tests.fault_matrix.processes.faults import unfit
from tests.fault_matrix.processes.orders import ANY, Folder, Order, Orders
from tests.fault_matrix.processes.seams import role
from tests.fault_matrix.processes.world import KINDS, VICTIMS

POINT = ("agent", "stop", "before")
#: Not those of transactions: where these begin is traced in the simulator, which takes time.
TABLED = [cell for cell in cells() if cell.kind is not Kind.TRANSACTION]
FIT = [cell for cell in TABLED if not unfit(cell)]


def _folder(path: Path) -> Folder:
    folder = Folder(path)
    folder.make()
    return folder


def test_what_covers_comes_first() -> None:
    found = ordered(FIT)
    assert sorted(cell.id for cell in found) == sorted(cell.id for cell in FIT)
    alone = [cell for cell in found if cell.kind is not Kind.PAIR]
    first = alone[: len(alone) // 2]
    assert {(cell.workflow, cell.step) for cell in first} == {
        (cell.workflow, cell.step) for cell in alone
    }
    assert {cell.fault for cell in first} == {cell.fault for cell in alone}


def test_each_cell_is_in_one_world() -> None:
    shares = by_world(FIT)
    assert shares.keys() == set(KINDS)
    assert sorted(cell.id for share in shares.values() for cell in share) == sorted(
        cell.id for cell in FIT
    )


def test_infrastructure_is_not_left_out() -> None:
    """Of a workflow that these clouds come to, every death and every lost message is there."""
    for fault in ("agent-kill-mid", "request-lost", "partition-past-lease", "host-gone"):
        assert not unfit(Cell("stop", "stop", Kind.COMMAND, fault))
    assert unfit(Cell("resize_here", "stop", Kind.COMMAND, "agent-kill-mid"))
    assert unfit(Cell("stop", "stop", Kind.COMMAND, "hypervisor-hangs"))


def test_names_of_processes() -> None:
    assert {role(name) for name in ("api", "conductor-2", "agent-5", "scheduler")} == set(VICTIMS)


def test_an_order_is_taken_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    one, other = Orders(folder, "agent"), Orders(folder, "agent-2")
    folder.give(Order("o", "server", ("agent", ANY, "before"), "kill"))
    assert other.take(POINT, ["another"]) is None
    assert one.take(("agent", "stop", "after"), ["server"]) is None
    assert folder.taken("o") is None
    assert one.take(POINT, ["server"]) is not None
    assert folder.taken("o") == ("agent", os.getpid())
    assert other.take(POINT, ["server"]) is None


def test_an_order_passes_its_point_as_often_as_it_says(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    orders = Orders(folder, "agent")
    folder.give(Order("o", "server", POINT, "kill", passes=1))
    assert [bool(orders.take(POINT, ["server"])) for _ in range(3)] == [False, True, False]


def test_an_order_that_stays_is_carried_out_until_it_is_withdrawn(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    orders = Orders(folder, "agent")
    folder.give(Order("o", "server", POINT, "refuse", stays=True))
    assert orders.take(POINT, ["server"]) and orders.take(POINT, ["server"])
    folder.withdraw("o")
    assert orders.take(POINT, ["server"]) is None


def test_a_server_that_has_no_id_yet_is_known_by_its_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    orders = Orders(folder, "conductor")
    folder.give(Order("o", "cell-1", POINT, "kill"))
    assert orders.wants_name("cell-1") and not orders.wants_name("cell-2")
    assert orders.take(POINT, ["server"]) is None
    folder.name("cell-1", "server")
    assert orders.take(POINT, ["server"]) is not None
