# SPDX-License-Identifier: Apache-2.0
"""The run of one cell with processes.

The run creates a server, injects the fault once, judges the end of the action, and deletes the
server without a trace.
"""

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
from tests.fault_matrix.processes.faults import BEFORE, PLANS, Plan, find_point_before
from tests.fault_matrix.processes.orders import Order
from tests.fault_matrix.processes.trial import UNANSWERED, Answer, Trial
from tests.fault_matrix.processes.world import World
from tests.waiting import await_true, is_true_within
from tests.workflows.scenarios import KILL

REACH_SECONDS, FIND_SECONDS, MOST_SLOW = 30, 20, 6.0
#: Permitted answers to the repetition of an accepted request.
DONE_BEFORE = (400, 404, 409)
#: Attempts to inject the fault, because the fault of another cell can come in between.
MOST_TRIES = 3


class NotInjected(AssertionError):
    """The fault of a cell was not injected."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell.

    Attributes:
        cell: The id of the cell.
        world: The kind of database.
        seconds: The duration of all attempts.
        problem: Empty if the cell passed.
        story: The traceback of the problem.
        tries: Number of attempts to inject the fault.
    """

    cell: str
    world: str
    seconds: float
    problem: str = ""
    story: str = ""
    tries: int = 1


def slow() -> float:
    """Return the factor for time limits, from the load of this machine. An idle machine has 1."""
    return min(MOST_SLOW, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def run(world: World, cell: Cell) -> Outcome:
    """Run a cell, and return exceptions as an outcome. Retry if the fault was not injected."""
    began, text, story, tries = time.monotonic(), "", "", 0
    while tries < MOST_TRIES:
        tries += 1
        try:
            check(world, cell)
        except Exception as problem:  # noqa: BLE001  # any failure is the cell's outcome
            message = " ".join(str(problem).split()) or "no message"
            text = f"{type(problem).__name__}: {message[:600]}"
            story = traceback.format_exc()[-3000:]
            if isinstance(problem, NotInjected):
                continue
        else:
            text = story = ""
        break
    return Outcome(cell.id, world.kind, time.monotonic() - began, text, story, tries)


def check(world: World, cell: Cell) -> None:
    """Run a cell.

    Raises:
        NotInjected: The fault was not injected.
        AssertionError: A check failed.
    """
    plan = PLANS[cell.kind](cell)
    if plan is None:
        raise NotInjected("the fault has no plan")
    with ExitStack() as stack:
        if is_rough(cell, plan):
            stack.enter_context(world.rough_lock)
            stack.callback(world.power_on)
        if plan.broker:
            stack.enter_context(world.broker_lock)
        if plan.sleeps:
            stack.enter_context(world.sleep_lock)
        zone = "rough" if is_rough(cell, plan) else "gentle"
        trial = Trial(world, cell.workflow, cell.step, zone)
        try:
            trial.prepare()
            _Case(world, cell, plan, trial).play()
        except BaseException:
            _delete_quietly(trial)
            raise
        trial.remove()


def is_rough(cell: Cell, plan: Plan) -> bool:
    """Return True if the cell makes a host unreachable for other cells."""
    return plan.rough or cell.workflow == "evacuate"


def _delete_quietly(trial: Trial) -> None:
    """Delete the server of a failed cell, and ignore errors."""
    try:
        if trial.zone == "rough":
            trial.world.power_on()
        trial.call("POST", f"/servers/{trial.server}/action", {"forceDelete": None}, admin=True)
    except Exception:  # noqa: BLE001  # the first failure is reported
        return


class _Case:
    """The run of one cell."""

    def __init__(self, world: World, cell: Cell, plan: Plan, trial: Trial) -> None:
        self.world, self.cell, self.plan, self.trial = world, cell, plan, trial
        self.point = find_point_before(cell) if plan.point == BEFORE else plan.point
        self.wanted = trial.scenario.ask
        mark = f"{zlib.crc32(cell.id.encode()):08x}-{trial.name}"
        self.main, self.beside = f"{mark}-main", f"{mark}-also"
        self.before = (
            {action.id for action in world.read_actions(trial.server)} if trial.server else set()
        )
        self.answers: list[Answer] = []
        trial.release = lambda: world.folder.release(self.main)

    def play(self) -> None:
        folder, plan = self.world.folder, self.plan
        server = self.trial.server or self.trial.name
        request_thread = threading.Thread(target=self._send_request)
        try:
            if plan.also:
                folder.give(Order(self.beside, server, *plan.also, stays=True))
            if plan.effect:
                folder.give(Order(self.main, server, self.point, plan.effect, plan.passes))
            request_thread.start()
            if plan.effect:
                self._await_fault(request_thread)
            request_thread.join()
            self._await_end()
        finally:
            folder.withdraw(self.beside)
            folder.withdraw(self.main)
        self._judge()

    # --- the request ---
    def _send_request(self) -> None:
        way = self.plan.by_client
        await_true(
            self._is_request_answered,
            120,
            lambda: f"the request is accepted. Answers: {self.answers}",
            0.3,
        )
        if way == "kills-api":
            self.world.kill("api")
        elif way == "repeats":
            await_true(
                self._is_repetition_answered,
                120,
                lambda: f"the repetition is answered. Answers: {self.answers}",
                0.3,
            )

    def _is_repetition_answered(self) -> bool:
        """Send the accepted request once more, and return True if the API answers."""
        answer = self.trial.send(self.wanted)
        is_valid = answer.is_accepted or (self.wanted != "create" and answer.status in DONE_BEFORE)
        if answer.status not in UNANSWERED and not is_valid:
            self.answers.append(answer)
        return answer.status not in UNANSWERED

    def _is_request_answered(self) -> bool:
        """Send the request, and return True if the API answered it or its action exists.

        Another cell may have killed the API, so a request without an answer is sent again. An
        existing action ends the retries, unless the retry is the fault itself.
        """
        had_no_answer = bool(self.answers)
        if had_no_answer and not self.plan.by_client and self._list_new_actions():
            self.answers[:] = [Answer(202)]
            return True
        self.answers.append(self.trial.send(self.wanted))
        status = self.answers[-1].status
        if self.answers[-1].is_accepted or (had_no_answer and status in DONE_BEFORE):
            self.answers[:] = [Answer(202)]
            return True
        return bool(status not in UNANSWERED)

    # --- the fault ---
    def _await_fault(self, request_thread: threading.Thread) -> None:
        folder = self.world.folder
        limit = REACH_SECONDS * slow()

        def is_taken() -> bool:
            return folder.read_taker(self.main) is not None

        def is_taken_or_over() -> bool:
            return is_taken() or (
                not request_thread.is_alive()
                and bool(self._list_new_actions())
                and self.trial.is_quiet()
            )

        is_true_within(is_taken_or_over, limit)
        if not is_true_within(is_taken, 1):
            raise NotInjected(
                f"no action reached the point {self.point}. Answers: {self.answers}. "
                f"{self.trial.story()}"
            )
        taker = folder.read_taker(self.main)
        assert taker is not None
        if not self.trial.server:
            await_true(self._is_named, 30, "the server has an id")
        self.plan.during(self.trial, taker)
        if not self.plan.is_late:
            folder.release(self.main)

    def _list_new_actions(self) -> list[Any]:
        """Return the actions that began after the request."""
        if not self.trial.server:
            return []
        actions = self.world.read_actions(self.trial.server)
        return [action for action in actions if action.id not in self.before]

    def _is_named(self) -> bool:
        path = self.world.folder.path / "names" / self.trial.name
        if path.exists():
            self.trial.server = path.read_text()
        return bool(self.trial.server)

    # --- the end ---
    def _await_end(self) -> None:
        """Wait for the end of the action, and check the answers to the client."""
        moves = self.trial.scenario.keeps is not None
        limit = (MOVE_SECONDS if moves else LOCAL_SECONDS) * slow()
        await_true(
            self.trial.is_quiet,
            limit,
            lambda: f"the action has ended after the fault. Last state: {self.trial.story()}",
            0.05,
            late=0.05,
        )
        if self.plan.by_client:
            refusals = [answer for answer in self.answers if not answer.is_accepted]
            assert not refusals, f"answered with {refusals}"

    def _judge(self) -> None:
        trial, verdict = self.trial, self.plan.verdict
        new_actions = self._list_new_actions()
        assert new_actions, f"no action was created: {self.answers}"
        if self.cell.workflow == "evacuate" or self.plan.rough:
            self.world.power_on()
            await_true(trial.is_quiet, MOVE_SECONDS * slow(), trial.story, 0.1)
        self._await_no_findings()
        row = trial.read_row()
        if verdict is Verdict.DELETED:
            assert row.deleted, f"it is not deleted: {trial.story()}"
            return
        if verdict is Verdict.BOTH and trial.accepted:
            return
        # A repeated request may supersede its own first action.
        lasting = [action for action in new_actions if action.state != "superseded"]
        first = min(lasting or new_actions, key=lambda action: action.created_at)
        if verdict is not Verdict.ENDED or first.state == "done":
            assert first.state == "done", trial.story()
            # As in Nova, a second DELETE removes a soft-deleted server at once.
            if first.workflow == "delete":
                assert row.deleted, trial.story()
                return
            if self.cell.workflow != "evacuate" and not self.plan.rough:
                assert row.vm_state == self._expected_state(), trial.story()
            return
        assert first.state == "failed", trial.story()
        self._check_failed_action(row.vm_state)

    def _expected_state(self) -> str:
        if self.trial.scenario.ends == states.SHELVED and self.trial.circumstance == "boots":
            return states.SHELVED_OFFLOADED
        return self.trial.scenario.ends

    def _check_failed_action(self, vm_state: str) -> None:
        """Check the state of the server, and repeat the request if the server is unchanged."""
        trial = self.trial
        was = trial.was.vm_state if trial.was else ""
        allowed = {trial.scenario.fails_as, trial.scenario.ends, states.ERROR, was}
        assert vm_state in allowed, f"{vm_state} is none of {allowed}"
        if vm_state != was or KILL in trial.scenario.before:
            return
        before = {action.id for action in self.world.read_actions(trial.server)}
        await_true(
            lambda: not self.world.list_hosts_with_cleanups(trial.server),
            FIND_SECONDS * slow(),
            "the pending cleanups are done",
            0.2,
        )
        await_true(
            lambda: trial.send(self.wanted).is_accepted, 60, "the request is accepted again", 0.3
        )
        await_true(trial.is_quiet, MOVE_SECONDS * slow(), trial.story, 0.1, late=0.05)
        repeated_actions = [
            action for action in self.world.read_actions(trial.server) if action.id not in before
        ]
        assert all(action.state == "done" for action in repeated_actions), (
            f"the second try: {trial.story()}"
        )
        self._await_no_findings()

    def _await_no_findings(self) -> None:
        """Wait until the doctor has no finding about this server, and check the invariants."""
        last: list[object] = []
        self.world.clean_up(self.trial.server)

        def has_no_findings() -> bool:
            last[:] = self.world.findings(self.trial.server)
            return not last

        await_true(
            has_no_findings,
            FIND_SECONDS * slow(),
            lambda: f"the doctor has no finding. Last: {last}",
            0.5,
        )
        violations = [
            text
            for text in (*self.world.doubled, *self.world.folder.violations())
            if self.trial.server in text
        ]
        assert not violations, f"violated invariants: {violations}"


__all__ = ["Kind", "NotInjected", "Outcome", "run"]
