# SPDX-License-Identifier: Apache-2.0
"""Tier 2 of the fault matrix (docs/reliability.md): guests on the hosts of a lab.

Failures occur at each workflow's pivot and during the hand-over of moves.

    KILONOVA_TIER_TWO=all ./deploy/test e2e -- -k tier_two -s
    KILONOVA_TIER_TWO=live_migrate/migrate/kill-agent ./deploy/test e2e -- -k tier_two -s

The action of each cell must end in time, and complete unless the cell declares another result. No
server may run on two hosts. The guest's disk must keep its data, and the doctor must find no
problem. A failed action must succeed when repeated, and a deleted server must leave no remains. The
results are printed as they occur.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest

from conductor.workflows import WORKFLOWS
from tests.e2e.conftest import WatchedLab
from tests.e2e.guests import Witness, give_address
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.strikes import Strikes
from tests.e2e.test_moves import read_migration
from tests.e2e.tier_two import EVACUATIONS, KEEPING, NOT_HERE, Cell, Expectation, cells
from tests.e2e.tier_two_actions import OTHER_WORKFLOWS, RECIPES
from tests.e2e.tier_two_stage import Stage
from tests.e2e.watcher import Watcher
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

#: "all", or the first letters of the ids of the selected cells, separated by commas.
SELECTION = os.environ.get("KILONOVA_TIER_TWO", "")
#: Seconds after which no further cell begins.
LIMIT = float(os.environ.get("KILONOVA_TIER_TWO_SECONDS", "7200"))
#: The host that dies.
DEAD = "lab2"


def test_fault_matrix_tier_two_has_cells_or_reason_for_each_workflow() -> None:
    workflows_with_cells = {cell.workflow for cell in cells()}
    assert workflows_with_cells | set(NOT_HERE) == set(
        WORKFLOWS
    ) and not workflows_with_cells & set(NOT_HERE)
    assert set(RECIPES) | OTHER_WORKFLOWS == workflows_with_cells
    for cell in cells():
        assert cell.step in {step.name for step in WORKFLOWS[cell.workflow].steps}, cell.id


def select_cells() -> list[Cell]:
    starts = ("",) if SELECTION == "all" else tuple(SELECTION.split(","))
    return [cell for cell in cells() if cell.id.startswith(starts)]


@dataclass
class CellCount:
    """The results of the cells, each printed at once."""

    cells: list[Cell]
    watcher: Watcher
    began: float = field(default_factory=time.monotonic)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > LIMIT

    def play(self, stage: Stage, cell: Cell, play: Callable[[Cell], str]) -> None:
        """Run a cell. After a failure, print the state and prepare a new guest."""
        seen, began = len(self.watcher.violations), time.monotonic()
        try:
            text = play(cell)
            assert self.watcher.violations[seen:] == []
        # The failure is counted and printed.
        except Exception as problem:  # noqa: BLE001
            self.failed[cell.id] = f"{type(problem).__name__}: {problem}"
            print(
                f"FAILED {cell.id}: {self.failed[cell.id]}\n{describe(stage)}\nleft: {stage.recover()}"
            )
        else:
            self.passed.append(cell.id)
            self._print_result(cell, text, time.monotonic() - began)

    def _print_result(self, cell: Cell, text: str, seconds: float) -> None:
        number = len(self.passed) + len(self.failed)
        print(f"{number}/{len(self.cells)} passed {cell.id}: {text} [{seconds:.0f} s]", flush=True)

    def close(self) -> None:
        finished = {*self.passed, *self.failed}
        not_run = [cell.id for cell in self.cells if cell.id not in finished]
        print(
            f"tier 2: {len(self.passed)} of {len(finished)} cells passed in "
            f"{time.monotonic() - self.began:.0f} s; not run: {len(not_run)} {' '.join(not_run)}"
        )
        assert self.failed == {}


def describe(stage: Stage) -> str:
    try:
        return stage.describe()
    # The failure of the cell is already printed.
    except Exception as problem:  # noqa: BLE001
        return f"no story: {problem}"


def order_by_status(stage: Stage, remaining: list[Cell]) -> Iterator[Cell]:
    """Yield the cells. Among the next 12, prefer a cell that begins in the server's status."""
    remaining = list(remaining)
    while remaining:
        status = stage.rest.server(stage.server)["status"] if stage.guest else ""
        nearby = [
            cell
            for cell in remaining[:12]
            if cell.workflow in RECIPES and RECIPES[cell.workflow].begin_status == status
        ]
        next_cell = (nearby or remaining)[0]
        remaining.remove(next_cell)
        yield next_cell


