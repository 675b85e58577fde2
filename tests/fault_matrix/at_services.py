# SPDX-License-Identifier: Apache-2.0
"""What happens to a call of the image, network or share service, or of the fencing hook, and to
whoever calls."""

from __future__ import annotations

from common.store.servers import actions
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.answers import Answer
from tests.fault_matrix.aim import CONDUCTOR, Fault, dies, once, part
from tests.fault_matrix.bench import Bench, Point
from tests.fault_matrix.cells import Cell
from tests.fault_matrix.outcome import Verdict
from tests.workflows.neighbours import ServiceDouble, do_nothing

AWAY_SECONDS, LATE_SECONDS = 60, 20
#: Calls that change nothing at a service.
READS = {"show", "find", "ports", "port", "names_guests", "described", "volume", "attachments"}
#: Steps that only look, as they are reached here: there a look is given up.
ONLY_LOOK = ("plug", "rotate", "look_at_size", "release", "release_volumes_late")


def service_of(bench: Bench, cell: Cell) -> ServiceDouble:
    """Who is called at the step."""
    step = WORKFLOWS[cell.workflow].steps[WORKFLOWS[cell.workflow].index(cell.step)]
    cloud = bench.cloud
    found: ServiceDouble = {
        Lane.IMAGE: cloud.images,
        Lane.NETWORK: cloud.networks,
        Lane.SHARE: cloud.shares,
        Lane.VOLUME: cloud.volumes,
        Lane.FENCING: getattr(cloud, "fencer", None),
    }[step.lane]
    return found


def kill_before(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), dies(CONDUCTOR))
    return Verdict.LATE


def kill_mid(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The service has carried out the first of the step's requests."""
    once(bench, part(cell, "call", "begins"), lambda point: dies_when_answered(bench, cell))
    return Verdict.LATE


def dies_when_answered(bench: Bench, cell: Cell) -> None:
    """The conductor hears no answer to its next request: it is dead."""
    service = service_of(bench, cell)
    died: list[bool] = []

    def die() -> None:
        service.before_answer = do_nothing
        died.append(True)
        dies(CONDUCTOR)(())

    service.before_answer = die
    bench.proofs.append(lambda: bool(died))


def kill_after(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "ends"), dies(CONDUCTOR))
    return Verdict.LATE


def refuses(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), lambda point: script(bench, cell, Answer.CONFLICT))
    return Verdict.ENDED


def silent(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), lambda point: script(bench, cell, Answer.SILENT))
    return Verdict.LATE


def did_it(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), lambda point: script(bench, cell, Answer.LOST))
    return Verdict.LATE


def half(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), lambda point: script(bench, cell, Answer.HALF))
    return Verdict.LATE


def script(bench: Bench, cell: Cell, answer: Answer) -> None:
    """The next request is answered so."""
    service = service_of(bench, cell)
    number = service.calls + 1
    service.script[number] = answer
    bench.proofs.append(lambda: service.calls >= number)


def answers_late(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """The conductor waits, and others go on."""
    once(bench, part(cell, "call", "begins"), lambda point: bench.world(LATE_SECONDS))
    return Verdict.LATE


def does_it_late(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(bench, part(cell, "call", "begins"), lambda point: put_off(bench, cell))
    return Verdict.LATE


def put_off(bench: Bench, cell: Cell) -> None:
    """The next request that changes something is given up, and carried out some seconds later."""
    service = service_of(bench, cell)
    looks = cell.step in ONLY_LOOK
    service.next_of = set(service.call_names) - (set() if looks else READS), Answer.LATE
    bench.later(LATE_SECONDS, service.catches_up)
    bench.proofs.append(lambda: service.next_of is None and not service.late_calls)


def away(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """For a minute nobody there answers, nor sends an event."""
    once(bench, part(cell, "call", "begins"), lambda point: leave(bench, cell))
    return Verdict.ENDED


def leave(bench: Bench, cell: Cell) -> None:
    """Whoever the step calls is away from now on."""
    service = service_of(bench, cell)
    service.silent = 1_000_000

    def back() -> None:
        service.silent = 0

    bench.later(AWAY_SECONDS, back)


def event_doubled(bench: Bench, cell: Cell, turn: int) -> Verdict:
    """Events come twice, before and while it is called."""

    def wake(point: Point) -> None:
        for _ in range(2):
            bench.cloud.store.write(lambda tx: actions.wake(tx, [bench.trial.server], cell.step))

    once(bench, part(cell, "call", "begins"), wake)
    return Verdict.LATE


def delete(bench: Bench, cell: Cell, turn: int) -> Verdict:
    once(
        bench,
        part(cell, "call", "begins"),
        lambda point: bench.user_deletes(),
    )
    return Verdict.DELETED


FAULTS: dict[str, Fault] = {
    "caller-kill-before": kill_before,
    "caller-kill-mid": kill_mid,
    "caller-kill-after": kill_after,
    "service-refuses": refuses,
    "service-silent": silent,
    "service-did-it-unanswered": did_it,
    "service-answers-half": half,
    "service-answers-late": answers_late,
    "service-does-it-late": does_it_late,
    "service-away": away,
    "event-doubled": event_doubled,
    "delete-while-called": delete,
}
