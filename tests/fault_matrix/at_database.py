# SPDX-License-Identifier: Apache-2.0
"""What happens to a transaction of the conductor: who makes it is killed or sleeps, or the
database fails."""

from __future__ import annotations

import sqlalchemy as sa

from tests.fault_matrix import stage
from tests.fault_matrix.aim import CONDUCTOR, Fault, before, commits, dies, journals, once
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict

DEADLOCK, LOCK_WAIT, GONE = 1213, 1205, 2013
AWAY_SECONDS = 6.0
LEASES_SECONDS = 80  # longer than any lease lasts


def error(number: int) -> sa.exc.OperationalError:
    """As MariaDB's driver says it."""
    return sa.exc.OperationalError(
        "statement", {}, Exception(number, "fault"), connection_invalidated=number == GONE
    )


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, before(cell, stage.scenario_of(cell.workflow, cell.step)), dies(CONDUCTOR))
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """All is written, and not committed."""
    once(bench, journals(cell), lambda point: dies_next(bench, "written"))
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Nothing that follows the commit was done."""
    once(bench, commits(cell, "after"), lambda point: dies_next(bench, "committed"))
    return Verdict.LATE


def dies_next(bench: Bench, where: str) -> None:
    """The conductor is killed at its next point, which is this."""
    died: list[bool] = []

    def look(point: Point) -> None:
        if point[0] == CONDUCTOR:
            bench.watchers.remove(look)
            if point[3] == where:
                died.append(True)
                dies(CONDUCTOR)(point)

    bench.watchers.append(look)
    bench.proofs.append(lambda: bool(died))


def sleeps(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Another conductor does its work meanwhile; when it wakes it changes nothing."""

    def sleep(point: Point) -> None:
        with bench.another_conductor():
            for _ in range(LEASES_SECONDS):
                bench.world(1)
                if ("journal", cell.step, "succeeded") in bench.trace:
                    break
        at = len(bench.trace)
        bench.proofs.append(
            lambda: (
                ("journal", cell.step, "succeeded") in bench.trace[:at]
                and ("journal", cell.step, "succeeded") not in bench.trace[at:]
            )
        )

    once(bench, before(cell, stage.scenario_of(cell.workflow, cell.step)), sleep)
    return Verdict.LATE


def drops(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, journals(cell), _raises(GONE))
    return Verdict.LATE


def unanswered(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, commits(cell, "after"), _raises(GONE))
    return Verdict.LATE


def lost(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, commits(cell, "before"), _raises(GONE))
    return Verdict.LATE


def deadlock(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, journals(cell), _raises(DEADLOCK))
    return Verdict.LATE


def lock_times_out(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, journals(cell), _raises(LOCK_WAIT))
    return Verdict.LATE


def restarts(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, journals(cell), lambda point: away(bench))
    return Verdict.LATE


def away(bench: Bench) -> None:
    """The database is restarted: whoever asks it is refused for a while."""
    until = bench.time.monotonic() + AWAY_SECONDS

    def look(point: Point) -> None:
        if point[0] == "statement" and bench.running and bench.time.monotonic() < until:
            raise error(GONE)

    bench.watchers.append(look)
    bench.is_over(AWAY_SECONDS)
    raise error(GONE)


def _raises(number: int) -> Fault:
    def fail(point: Point) -> None:
        raise error(number)

    return fail  # type: ignore[return-value]


def delete(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(
        bench,
        before(cell, stage.scenario_of(cell.workflow, cell.step)),
        lambda point: bench.user_deletes(),
    )
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "conductor-kill-before": kill_before,
    "conductor-kill-mid": kill_mid,
    "conductor-kill-after": kill_after,
    "conductor-sleeps-past-lease": sleeps,
    "database-drops-before-commit": drops,
    "database-commits-unanswered": unanswered,
    "database-loses-commit-unanswered": lost,
    "database-deadlock": deadlock,
    "database-restarts": restarts,
    "database-lock-times-out": lock_times_out,
    "delete-before-commit": delete,
}
