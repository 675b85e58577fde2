# SPDX-License-Identifier: Apache-2.0
"""What happens to a question to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.domain import errors
from common.domain.models import Selection
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from tests.fault_matrix.aim import Fault, once, part
from tests.fault_matrix.at_hosts import BROKER_SECONDS
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.simulator import default_selection_options

LATE_SECONDS = 10  # shorter than the lease of who asks


def restart(bench: Bench) -> None:
    """Another scheduler, which knows nothing of what this one proposed."""
    cloud = bench.cloud
    cloud.scheduler = Proposals(Hosts(cloud.store, cloud.time), default_selection_options())


def _asks(bench: Bench, cell: Cell, when: str, then: Callable[[Point], object]) -> None:
    """The step asks, or is answered."""
    asking: list[bool] = []

    def begins(point: Point) -> None:
        if part(cell, "prepare", "begins")(point):
            asking.append(True)
        elif part(cell, "prepare", "ends")(point):
            asking.clear()

    bench.watchers.append(begins)
    once(bench, lambda point: bool(asking) and point[:2] == ("select", when), then)


def _no_answer(bench: Bench, dies: bool) -> Callable[[Point], object]:
    def fail(point: Point) -> None:
        if dies:
            restart(bench)
        raise errors.NoAnswer("lost")

    return fail


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "asked", _no_answer(bench, True))
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """It has chosen and not answered."""
    _asks(bench, cell, "answered", _no_answer(bench, True))
    return Verdict.LATE


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "answered", lambda point: restart(bench))
    return Verdict.LATE


def broker_restarts(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def away(point: Point) -> None:
        until = bench.time.monotonic() + BROKER_SECONDS
        bench.lose = lambda kind: bench.time.monotonic() < until
        bench.is_over(BROKER_SECONDS)

    _asks(bench, cell, "asked", away)
    return Verdict.LATE


def question_lost(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "asked", _no_answer(bench, False))
    return Verdict.LATE


def answer_lost(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "answered", _no_answer(bench, False))
    return Verdict.LATE


def doubled(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "asked", lambda point: bench.select(point[2], False))
    return Verdict.LATE


def late(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "answered", lambda point: bench.world(LATE_SECONDS))
    return Verdict.LATE


def no_host(bench: Bench, cell: Cell, turn: int) -> Verdict:
    def none(point: Point) -> None:
        def answer(found: list[Selection]) -> list[Selection]:
            bench.answer = lambda kept: kept
            return [replace(one, hosts=[], reason="none fits") for one in found]

        bench.answer = answer

    _asks(bench, cell, "asked", none)
    return Verdict.ENDED


def delete(bench: Bench, cell: Cell, turn: int) -> Verdict:
    _asks(bench, cell, "answered", lambda point: bench.user_deletes())
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "scheduler-kill-before": kill_before,
    "scheduler-kill-mid": kill_mid,
    "scheduler-kill-after": kill_after,
    "broker-restarts-while-asked": broker_restarts,
    "question-lost": question_lost,
    "answer-lost": answer_lost,
    "question-doubled": doubled,
    "answer-late": late,
    "no-host": no_host,
    "delete-while-asked": delete,
}
