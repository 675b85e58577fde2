# SPDX-License-Identifier: Apache-2.0
"""Tier 2 of the fault matrix (docs/reliability.md): real guests on a lab's hosts, struck at each
workflow's point of no return and in the hand-over of their moves.

    KILONOVA_TIER_TWO=all ./deploy/test e2e -- -k tier_two -s
    KILONOVA_TIER_TWO=live_migrate/migrate/kill-agent ./deploy/test e2e -- -k tier_two -s

Of each cell it must hold that its action ends in time, and is done unless the cell says otherwise;
that no server ran twice, by all hosts' word and by the watcher's; that the guest's disk has what
was written on it; that the doctor finds nothing; that what failed is done when it is asked for
again; and that a deleted server leaves nothing. What happens is told as it goes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest

from conductor.workflows import WORKFLOWS
from tests.e2e.conftest import MadeLab
from tests.e2e.guests import Witness, give_address
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.live import BOOT, SETTLE
from tests.e2e.strikes import Strikes
from tests.e2e.test_moves import read_migration
from tests.e2e.tier_two import EVACUATIONS, KEEPING, NOT_HERE, Cell, Holds, cells
from tests.e2e.tier_two_actions import HOW, OTHERWISE
from tests.e2e.tier_two_stage import Stage
from tests.e2e.watcher import Watcher
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

#: "all", or what the ids of the wanted cells begin with, by commas.
WANTED = os.environ.get("KILONOVA_TIER_TWO", "")
#: Seconds after which no further cell begins.
LIMIT = float(os.environ.get("KILONOVA_TIER_TWO_SECONDS", "7200"))
#: The host that dies.
DEAD = "lab2"


def test_each_workflow_has_its_cells_or_a_reason() -> None:
    having = {cell.workflow for cell in cells()}
    assert having | set(NOT_HERE) == set(WORKFLOWS) and not having & set(NOT_HERE)
    assert set(HOW) | OTHERWISE == having
    for cell in cells():
        assert cell.step in {step.name for step in WORKFLOWS[cell.workflow].steps}, cell.id


def wanted() -> list[Cell]:
    starts = ("",) if WANTED == "all" else tuple(WANTED.split(","))
    return [cell for cell in cells() if cell.id.startswith(starts)]


@dataclass
class Count:
    """What became of the cells; each is told at once."""

    cells: list[Cell]
    watcher: Watcher
    began: float = field(default_factory=time.monotonic)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > LIMIT

    def play(self, stage: Stage, cell: Cell, play: Callable[[Cell], str]) -> None:
        """One cell; one that fails tells its story, and the next begins with a new guest."""
        seen, began = len(self.watcher.violations), time.monotonic()
        try:
            told = play(cell)
            assert self.watcher.violations[seen:] == []
        except Exception as problem:  # noqa: BLE001  # it is counted, and its story told
            self.failed[cell.id] = f"{type(problem).__name__}: {problem}"
            print(
                f"FAILED {cell.id}: {self.failed[cell.id]}\n{story(stage)}\nleft: {stage.recover()}"
            )
        else:
            self.passed.append(cell.id)
            self._tell(cell, told, time.monotonic() - began)

    def _tell(self, cell: Cell, told: str, took: float) -> None:
        number = len(self.passed) + len(self.failed)
        print(f"{number}/{len(self.cells)} passed {cell.id}: {told} [{took:.0f} s]", flush=True)

    def close(self) -> None:
        ran = {*self.passed, *self.failed}
        left = [cell.id for cell in self.cells if cell.id not in ran]
        print(
            f"tier 2: {len(self.passed)} of {len(ran)} cells passed in "
            f"{time.monotonic() - self.began:.0f} s; not run: {len(left)} {' '.join(left)}"
        )
        assert self.failed == {}


def story(stage: Stage) -> str:
    try:
        return stage.story()
    except Exception as problem:  # noqa: BLE001  # the failure itself is told already
        return f"no story: {problem}"


def in_order(stage: Stage, left: list[Cell]) -> Iterator[Cell]:
    """First what begins where the guest is, of the next few: on the way to others it would pass."""
    left = list(left)
    while left:
        now = stage.rest.server(stage.server)["status"] if stage.guest else ""
        near = [
            cell for cell in left[:12] if cell.workflow in HOW and HOW[cell.workflow].begins == now
        ]
        chosen = (near or left)[0]
        left.remove(chosen)
        yield chosen


@pytest.mark.skipif(not WANTED, reason="takes KILONOVA_TIER_TWO, all or the beginning of ids")
@pytest.mark.timeout(9000)
def test_tier_two(lab: LiveLab, lab_up: MadeLab) -> None:
    stage, count = Stage(lab), Count(wanted(), lab_up.watcher)
    keeping = {
        "shelved_offload_time": "-1",
        "reclaim_instance_interval": "3600",
    }
    evacuations = [cell for cell in count.cells if cell in EVACUATIONS]
    kept = [cell for cell in count.cells if cell.workflow in KEEPING]
    others = [cell for cell in count.cells if cell not in evacuations and cell not in kept]
    moves = [cell for cell in others if cell.workflow == "live_migrate"]
    first: list[tuple[list[Cell], Mapping[str, str]]] = [(moves, {}), (evacuations, {})]
    rest = [cell for cell in others if cell not in moves]
    try:
        for group, settings in (*first, (rest[:40], {}), (kept, keeping), (rest[40:], {})):
            if group:
                play_all(stage, count, group, settings)
        stage.remove()
    finally:
        count.close()


def play_all(stage: Stage, count: Count, group: list[Cell], settings: Mapping[str, str]) -> None:
    configured: AbstractContextManager[None] = nullcontext()
    if settings:
        configured = stage.lab.configured("api", "conductor", DEFAULT=settings)
    if group[0].workflow == "evacuate":
        evacuate_all(stage, count, group)
        return
    with configured:
        for cell in in_order(stage, group):
            if count.is_over:
                return
            count.play(stage, cell, stage.play)
        if settings:
            stage.remove()


def evacuate_all(stage: Stage, count: Count, group: list[Cell]) -> None:
    """One host dies with a guest for each cell."""
    lab = stage.lab
    stage.remove()
    guests: dict[str, Witness] = {}
    with lab.only(lab.lab.number(DEAD)):
        for number, cell in enumerate(group):
            name = f"tier-two-dead-{number}"
            server = stage.order(name)
            stage.rest.await_status(server, "ACTIVE", BOOT)
            guests[cell.id] = Witness(lab, server, name, give_address(lab, server))
    lab.strike("kill", DEAD)
    lab.await_host(DEAD, "down", SILENCE)

    def play(cell: Cell) -> str:
        stage.guest, stage.there = guests[cell.id], DEAD
        stage.struck = "", None
        path = f"/servers/{stage.server}/action"
        ended = Strikes(lab, stage.server).at_step(
            "evacuate",
            cell.step,
            lambda host: stage.blow(cell, host),
            lambda: stage.rest.call("POST", path, {"evacuate": {}}, version="2.94").status,
        )
        wanted = "superseded" if cell.holds is Holds.GONE else "done"
        assert ended.state == wanted, ended
        if cell.holds is Holds.GONE:
            stage.rest.await_gone(stage.server)
            del guests[cell.id]
        else:
            stage.rest.await_status(stage.server, "ACTIVE", BOOT)
            assert lab.place(stage.server) != DEAD
            stage.is_once()
        return f"{cell.step} was {ended.seen}, {ended.state} after {ended.seconds:.1f} s"

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
                lambda one=guest: DEAD not in lab.where(one.server),  # type: ignore[misc]  # bound here
                SETTLE,
                lambda one=guest: lab.where(one.server),  # type: ignore[misc]  # bound here
            )
            await_true(
                lambda one=guest: read_migration(lab, one)["status"] == "completed",  # type: ignore[misc]  # bound here
                SETTLE,
                lambda one=guest: read_migration(lab, one),  # type: ignore[misc]  # bound here
            )
    for guest in guests.values():
        stage.guest = guest
        stage.remove()
    stage.is_well()
