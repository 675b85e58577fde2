# SPDX-License-Identifier: Apache-2.0
"""The plans that inject the faults of cells into real processes.

A plan has the order for a process, and the reaction of the test process when the order was taken.
``explain_exclusion`` lists the cells that have no plan.
"""

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
#: Called with the trial, and with the name and the id of the process that took the order.
During = Callable[[Trial, tuple[str, int]], None]
#: Duration of a host's partition.
PARTITION_SECONDS = LEASE_SECONDS + 8
ACCEPT, ACCEPTED = "accept", "accepted"
#: Stands for the point that ``find_point_before`` finds with the simulator.
BEFORE: Point = ("conductor",)
#: Second actions that the API can refuse for reasons outside the table of states.
CHECKED_ELSEWHERE = (
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
    "detach_interface",
    "evacuate",
)


# The simulator is not thread-safe.
_simulator_lock = threading.Lock()
#: Kinds of points in conductors.
_THERE = ("journal", "commit", "conductor", "part", "call", "result")


def _do_nothing(trial: Trial, taker: tuple[str, int]) -> None:
    """Do nothing, because the order is the whole fault."""


@dataclass(frozen=True)
class Plan:
    """How to inject the fault of a cell.

    Attributes:
        point: Where the order applies, or () if the client injects the fault.
        effect: The effect of the order, or an empty string if the client injects the fault.
        verdict: The permitted ends of the action.
        during: Called after the order was taken, while the process may be held.
        also: Point and effect of a second order, which stays.
        passes: See ``Order.passes``.
        rough: The fault makes a host unreachable, so the cell runs on hosts of its own.
        broker: The fault restarts the broker.
        is_late: The held process continues at the end of the cell.
        on_servers: The cell needs a database server. With SQLite, for example, a suspended
            conductor locks the file.
        sleeps: A conductor is suspended.
        by_client: What the client does apart from one request: "insists", "repeats" or "kills-api".
    """

    point: Point
    effect: str
    verdict: Verdict = Verdict.LATE
    during: During = _do_nothing
    also: tuple[Point, str] | None = None
    passes: int = 0
    rough: bool = False
    broker: bool = False
    is_late: bool = False
    on_servers: bool = False
    sleeps: bool = False
    by_client: str = ""

    @property
    def disturbs_conductors(self) -> bool:
        """True if the fault kills or suspends a conductor.

        A conductor judges no silent host for a while after its start.
        """
        dies = self.effect in ("kill", "stop") and self.point[0] in _THERE
        return (dies and not self.by_client) or self.during is _kill_conductors


# --- reactions of the test process ---
def _delete_server(trial: Trial, taker: tuple[str, int]) -> None:
    url = f"/servers/{trial.server}/action"

    def is_accepted() -> bool:
        answer = trial.call("POST", url, {"forceDelete": None})
        return answer.is_accepted or answer.status == 404

    await_true(is_accepted, 60, "the delete is accepted", 0.3)


def _kill_conductors(trial: Trial, taker: tuple[str, int]) -> None:
    for name in CONDUCTORS:
        trial.world.kill(name)


def _kill_scheduler(trial: Trial, taker: tuple[str, int]) -> None:
    trial.world.kill("scheduler")


def _make_broker_restart(cell: Cell) -> During:
    def restart(trial: Trial, taker: tuple[str, int]) -> None:
        trial.world.restart_broker(wiped=zlib.crc32(cell.id.encode()) % 3 == 0)

    return restart


def _make_await_other_conductor(cell: Cell) -> During:
    """Return a reaction that resumes the suspended conductor when another has done the step.

    The other conductor takes over at the latest when the lease has expired.
    """

    def await_and_resume(trial: Trial, taker: tuple[str, int]) -> None:
        def is_done() -> bool:
            query = (
                sa.select(sa.func.count())
                .select_from(events)
                .where(
                    events.c.action_id.in_(
                        [action.id for action in trial.world.read_actions(trial.server)]
                    ),
                    events.c.step == cell.step,
                    events.c.event == "succeeded",
                )
            )
            return bool(trial.world.store.read(lambda tx: tx.scalar(query)))

        try:
            await_true(is_done, CALLS_SECONDS * 4, "another conductor did its work", 0.1)
        finally:
            trial.world.resume(taker[1])

    return await_and_resume