@pytest.mark.skipif(not SELECTION, reason="takes KILONOVA_TIER_TWO, all or the beginning of ids")
@pytest.mark.timeout(9000)
def test_selected_cells_of_fault_matrix_tier_two_pass_on_lab(
    lab: LiveLab, lab_up: WatchedLab
) -> None:
    stage, count = Stage(lab), CellCount(select_cells(), lab_up.watcher)
    keeping = {
        "shelved_offload_time": "-1",
        "reclaim_instance_interval": "3600",
    }
    evacuations = [cell for cell in count.cells if cell in EVACUATIONS]
    keeping_cells = [cell for cell in count.cells if cell.workflow in KEEPING]
    others = [cell for cell in count.cells if cell not in evacuations and cell not in keeping_cells]
    moves = [cell for cell in others if cell.workflow == "live_migrate"]
    first: list[tuple[list[Cell], Mapping[str, str]]] = [(moves, {}), (evacuations, {})]
    rest = [cell for cell in others if cell not in moves]
    try:
        for group, settings in (*first, (rest[:40], {}), (keeping_cells, keeping), (rest[40:], {})):
            if group:
                play_all(stage, count, group, settings)
        stage.remove()
    finally:
        count.close()


def play_all(
    stage: Stage, count: CellCount, group: list[Cell], settings: Mapping[str, str]
) -> None:
    configured: AbstractContextManager[None] = nullcontext()
    if settings:
        configured = stage.lab.configure("api", "conductor", DEFAULT=settings)
    if group[0].workflow == "evacuate":
        evacuate_all(stage, count, group)
        return
    with configured:
        for cell in order_by_status(stage, group):
            if count.is_over:
                return
            count.play(stage, cell, stage.play)
        if settings:
            stage.remove()


def evacuate_all(stage: Stage, count: CellCount, group: list[Cell]) -> None:
    """Kill a host with a guest for each cell, and run the evacuations."""
    lab = stage.lab
    stage.remove()
    guests: dict[str, Witness] = {}
    with lab.only(lab.lab.number(DEAD)):
        for number, cell in enumerate(group):
            name = f"tier-two-dead-{number}"
            server = stage.request_server(name)
            stage.rest.await_status(server, "ACTIVE", BOOT)
            guests[cell.id] = Witness(lab, server, name, give_address(lab, server))
    lab.strike("kill", DEAD)
    lab.await_host(DEAD, "down", SILENCE)

    def play(cell: Cell) -> str:
        stage.guest, stage.destination = guests[cell.id], DEAD
        stage.struck = "", None
        path = f"/servers/{stage.server}/action"
        outcome = Strikes(lab, stage.server).at_step(
            "evacuate",
            cell.step,
            lambda host: stage.strike(cell, host),
            lambda: stage.rest.call("POST", path, {"evacuate": {}}, version="2.94").status,
        )
        expected_state = "superseded" if cell.expectation is Expectation.GONE else "done"
        assert outcome.state == expected_state, outcome
        if cell.expectation is Expectation.GONE:
            stage.rest.await_gone(stage.server)
            del guests[cell.id]
        else:
            stage.rest.await_status(stage.server, "ACTIVE", BOOT)
            assert lab.host_of(stage.server) != DEAD
            stage.check_runs_once()
        return (
            f"{cell.step} was {outcome.last_event}, {outcome.state} after {outcome.seconds:.1f} s"
        )

    for cell in group:
        count.play(stage, cell, play)
        stage.guest = None
    if lab.lab.state(DEAD) != "up":
        lab.strike("start", DEAD)
    lab.await_host(DEAD)
    for cell in group:
        if cell.id in guests and cell.id in count.passed:
            guest = guests[cell.id]
            await_true(
                lambda guest_to_check=guest: DEAD not in lab.find_domains(guest_to_check.server),  # type: ignore[misc]  # bound here
                SETTLE,
                lambda guest_to_check=guest: lab.find_domains(guest_to_check.server),  # type: ignore[misc]  # bound here
            )
            await_true(
                lambda guest_to_check=guest: (
                    read_migration(lab, guest_to_check)["status"] == "completed"
                ),  # type: ignore[misc]  # bound here
                SETTLE,
                lambda guest_to_check=guest: read_migration(lab, guest_to_check),  # type: ignore[misc]  # bound here
            )
    for guest in guests.values():
        stage.guest = guest
        stage.remove()
    stage.check_doctor()
