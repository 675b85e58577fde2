# SPDX-License-Identifier: Apache-2.0
"""One cell in one world: prepared, its fault made to happen once, its end judged, its server
deleted without a trace."""

from __future__ import annotations

import os
import threading
import time
import traceback
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common.domain import states
from tests.fault_matrix.cells import Cell, Kind
from tests.fault_matrix.outcome import LOCAL_SECONDS, MOVE_SECONDS, Verdict
from tests.fault_matrix.processes.faults import BEFORE, PLANS, Plan, before
from tests.fault_matrix.processes.orders import Order
from tests.fault_matrix.processes.trial import UNHEARD, Answer, Trial
from tests.fault_matrix.processes.world import World
from tests.waiting import await_true, is_true_within
from tests.workflows.scenarios import KILL

REACH_SECONDS, FIND_SECONDS, MOST_SLOW = 30, 20, 6.0
#: Answers to a request that is repeated after its first was accepted.
DONE_BEFORE = (400, 404, 409)
#: How often a cell is begun whose fault could not be injected: another cell's came in between.
MOST_TRIES = 3


class NotInjected(AssertionError):
    """The fault was not injected as it was meant."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell; ``problem`` empty: it passed. ``tries``: how often it was begun."""

    cell: str
    world: str
    seconds: float
    problem: str = ""
    story: str = ""
    tries: int = 1


