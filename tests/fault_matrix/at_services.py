# SPDX-License-Identifier: Apache-2.0
"""Faults of a call of an external service or of the fencing hook, and of the calling conductor."""

from __future__ import annotations

from common.store.servers import actions
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.answers import Answer
from tests.fault_matrix.aim import CONDUCTOR, Fault, inject_once, kill_at_point, match_part
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.service_doubles import ServiceDouble, do_nothing

AWAY_SECONDS, LATE_SECONDS = 60, 20
#: Calls that only read.
READS = {"show", "find", "ports", "port", "names_guests", "described", "volume", "attachments"}
#: Steps whose calls only read in these scenarios. There, a read has the late effect.
READ_ONLY_STEPS = ("plug", "rotate", "look_at_size", "release", "release_volumes_late")


def find_service(bench: Bench, cell: Cell) -> ServiceDouble:
    """Return the service that the cell's step calls."""
    step = WORKFLOWS[cell.workflow].steps[WORKFLOWS[cell.workflow].index(cell.step)]
    cloud = bench.cloud
    service: ServiceDouble = {
        Lane.IMAGE: cloud.images,
        Lane.NETWORK: cloud.networks,
        Lane.SHARE: cloud.shares,
        Lane.VOLUME: cloud.volumes,
        Lane.FENCING: getattr(cloud, "fencer", None),
    }[step.lane]
    return service


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_part(cell, "call", "begins"), kill_at_point(CONDUCTOR))
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Kill the conductor when the service has carried out the first request of the step."""
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: kill_conductor_at_answer(bench, cell),
    )
    return Verdict.LATE


def kill_conductor_at_answer(bench: Bench, cell: Cell) -> None:
    """Kill the conductor just before the answer to the next request arrives."""
    service = find_service(bench, cell)
    died: list[bool] = []

    def die() -> None:
        service.before_answer = do_nothing
        died.append(True)
        kill_at_point(CONDUCTOR)(())

    service.before_answer = die
    bench.proofs.append(lambda: bool(died))


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(bench, match_part(cell, "call", "ends"), kill_at_point(CONDUCTOR))
    return Verdict.LATE


def refuse_call(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: script_next_call(bench, cell, Answer.CONFLICT),
    )
    return Verdict.ENDED


def ignore_call(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: script_next_call(bench, cell, Answer.SILENT),
    )
    return Verdict.LATE


def lose_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: script_next_call(bench, cell, Answer.LOST),
    )
    return Verdict.LATE


def halve_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: script_next_call(bench, cell, Answer.HALF),
    )
    return Verdict.LATE


def script_next_call(bench: Bench, cell: Cell, answer: Answer) -> None:
    """Let the service answer the next request like this."""
    service = find_service(bench, cell)
    number = service.calls + 1
    service.script[number] = answer
    bench.proofs.append(lambda: service.calls >= number)


def delay_answer(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Let time pass for all other parts while the conductor waits for the answer."""
    inject_once(
        bench, match_part(cell, "call", "begins"), lambda point: bench.pass_time(LATE_SECONDS)
    )
    return Verdict.LATE


def delay_effect(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench, match_part(cell, "call", "begins"), lambda point: delay_next_effect(bench, cell)
    )
    return Verdict.LATE


def delay_next_effect(bench: Bench, cell: Cell) -> None:
    """Let the next changing request time out, and take effect some seconds later."""
    service = find_service(bench, cell)
    only_reads = cell.step in READ_ONLY_STEPS
    service.next_of = set(service.call_names) - (set() if only_reads else READS), Answer.LATE
    bench.schedule(LATE_SECONDS, service.catches_up)
    bench.proofs.append(lambda: service.next_of is None and not service.late_calls)


def silence_service(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Let the service neither answer nor send events for a minute."""
    inject_once(
        bench, match_part(cell, "call", "begins"), lambda point: silence_called_service(bench, cell)
    )
    return Verdict.ENDED


def silence_called_service(bench: Bench, cell: Cell) -> None:
    """Let the service of the cell's step be silent for ``AWAY_SECONDS``."""
    service = find_service(bench, cell)
    service.silent = 1_000_000

    def return_service() -> None:
        service.silent = 0

    bench.schedule(AWAY_SECONDS, return_service)


def double_events(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Send the step's event twice before the call."""

    def wake(point: Point) -> None:
        for _ in range(2):
            bench.cloud.store.write(lambda tx: actions.wake(tx, [bench.trial.server], cell.step))

    inject_once(bench, match_part(cell, "call", "begins"), wake)
    return Verdict.LATE


def delete_during_call(bench: Bench, cell: Cell, turn: int) -> Verdict:
    inject_once(
        bench,
        match_part(cell, "call", "begins"),
        lambda point: bench.delete_server(),
    )
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "caller-kill-before": kill_before,
    "caller-kill-mid": kill_mid,
    "caller-kill-after": kill_after,
    "service-refuses": refuse_call,
    "service-silent": ignore_call,
    "service-did-it-unanswered": lose_answer,
    "service-answers-half": halve_answer,
    "service-answers-late": delay_answer,
    "service-does-it-late": delay_effect,
    "service-away": silence_service,
    "event-doubled": double_events,
    "delete-while-called": delete_during_call,
}