def _await_down_and_resume(trial: Trial, taker: tuple[str, int]) -> None:
    try:
        trial.world.await_down(_find_host(trial, taker[0]))
    finally:
        trial.world.resume(taker[1])


def _await_down_and_force_down(trial: Trial, taker: tuple[str, int]) -> None:
    host = _find_host(trial, taker[0])
    trial.world.await_down(host)
    trial.world.force_down(host)


def _await_down(trial: Trial, taker: tuple[str, int]) -> None:
    trial.world.await_down(_find_host(trial, taker[0]))


def _find_host(trial: Trial, process: str) -> str:
    return next(host for host in trial.world.files if trial.world.name_agent(host) == process)


def _make_event_doubling(cell: Cell) -> During:
    def wake(trial: Trial, taker: tuple[str, int]) -> None:
        for _ in range(2):
            trial.world.store.write(lambda tx: actions.wake(tx, [trial.server], cell.step))

    return wake


# --- plans by kind ---
def find_point_before(cell: Cell) -> Point:
    """Return the last point before the step without an open transaction, from a simulated run."""
    with _simulator_lock:
        point = aim.find_point_before(stage.name_scenario(cell.workflow, cell.step), cell.step)
    if point[0] == "result":
        is_step = any(
            point[2] == step.name for workflow in WORKFLOWS.values() for step in workflow.steps
        )
        return ("result", str(point[2]) if is_step else ANY)
    return ("conductor", ANY, str(point[2]), str(point[3]))


def plan_transaction(cell: Cell) -> Plan | None:
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
            sleep = _make_await_other_conductor(cell)
            return Plan(BEFORE, "stop", during=sleep, on_servers=True, sleeps=True)
        case "database-drops-before-commit":
            return Plan(journal, "cut", on_servers=True)
        case "database-loses-commit-unanswered":
            return Plan(commit, "cut", on_servers=True)
        case "database-commits-unanswered":
            return Plan(committed, "cut", on_servers=True)
        case "delete-before-commit":
            return Plan(BEFORE, "hold", Verdict.DELETED, _delete_server)
    return None


def plan_schedule(cell: Cell) -> Plan | None:
    asked, answered = ("select", "asked"), ("select", "answered")
    match cell.fault:
        case "scheduler-kill-before":
            return Plan(("scheduler", "asked"), "kill")
        case "scheduler-kill-mid":
            return Plan(("scheduler", "chosen"), "kill")
        case "scheduler-kill-after":
            return Plan(("conductor", ANY, cell.step, "proposed"), "hold", during=_kill_scheduler)
        case "broker-restarts-while-asked":
            held = ("part", cell.workflow, cell.step, "prepare", "begins")
            return Plan(held, "hold", during=_make_broker_restart(cell), broker=True)
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
            return Plan(held, "hold", Verdict.DELETED, _delete_server)
    return None


def plan_command(cell: Cell) -> Plan | None:
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
            return Plan(before, "hold", during=_kill_conductors)
        case "agent-sleeps-past-lease":
            return Plan(before, "stop", ended, _await_down_and_resume, rough=True)
        case "broker-restarts":
            return Plan(before, "hold", during=_make_broker_restart(cell), broker=True)
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
            return Plan(before, "power-cut", ended, _await_down_and_force_down, rough=True)
        case "partition-past-lease":
            effect = f"partition {PARTITION_SECONDS:g}"
            return Plan(before, effect, ended, _await_down, rough=True)
        case "delete-while-commanded":
            return Plan(before, "hold", Verdict.DELETED, _delete_server)
    return None


def plan_external(cell: Cell) -> Plan | None:
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
            return Plan((*part, "begins"), "hold", during=_make_event_doubling(cell))
        case "delete-while-called":
            return Plan((*part, "begins"), "hold", Verdict.DELETED, _delete_server)
    return None


def plan_undo(cell: Cell) -> Plan | None:
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


def plan_accept(cell: Cell) -> Plan | None:
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
            return Plan(
                ("conductor", cell.workflow, ANY, "taken"), "hold", during=_send_conflicting_request
            )
    return None


def plan_pair(cell: Cell) -> Plan | None:
    steps = WORKFLOWS[cell.workflow].steps
    if any(step.command for step in steps):
        point: Point = ("agent", ANY, "before")
    elif any(step.call for step in steps):
        point = ("part", cell.workflow, ANY, "call", "begins")
    else:
        point = ("conductor", cell.workflow, ANY, "taken")
    return Plan(point, "hold", Verdict.BOTH, _make_second_request(cell))


