# SPDX-License-Identifier: Apache-2.0
"""How each fault of a cell is made to happen to real processes: the orders that are given, and what
is done from outside when one of them was taken. One table; what it has not is in ``unfit``."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from common.domain.command_key import UNDO
from common.store.schema import events
from common.store.servers import actions
from conductor.workflows import WORKFLOWS
from tests.fault_matrix import aim, at_undo, pairs, stage
from tests.fault_matrix.cells import REQUESTS, Cell, Kind
from tests.fault_matrix.outcome import Verdict
from tests.fault_matrix.processes.at_agents import LEASE_SECONDS
from tests.fault_matrix.processes.at_conductors import CALLS_SECONDS
from tests.fault_matrix.processes.orders import ANY
from tests.fault_matrix.processes.trial import Trial
from tests.fault_matrix.processes.world import CONDUCTORS
from tests.waiting import await_true

Point = tuple[str, ...]
#: Who took the order: its process, and that one's number.
During = Callable[[Trial, tuple[str, int]], None]
#: Seconds that a host is cut off.
PARTITION_SECONDS = LEASE_SECONDS + 8
ACCEPT, ACCEPTED = "accept", "accepted"
#: In place of a point that takes the simulator to find: see ``before``.
BEFORE: Point = ("conductor",)
#: Second actions whose refusal the table of states says nothing about.
CHECKED_ELSEWHERE = (
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
    "detach_interface",
    "evacuate",
)


_one_simulator = threading.Lock()  # it is not made for threads
#: Points of conductors.
_THERE = ("journal", "commit", "conductor", "part", "call", "result")


def _nothing(trial: Trial, who: tuple[str, int]) -> None:
    """Nobody else has to do anything."""


@dataclass(frozen=True)
class Plan:
    """``point``, ``deed``: the order that is the cell's fault; none: its client does it.
    ``during``: what is done when it was taken, before who is held goes on. ``also``: an order
    beside it that stays. ``rough``: a host is lost to others. ``is_late``: who was held goes on
    when all is over. ``on_servers``: not with SQLite, whose file nobody can write to while a
    conductor sleeps. ``sleeps``: a conductor does. ``by_client``: how it asks, when not once."""

    point: Point
    deed: str
    verdict: Verdict = Verdict.LATE
    during: During = _nothing
    also: tuple[Point, str] | None = None
    passes: int = 0
    rough: bool = False
    broker: bool = False
    is_late: bool = False
    on_servers: bool = False
    sleeps: bool = False
    by_client: str = ""

    @property
    def strikes_conductors(self) -> bool:
        """Does a conductor die of it, or sleep? Who was started just now judges no host."""
        dies = self.deed in ("kill", "stop") and self.point[0] in _THERE
        return (dies and not self.by_client) or self.during is _conductors_die


# --- what is done from outside ---
def _deletes(trial: Trial, who: tuple[str, int]) -> None:
    url = f"/servers/{trial.server}/action"

    def gone() -> bool:
        answer = trial.call("POST", url, {"forceDelete": None})
        return answer.is_accepted or answer.status == 404

    await_true(gone, 60, "the delete is accepted", 0.3)


def _conductors_die(trial: Trial, who: tuple[str, int]) -> None:
    for name in CONDUCTORS:
        trial.world.kill(name)


def _scheduler_dies(trial: Trial, who: tuple[str, int]) -> None:
    trial.world.kill("scheduler")


def _broker(cell: Cell) -> During:
    def restart(trial: Trial, who: tuple[str, int]) -> None:
        trial.world.restart_broker(wiped=zlib.crc32(cell.id.encode()) % 3 == 0)

    return restart


def _conductor_sleeps(cell: Cell) -> During:
    """Another does its work, at the latest when the lease has run out; then it goes on."""

    def sleep(trial: Trial, who: tuple[str, int]) -> None:
        def is_done() -> bool:
            wanted = (
                sa.select(sa.func.count())
                .select_from(events)
                .where(
                    events.c.action_id.in_([one.id for one in trial.world.actions(trial.server)]),
                    events.c.step == cell.step,
                    events.c.event == "succeeded",
                )
            )
            return bool(trial.world.store.read(lambda tx: tx.scalar(wanted)))

        try:
            await_true(is_done, CALLS_SECONDS * 4, "another conductor did its work", 0.1)
        finally:
            trial.world.goes_on(who[1])

    return sleep


def _agent_sleeps(trial: Trial, who: tuple[str, int]) -> None:
    try:
        trial.world.await_down(_host(trial, who[0]))
    finally:
        trial.world.goes_on(who[1])


def _host_gone(trial: Trial, who: tuple[str, int]) -> None:
    host = _host(trial, who[0])
    trial.world.await_down(host)
    trial.world.force_down(host)


def _partitioned(trial: Trial, who: tuple[str, int]) -> None:
    trial.world.await_down(_host(trial, who[0]))


def _host(trial: Trial, process: str) -> str:
    return next(host for host in trial.world.files if trial.world.agent(host) == process)


def _wakes(cell: Cell) -> During:
    def wake(trial: Trial, who: tuple[str, int]) -> None:
        for _ in range(2):
            trial.world.store.write(lambda tx: actions.wake(tx, [trial.server], cell.step))

    return wake


# --- by kind ---
def before(cell: Cell) -> Point:
    """The last point before the step's transaction at which nobody holds one, by a trace of the
    simulator."""
    with _one_simulator:
        found = aim.find_point_before(stage.scenario_of(cell.workflow, cell.step), cell.step)
    if found[0] == "result":
        named = any(found[2] == step.name for story in WORKFLOWS.values() for step in story.steps)
        return ("result", str(found[2]) if named else ANY)
    return ("conductor", ANY, str(found[2]), str(found[3]))


def transaction(cell: Cell) -> Plan | None:
    journal = ("journal", cell.step, "succeeded")
    commit = ("commit", "before", cell.step, "succeeded")
    committed = ("commit", "after", cell.step, "succeeded")
    match cell.fault:
        case "conductor-kill-before":
            return Plan(BEFORE, "kill")
        case "conductor-kill-mid":
            return Plan(journal, "kill")
        case "conductor-kill-after":
            return Plan(committed, "kill")
        case "conductor-sleeps-past-lease":
            sleep = _conductor_sleeps(cell)
            return Plan(BEFORE, "stop", during=sleep, on_servers=True, sleeps=True)
        case "database-drops-before-commit":
            return Plan(journal, "cut", on_servers=True)
        case "database-loses-commit-unanswered":
            return Plan(commit, "cut", on_servers=True)
        case "database-commits-unanswered":
            return Plan(committed, "cut", on_servers=True)
        case "delete-before-commit":
            return Plan(BEFORE, "hold", Verdict.DELETED, _deletes)
    return None


def schedule(cell: Cell) -> Plan | None:
    asked, answered = ("select", "asked"), ("select", "answered")
    match cell.fault:
        case "scheduler-kill-before":
            return Plan(("scheduler", "asked"), "kill")
        case "scheduler-kill-mid":
            return Plan(("scheduler", "chosen"), "kill")
        case "scheduler-kill-after":
            return Plan(("conductor", ANY, cell.step, "proposed"), "hold", during=_scheduler_dies)
        case "broker-restarts-while-asked":
            held = ("part", cell.workflow, cell.step, "prepare", "begins")
            return Plan(held, "hold", during=_broker(cell), broker=True)
        case "question-lost":
            return Plan(asked, "lose")
        case "answer-lost":
            return Plan(answered, "lose")
        case "question-doubled":
            return Plan(asked, "double")
        case "answer-late":
            return Plan(answered, "late")
        case "no-host":
            return Plan(answered, "none", Verdict.ENDED)
        case "delete-while-asked":
            held = ("conductor", ANY, cell.step, "proposed")
            return Plan(held, "hold", Verdict.DELETED, _deletes)
    return None


def command(cell: Cell) -> Plan | None:
    before, sent = ("agent", cell.step, "before"), ("send", cell.step)
    inside, ended = ("agent", cell.step, "inside"), Verdict.ENDED
    match cell.fault:
        case "agent-kill-before":
            return Plan(before, "kill")
        case "agent-kill-mid":
            return Plan(inside, "kill", passes=zlib.crc32(cell.id.encode()) % 2)
        case "agent-kill-after":
            return Plan(("agent", cell.step, "after"), "kill")
        case "conductor-kill-waiting":
            return Plan(before, "hold", during=_conductors_die)
        case "agent-sleeps-past-lease":
            return Plan(before, "stop", ended, _agent_sleeps, rough=True)
        case "broker-restarts":
            return Plan(before, "hold", during=_broker(cell), broker=True)
        case "request-lost":
            return Plan(sent, "lose")
        case "reply-lost":
            return Plan(("answers", cell.step), "lose")
        case "duplicated":
            return Plan(sent, "double")
        case "comes-after-newer-fence":
            return Plan(sent, "keep", is_late=True)
        case "hypervisor-refuses":
            return Plan(("agent", cell.step, "entered"), "refuse", ended)
        case "no-space":
            return Plan(("agent", cell.step, "entered"), "no-space", ended)
        case "hypervisor-restarts":
            return Plan(("agent", cell.step, "left"), "restarts")
        case "host-gone":
            return Plan(before, "power-cut", ended, _host_gone, rough=True)
        case "partition-past-lease":
            deed = f"partition {PARTITION_SECONDS:g}"
            return Plan(before, deed, ended, _partitioned, rough=True)
        case "delete-while-commanded":
            return Plan(before, "hold", Verdict.DELETED, _deletes)
    return None


def external(cell: Cell) -> Plan | None:
    call = ("call", cell.workflow, cell.step, "call")
    part = ("part", cell.workflow, cell.step, "call")
    match cell.fault:
        case "caller-kill-before":
            return Plan((*part, "begins"), "kill")
        case "caller-kill-mid":
            return Plan((*call, "answered"), "kill")
        case "caller-kill-after":
            return Plan((*part, "ends"), "kill")
        case "service-silent":
            return Plan((*call, "asked"), "lose")
        case "service-did-it-unanswered":
            return Plan((*call, "answered"), "lose")
        case "service-refuses":
            return Plan((*call, "asked"), "refuse", Verdict.ENDED)
        case "event-doubled":
            return Plan((*part, "begins"), "hold", during=_wakes(cell))
        case "delete-while-called":
            return Plan((*part, "begins"), "hold", Verdict.DELETED, _deletes)
    return None


def undo(cell: Cell) -> Plan | None:
    failing, step = at_undo.find_failing_step(cell), at_undo.find_step(cell)
    if failing.command:
        also: tuple[Point, str] = (("agent", failing.name, "entered"), "refuse")
    else:
        also = (("part", cell.workflow, failing.name, "call", "begins"), "refuse")
    kills = cell.fault == "undo-kill-mid"
    if cell.fault not in ("undo-kill-mid", "undo-repeated"):
        return None
    if step.undo_command:
        point = ("agent", f"{UNDO}{cell.step}", "inside" if kills else "after")
        return Plan(point, "kill", Verdict.ENDED, also=also)
    if step.undo_call:
        answered = ("call", cell.workflow, cell.step, "undo_call", "answered")
        return Plan(answered, "kill" if kills else "lose", Verdict.ENDED, also=also)
    if kills:
        return Plan(("journal", cell.step, "undone"), "kill", Verdict.ENDED, also=also)
    point = ("commit", "before", cell.step, "undone")
    return Plan(point, "cut", Verdict.ENDED, also=also, on_servers=True)


def accept(cell: Cell) -> Plan | None:
    commit, committed = (("commit", at, ACCEPT, ACCEPTED) for at in ("before", "after"))
    match cell.fault:
        case "api-kill-before-commit":
            return Plan(commit, "kill", by_client="insists")
        case "api-kill-after-commit":
            return Plan(committed, "kill", by_client="insists")
        case "api-kill-after-reply":
            return Plan((), "", by_client="kills-api")
        case "database-drops-before-commit":
            return Plan(("accept", "statement"), "cut", by_client="insists", on_servers=True)
        case "database-loses-commit-unanswered":
            return Plan(commit, "cut", by_client="insists", on_servers=True)
        case "database-commits-unanswered":
            return Plan(committed, "cut", by_client="insists", on_servers=True)
        case "client-retries":
            return Plan((), "", by_client="repeats")
        case "conflicting-request":
            return Plan(("conductor", cell.workflow, ANY, "taken"), "hold", during=_conflicts)
    return None


def pair(cell: Cell) -> Plan | None:
    steps = WORKFLOWS[cell.workflow].steps
    if any(step.command for step in steps):
        point: Point = ("agent", ANY, "before")
    elif any(step.call for step in steps):
        point = ("part", cell.workflow, ANY, "call", "begins")
    else:
        point = ("conductor", cell.workflow, ANY, "taken")
    return Plan(point, "hold", Verdict.BOTH, _asks(cell))


def _conflicts(trial: Trial, who: tuple[str, int]) -> None:
    """Somebody wants something else while it is in hand."""
    answer = trial.ask_beside("reboot:SOFT")
    assert answer.status == 409 or _goes_on(trial, who), f"both were accepted: {answer}"


def _goes_on(trial: Trial, who: tuple[str, int]) -> bool:
    """Is the first not held any more: let go, or who held it was killed by another cell?"""
    return trial.was_released or not os.path.exists(f"/proc/{who[1]}")


def _asks(cell: Cell) -> During:
    """The second request: refused as the table of states says, or accepted by it."""

    def ask(trial: Trial, who: tuple[str, int]) -> None:
        row = trial.row()
        may = pairs.is_allowed(REQUESTS[cell.fault], row)
        if cell.fault == "soft_delete":  # DELETE is a delete for good where that is not possible
            may = may or pairs.is_allowed(REQUESTS["delete"], row)
        before = len(trial.world.actions(trial.server))
        answer = trial.ask_beside(REQUESTS[cell.fault])
        made = len(trial.world.actions(trial.server)) - before
        elsewhere = cell.fault in CHECKED_ELSEWHERE
        if answer.is_accepted:
            fits = may or (elsewhere and not made) or _goes_on(trial, who)
            assert fits, f"{cell.fault} is accepted: {answer}"
            trial.accepted = bool(made)
            return
        assert 400 <= answer.status < 500, f"{cell.fault} is answered with {answer}"
        refusals = (400, 404, 409) if elsewhere else (409,)
        assert may or answer.status in refusals, f"{cell.fault} is answered with {answer}"
        assert not made, f"{cell.fault} was refused and left an action"

    return ask


PLANS: dict[Kind, Callable[[Cell], Plan | None]] = {
    Kind.ACCEPT: accept,
    Kind.TRANSACTION: transaction,
    Kind.SCHEDULE: schedule,
    Kind.COMMAND: command,
    Kind.EXTERNAL: external,
    Kind.UNDO: undo,
    Kind.PAIR: pair,
}
#: Workflows that these clouds do not come to, and why.
_ONE_HOST = "needs a cloud of one host, on which a resize stays"
_SHARES = "there is no share service to run"
_NO_FILES = "the volume service here snapshots its volumes itself, and never asks a host"
WORKFLOWS_OUT = {
    "resize_here": _ONE_HOST,
    "confirm_here": _ONE_HOST,
    "revert_here": _ONE_HOST,
    "attach_share": _SHARES,
    "detach_share": _SHARES,
    "swap_volume": "the volume service here moves no volume, and only one that does may ask for it",
    "volume_snapshot_create": _NO_FILES,
    "volume_snapshot_delete": _NO_FILES,
}


def unfit(cell: Cell) -> str:
    """Why a cell is none of this tier; empty: it is one."""
    if cell.kind is Kind.CLEANUP:
        return "a neighbour that refuses is the simulator's"
    if cell.kind is Kind.DEBT:
        return "a host that comes back with something to remove is the simulator's"
    if why := WORKFLOWS_OUT.get(cell.workflow):
        return why
    if cell.kind is Kind.PAIR:
        if cell.fault == "create":
            return "nobody can ask for a create of a server that is there"
        return WORKFLOWS_OUT.get(cell.fault, "")
    if cell.kind is Kind.UNDO and cell.step == "revive":
        return "a host that comes back meanwhile is the simulator's, and tier 2's"
    circumstance = stage.CIRCUMSTANCES.get((cell.workflow, cell.step), "")
    if (cell.workflow, circumstance) == ("snapshot", stage.BOOTS):
        return "most machines' file systems make no snapshot of a volume in use"
    if circumstance not in ("", stage.WITH_VOLUMES, stage.BOOTS, stage.SHELVED):
        return f"the circumstance {circumstance} is the simulator's"
    if PLANS[cell.kind](cell) is None:
        return (
            "it is a neighbour's or a database's own failure: the simulator's, and ring contract's"
        )
    return ""
