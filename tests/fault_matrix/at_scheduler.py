# SPDX-License-Identifier: Apache-2.0
"""Faults of a request to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.domain import errors
from common.domain.models import Selection
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from tests.fault_matrix.aim import Fault, inject_once, match_part
from tests.fault_matrix.at_hosts import BROKER_SECONDS
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import default_selection_options

#: Shorter than the lease of the waiting conductor.
LATE_SECONDS = 10


def restart_scheduler(bench: Bench) -> None:
    """Replace the scheduler by a new one without the proposals of the old."""
    cloud = bench.cloud
    cloud.scheduler = Proposals(Hosts(cloud.store, cloud.time), default_selection_options())


def _inject_at_request(
    bench: Bench, cell: Cell, when: str, inject: Callable[[Point], object]
) -> None:
    """Inject a fault when the step's request to the scheduler is "asked" or "answered"."""
    in_prepare: list[bool] = []

    def watch_prepare(point: Point) -> None:
        if match_part(cell, "prepare", "begins")(point):
            in_prepare.append(True)
        elif match_part(cell, "prepare", "ends")(point):
            in_prepare.clear()

    bench.watchers.append(watch_prepare)
    inject_once(bench, lambda point: bool(in_prepare) and point[:2] == ("select", when), inject)


def _make_no_answer(bench: Bench, restarts: bool) -> Callable[[Point], object]:
    def fail(point: Point) -> None:
        if restarts:
            restart_scheduler(bench)
        raise errors.NoAnswer("lost")

    return fail


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "asked", _make_no_answer(bench, True))
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the scheduler between the choice and the answer."""
    _inject_at_request(bench, cell, "answered", _make_no_answer(bench, True))
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "answered", lambda point: restart_scheduler(bench))
    return Verdict.LATE


def restart_broker(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def stop(point: Point) -> None:
        until = bench.time.monotonic() + BROKER_SECONDS
        bench.lose = lambda kind: bench.time.monotonic() < until
        bench.extend_fault(BROKER_SECONDS)

    _inject_at_request(bench, cell, "asked", stop)
    return Verdict.LATE


def lose_request(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "asked", _make_no_answer(bench, False))
    return Verdict.LATE


def lose_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "answered", _make_no_answer(bench, False))
    return Verdict.LATE


def double_request(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "asked", lambda point: bench.select(point[2], False))
    return Verdict.LATE


def delay_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "answered", lambda point: bench.pass_time(LATE_SECONDS))
    return Verdict.LATE


def answer_no_host(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def empty_next_answer(point: Point) -> None:
        def empty_selections(selections: list[Selection]) -> list[Selection]:
            bench.answer = lambda unchanged: unchanged
            return [replace(selection, hosts=[], reason="none fits") for selection in selections]

        bench.answer = empty_selections

    _inject_at_request(bench, cell, "asked", empty_next_answer)
    return Verdict.ENDED


def delete_while_waiting(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _inject_at_request(bench, cell, "answered", lambda point: bench.delete_server())
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "scheduler-kill-before": kill_before,
    "scheduler-kill-mid": kill_mid,
    "scheduler-kill-after": kill_after,
    "broker-restarts-while-asked": restart_broker,
    "question-lost": lose_request,
    "answer-lost": lose_answer,
    "question-doubled": double_request,
    "answer-late": delay_answer,
    "no-host": answer_no_host,
    "delete-while-asked": delete_while_waiting,
}