def slow() -> float:
    """How many times as long as on an idle machine something may take here, now, within reason."""
    return min(MOST_SLOW, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def run(world: World, cell: Cell) -> Outcome:
    """Run it, and catch what went wrong; again where its fault could not be injected."""
    began, text, story, tries = time.monotonic(), "", "", 0
    while tries < MOST_TRIES:
        tries += 1
        try:
            check(world, cell)
        except Exception as problem:  # noqa: BLE001  # any failure is the cell's outcome
            said = " ".join(str(problem).split()) or "no words"
            text = f"{type(problem).__name__}: {said[:600]}"
            story = traceback.format_exc()[-3000:]
            if isinstance(problem, NotInjected):
                continue
        else:
            text = story = ""
        break
    return Outcome(cell.id, world.kind, time.monotonic() - began, text, story, tries)


def check(world: World, cell: Cell) -> None:
    """Raises NotInjected: its fault could not be. AssertionError: something does not hold."""
    plan = PLANS[cell.kind](cell)
    if plan is None:
        raise NotInjected("nobody has written how")
    with ExitStack() as stack:
        if is_rough(cell, plan):
            stack.enter_context(world.one_rough)
            stack.callback(world.power_on)
        if plan.broker:
            stack.enter_context(world.one_broker)
        if plan.sleeps:
            stack.enter_context(world.one_asleep)
        zone = "rough" if is_rough(cell, plan) else "gentle"
        trial = Trial(world, cell.workflow, cell.step, zone)
        try:
            trial.prepare()
            _Case(world, cell, plan, trial).play()
        except BaseException:
            _tidy(trial)
            raise
        trial.remove()


def is_rough(cell: Cell, plan: Plan) -> bool:
    """Is a host lost to others meanwhile?"""
    return plan.rough or cell.workflow == "evacuate"


def _tidy(trial: Trial) -> None:
    """Of a cell that failed as little stays as can be."""
    try:
        if trial.zone == "rough":
            trial.world.power_on()
        trial.call("POST", f"/servers/{trial.server}/action", {"forceDelete": None}, admin=True)
    except Exception:  # noqa: BLE001  # the first failure is reported
        return


class _Case:
    """A cell in hand."""

    def __init__(self, world: World, cell: Cell, plan: Plan, trial: Trial) -> None:
        self.world, self.cell, self.plan, self.trial = world, cell, plan, trial
        self.point = before(cell) if plan.point == BEFORE else plan.point
        self.wanted = trial.scenario.ask
        mark = f"{zlib.crc32(cell.id.encode()):08x}-{trial.name}"
        self.main, self.beside = f"{mark}-main", f"{mark}-also"
        self.before = {one.id for one in world.actions(trial.server)} if trial.server else set()
        self.answers: list[Answer] = []
        trial.release = lambda: world.folder.release(self.main)

    def play(self) -> None:
        folder, plan = self.world.folder, self.plan
        server = self.trial.server or self.trial.name
        asking = threading.Thread(target=self._ask)
        try:
            if plan.also:
                folder.give(Order(self.beside, server, *plan.also, stays=True))
            if plan.deed:
                folder.give(Order(self.main, server, self.point, plan.deed, plan.passes))
            asking.start()
            if plan.deed:
                self._strike(asking)
            asking.join()
            self._has_ended()
        finally:
            folder.withdraw(self.beside)
            folder.withdraw(self.main)
        self._judge()

    # --- what is asked ---
    def _ask(self) -> None:
        way = self.plan.by_client
        await_true(self._insist, 120, lambda: f"not accepted: {self.answers}", 0.3)
        if way == "kills-api":
            self.world.kill("api")
        elif way == "repeats":
            await_true(self._repeat, 120, lambda: f"not answered: {self.answers}", 0.3)

    def _repeat(self) -> bool:
        """It was accepted, and is asked for once more."""
        again = self.trial.ask(self.wanted)
        fits = again.is_accepted or (self.wanted != "create" and again.status in DONE_BEFORE)
        if again.status not in UNHEARD and not fits:
            self.answers.append(again)
        return again.status not in UNHEARD

    def _insist(self) -> bool:
        """As a user does whom nobody answers: another cell may have killed the API. Who sees that
        it is in hand does not ask again, but where that is the fault."""
        lost = bool(self.answers)
        if lost and not self.plan.by_client and self._made():
            self.answers[:] = [Answer(202)]
            return True
        self.answers.append(self.trial.ask(self.wanted))
        status = self.answers[-1].status
        if self.answers[-1].is_accepted or (lost and status in DONE_BEFORE):
            self.answers[:] = [Answer(202)]
            return True
        return bool(status not in UNHEARD)

    # --- the fault ---
    def _strike(self, asking: threading.Thread) -> None:
        folder = self.world.folder
        limit = REACH_SECONDS * slow()

        def hit() -> bool:
            return folder.taken(self.main) is not None

        def hit_or_over() -> bool:
            return hit() or (not asking.is_alive() and bool(self._made()) and self.trial.is_quiet())

        is_true_within(hit_or_over, limit)
        if not is_true_within(hit, 1):
            raise NotInjected(
                f"its point {self.point} was not reached; answered {self.answers}; "
                f"{self.trial.story()}"
            )
        who = folder.taken(self.main)
        assert who is not None
        if not self.trial.server:
            await_true(self._is_named, 30, "the server has an id")
        self.plan.during(self.trial, who)
        if not self.plan.is_late:
            folder.release(self.main)

    def _made(self) -> list[Any]:
        """Actions that came of it."""
        if not self.trial.server:
            return []
        found = self.world.actions(self.trial.server)
        return [one for one in found if one.id not in self.before]

    def _is_named(self) -> bool:
        path = self.world.folder.path / "names" / self.trial.name
        if path.exists():
            self.trial.server = path.read_text()
        return bool(self.trial.server)

    # --- the end ---
    def _has_ended(self) -> None:
        """In time; every request was answered as it may be."""
        moves = self.trial.scenario.keeps is not None
        limit = (MOVE_SECONDS if moves else LOCAL_SECONDS) * slow()
        await_true(
            self.trial.is_quiet,
            limit,
            lambda: f"not over {limit:.0f} s after the fault: {self.trial.story()}",
            0.05,
            late=0.05,
        )
        if self.plan.by_client:
            wrong = [one for one in self.answers if not one.is_accepted]
            assert not wrong, f"answered with {wrong}"

    def _judge(self) -> None:
        trial, verdict = self.trial, self.plan.verdict
        made = self._made()
        assert made, f"no action was made: {self.answers}"
        if self.cell.workflow == "evacuate" or self.plan.rough:
            self.world.power_on()
            await_true(trial.is_quiet, MOVE_SECONDS * slow(), trial.story, 0.1)
        self._finds_nothing()
        row = trial.row()
        if verdict is Verdict.DELETED:
            assert row.deleted, f"it is not deleted: {trial.story()}"
            return
        if verdict is Verdict.BOTH and trial.accepted:
            return
        lasting = [one for one in made if one.state != "superseded"]  # by itself, asked for twice
        first = min(lasting or made, key=lambda one: one.created_at)
        if verdict is not Verdict.ENDED or first.state == "done":
            assert first.state == "done", trial.story()
            if first.workflow == "delete":  # a second DELETE is one for good, as in Nova
                assert row.deleted, trial.story()
                return
            if self.cell.workflow != "evacuate" and not self.plan.rough:
                assert row.vm_state == self._end(), trial.story()
            return
        assert first.state == "failed", trial.story()
        self._failed(row.vm_state)

    def _end(self) -> str:
        if self.trial.scenario.ends == states.SHELVED and self.trial.circumstance == "boots":
            return states.SHELVED_OFFLOADED
        return self.trial.scenario.ends

    def _failed(self, vm_state: str) -> None:
        """The server is at rest, and where it is as before the same can be asked for again."""
        trial = self.trial
        was = trial.was.vm_state if trial.was else ""
        allowed = {trial.scenario.fails_as, trial.scenario.ends, states.ERROR, was}
        assert vm_state in allowed, f"{vm_state} is none of {allowed}"
        if vm_state != was or KILL in trial.scenario.before:
            return
        before = {one.id for one in self.world.actions(trial.server)}
        await_true(lambda: not self.world.debts(trial.server), FIND_SECONDS * slow(), "debts", 0.2)
        await_true(lambda: trial.ask(self.wanted).is_accepted, 60, "it is accepted again", 0.3)
        await_true(trial.is_quiet, MOVE_SECONDS * slow(), trial.story, 0.1, late=0.05)
        again = [one for one in self.world.actions(trial.server) if one.id not in before]
        assert all(one.state == "done" for one in again), f"the second try: {trial.story()}"
        self._finds_nothing()

    def _finds_nothing(self) -> None:
        """The doctor, of this server, when hosts had the time to report."""
        last: list[object] = []
        self.world.clean_up(self.trial.server)

        def nothing() -> bool:
            last[:] = self.world.findings(self.trial.server)
            return not last

        await_true(nothing, FIND_SECONDS * slow(), lambda: f"the doctor finds {last}", 0.5)
        wrong = [
            one
            for one in (*self.world.doubled, *self.world.folder.violations())
            if self.trial.server in one
        ]
        assert not wrong, f"seen meanwhile: {wrong}"


__all__ = ["Kind", "NotInjected", "Outcome", "run"]
