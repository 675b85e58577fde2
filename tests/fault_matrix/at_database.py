# SPDX-License-Identifier: Apache-2.0
"""Faults of a step's transaction: the conductor is killed or suspended, or the database fails."""

from __future__ import annotations

import sqlalchemy as sa

from tests.fault_matrix import stage
from tests.fault_matrix.aim import (
    CONDUCTOR,
    Fault,
    inject_once,
    kill_at_point,
    match_commit,
    match_journal,
    match_point_before,
)
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict

DEADLOCK, LOCK_WAIT, GONE = 1213, 1205, 2013
AWAY_SECONDS = 6.0
#: Longer than every lease.
LEASES_SECONDS = 80


def make_error(number: int) -> sa.exc.OperationalError:
    """Return an error of MariaDB's driver with this number."""
    return sa.exc.OperationalError(
        "statement", {}, Exception(number, "fault"), connection_invalidated=number == GONE
    )


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_point_before(cell, stage.name_scenario(cell.workflow, cell.step)),
        kill_at_point(CONDUCTOR),
    )
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the conductor after all statements and before COMMIT."""
    inject_once(bench, match_journal(cell), lambda point: kill_at_next_point(bench, "written"))
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the conductor directly after COMMIT."""
    inject_once(
        bench, match_commit(cell, "after"), lambda point: kill_at_next_point(bench, "committed")
    )
    return Verdict.LATE


def kill_at_next_point(bench: Bench, where: str) -> None:
    """Kill the conductor at the next point, which must be ``where``."""
    died: list[bool] = []

    def look(point: Point) -> None:
        if point[0] == CONDUCTOR:
            bench.watchers.remove(look)
            if point[3] == where:
                died.append(True)
                kill_at_point(CONDUCTOR)(point)

    bench.watchers.append(look)
    bench.proofs.append(lambda: bool(died))


def suspend_conductor(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Suspend the conductor while another completes the step.

    The check passes only if the resumed conductor does not record the step again.
    """

    def run_another(point: Point) -> None:
        with bench.run_another_conductor():
            for _ in range(LEASES_SECONDS):
                bench.pass_time(1)
                if ("journal", cell.step, "succeeded") in bench.trace:
                    break
        at = len(bench.trace)
        bench.proofs.append(
            lambda: (
                ("journal", cell.step, "succeeded") in bench.trace[:at]
                and ("journal", cell.step, "succeeded") not in bench.trace[at:]
            )
        )

    inject_once(
        bench, match_point_before(cell, stage.name_scenario(cell.workflow, cell.step)), run_another
    )
    return Verdict.LATE


def drop_connection(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_journal(cell), _make_failure(GONE))
    return Verdict.LATE


def lose_commit_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_commit(cell, "after"), _make_failure(GONE))
    return Verdict.LATE


def lose_commit(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_commit(cell, "before"), _make_failure(GONE))
    return Verdict.LATE


def raise_deadlock(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_journal(cell), _make_failure(DEADLOCK))
    return Verdict.LATE


def time_out_lock(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_journal(cell), _make_failure(LOCK_WAIT))
    return Verdict.LATE


def restart_database(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_journal(cell), lambda point: stop_database(bench))
    return Verdict.LATE


def stop_database(bench: Bench) -> None:
    """Refuse all statements for ``AWAY_SECONDS``."""
    until = bench.time.monotonic() + AWAY_SECONDS

    def look(point: Point) -> None:
        if point[0] == "statement" and bench.running and bench.time.monotonic() < until:
            raise make_error(GONE)

    bench.watchers.append(look)
    bench.extend_fault(AWAY_SECONDS)
    raise make_error(GONE)


def _make_failure(number: int) -> Fault:
    def fail(point: Point) -> None:
        raise make_error(number)

    return fail  # type: ignore[return-value]


def delete_during_step(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_point_before(cell, stage.name_scenario(cell.workflow, cell.step)),
        lambda point: bench.delete_server(),
    )
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "conductor-kill-before": kill_before,
    "conductor-kill-mid": kill_mid,
    "conductor-kill-after": kill_after,
    "conductor-sleeps-past-lease": suspend_conductor,
    "database-drops-before-commit": drop_connection,
    "database-commits-unanswered": lose_commit_answer,
    "database-loses-commit-unanswered": lose_commit,
    "database-deadlock": raise_deadlock,
    "database-restarts": restart_database,
    "database-lock-times-out": time_out_lock,
    "delete-before-commit": delete_during_step,
}