def _send_conflicting_request(trial: Trial, taker: tuple[str, int]) -> None:
    """Send another request while the action is in progress."""
    answer = trial.send_meanwhile("reboot:SOFT")
    assert answer.status == 409 or _has_first_continued(trial, taker), (
        f"both requests were accepted: {answer}"
    )


def _has_first_continued(trial: Trial, taker: tuple[str, int]) -> bool:
    """Return True if the first action is no longer held.

    The action was released, or another cell killed the process that held the action.
    """
    return trial.was_released or not os.path.exists(f"/proc/{taker[1]}")


def _make_second_request(cell: Cell) -> During:
    """Return a reaction that sends the second request of a pair.

    The answer must agree with the table of states.
    """

    def request(trial: Trial, taker: tuple[str, int]) -> None:
        row = trial.read_row()
        is_allowed = pairs.is_allowed(REQUESTS[cell.fault], row)
        # DELETE removes the server at once if a soft delete is not possible.
        if cell.fault == "soft_delete":
            is_allowed = is_allowed or pairs.is_allowed(REQUESTS["delete"], row)
        before = len(trial.world.read_actions(trial.server))
        answer = trial.send_meanwhile(REQUESTS[cell.fault])
        new_actions = len(trial.world.read_actions(trial.server)) - before
        is_checked_elsewhere = cell.fault in CHECKED_ELSEWHERE
        if answer.is_accepted:
            is_valid = (
                is_allowed
                or (is_checked_elsewhere and not new_actions)
                or _has_first_continued(trial, taker)
            )
            assert is_valid, f"{cell.fault} is accepted: {answer}"
            trial.accepted = bool(new_actions)
            return
        assert 400 <= answer.status < 500, f"{cell.fault} is answered with {answer}"
        refusals = (400, 404, 409) if is_checked_elsewhere else (409,)
        assert is_allowed or answer.status in refusals, f"{cell.fault} is answered with {answer}"
        assert not new_actions, f"{cell.fault} was refused and left an action"

    return request


PLANS: dict[Kind, Callable[[Cell], Plan | None]] = {
    Kind.ACCEPT: plan_accept,
    Kind.TRANSACTION: plan_transaction,
    Kind.SCHEDULE: plan_schedule,
    Kind.COMMAND: plan_command,
    Kind.EXTERNAL: plan_external,
    Kind.UNDO: plan_undo,
    Kind.PAIR: plan_pair,
}
#: Workflows that these clouds cannot run, with the reason.
_ONE_HOST = "a resize on the same host needs a cloud of one host"
_SHARES = "the cloud has no share service"
_NO_FILES = "the volume service creates snapshots itself, without a request to a host"
EXCLUDED_WORKFLOWS = {
    "resize_here": _ONE_HOST,
    "confirm_here": _ONE_HOST,
    "revert_here": _ONE_HOST,
    "attach_share": _SHARES,
    "detach_share": _SHARES,
    "swap_volume": "the volume service does not migrate volumes, and only it may request a swap",
    "volume_snapshot_create": _NO_FILES,
    "volume_snapshot_delete": _NO_FILES,
}


def explain_exclusion(cell: Cell) -> str:
    """Return the reason why a cell cannot run with processes, or an empty string."""
    if cell.kind is Kind.CLEANUP:
        return "only the simulator has external services that refuse a cleanup"
    if cell.kind is Kind.REMOVAL:
        return "only the simulator has returned hosts with pending cleanups"
    if reason := EXCLUDED_WORKFLOWS.get(cell.workflow):
        return reason
    if cell.kind is Kind.PAIR:
        if cell.fault == "create":
            return "an existing server cannot be created"
        return EXCLUDED_WORKFLOWS.get(cell.fault, "")
    if cell.kind is Kind.UNDO and cell.step == "revive":
        return "only the simulator and tier 2 have a host that returns meanwhile"
    circumstance = stage.CIRCUMSTANCES.get((cell.workflow, cell.step), "")
    if (cell.workflow, circumstance) == ("snapshot", stage.BOOTS):
        return "most file systems cannot snapshot a volume in use"
    if circumstance not in ("", stage.WITH_VOLUMES, stage.BOOTS, stage.SHELVED):
        return f"only the simulator has the circumstance {circumstance}"
    if PLANS[cell.kind](cell) is None:
        return "only the simulator and ring contract have failures inside services and databases"
    return ""
