# SPDX-License-Identifier: Apache-2.0
"""The only executor of workflows: takes due actions, does the next step, writes down what happened.

``advance`` is a plain function of the engine; the threads that call it live in
``conductor.service``. It works in one of the lanes: one for each external service, with the steps
that call it, and INSIDE for all others. Everything works on
lists: what is due together is done in one transaction, and one by one when that fails. There is no
recovery code: a step found unfinished is simply the next step.

An action ends done, or failed after what it made has been undone, backwards from the step that
failed. Most of an undo is rows, and happens at once; what a host or an external service must do is
one journalled step each, in the phase *undo*, and survives crashes like any other. An undo that a
host definitely refuses is noted, and the server goes to ERROR with a fault that names the step:
nothing hangs. What a service refuses after the pivot, or on the way back, changes nothing of the
server: it is a pending cleanup (``store.cleanups``).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from common.domain import errors, states
from common.domain.command_key import CommandKey, CommandKind
from common.domain.json_types import JsonObject
from common.domain.models import Result
from common.domain.states import BY_WORKFLOW
from common.domain.statuses import ActionPhase, ActionState, ResultStatus, StepEvent
from common.domain.verbs import Verb
from common.store.cleanups import PORTS
from common.store.engine import Connection, now
from common.store.rows import ActionRow, BlockDeviceRow, PlacedServerRow, ServerRow
from common.store.servers import actions, block_devices
from common.store.servers import shares as share_mappings
from conductor.engine import flush, retries
from conductor.engine.action_data import Failure, StepFailed, fault_of
from conductor.engine.engine import Lane
from conductor.engine.run import AnyRun
from conductor.engine.step import AnyStep
from conductor.engine.workflow import Workflow
from conductor.engine.workflow_engine import WorkflowEngine

log = logging.getLogger(__name__)
AnyWorkflow = Workflow[Any, Any]
MAX_SERVICE_PAUSE_SECONDS, MAX_LOCK_PAUSE_SECONDS = 4, 60  #: between two tries
#: Statuses of results that end a command.
FINAL_STATUSES = (
    ResultStatus.DONE,
    ResultStatus.FAILED,
    ResultStatus.DEAD,
    ResultStatus.UNKNOWN,
)
MAX_UNANSWERED = 8  #: tries of an action whose proposal nobody answers, in about twenty seconds
MAX_ONE_BY_ONE_SECONDS = 5.0  #: in which actions of a burst that failed are written one by one


def advance(engine: WorkflowEngine, lane: Lane = Lane.INSIDE) -> int:
    """Take the due actions of a lane and bring each to where it waits, ends or changes lanes;
    returns how many were taken."""
    which: JsonObject = (
        {"but": engine.workflows.steps_with_calls}
        if lane == Lane.INSIDE
        else {
            "only": engine.workflows.lanes[lane],
            "lease": engine.lease_micros.get(lane, actions.LONG_LEASE),
        }
    )
    rows = engine.store.write(
        lambda tx: actions.take(tx, engine.owner, engine.workflows.versions, engine.batch, **which)
    )
    groups: dict[tuple[str, int, str], list[ActionRow]] = defaultdict(list)
    locked = retries.locked_servers(engine) if rows else ()
    retries.postpone(
        engine, [row for row in rows if row.server_id in locked], MAX_LOCK_PAUSE_SECONDS
    )
    for row in (row for row in rows if row.server_id not in locked):
        alone = row.id if row.failures else ""  # and after the others
        try:
            groups[row.workflow, engine.workflows[row.workflow].index(row.step), alone].append(row)
        except LookupError as problem:
            log.error("action %s cannot be advanced: %s", row.id, problem)
            retries.count_exception(engine, row, problem)
    for (name, index, _), members in sorted(groups.items(), key=lambda group: bool(group[0][2])):
        engine.fault_point(name, engine.workflows[name].steps[index].name, "taken")
        try:
            _burst(engine, engine.workflows[name], index, members, lane)
        except errors.Unavailable:
            raise
        except Exception:
            log.exception("%d actions of %s are left to the end of their lease", len(members), name)
    return len(rows)


def _burst(
    engine: WorkflowEngine, workflow: AnyWorkflow, index: int, rows: Sequence[ActionRow], lane: Lane
) -> None:
    """Advance actions that stand at the same step: what is done outside the transaction, then one
    transaction, then send."""
    servers, volumes = engine.store.read(
        lambda tx: _with_volumes(tx, actions.servers_of(tx, (row.server_id for row in rows)))
    )
    runs = []
    for row in rows:
        try:
            runs.append(workflow.run(row, servers[row.server_id], volumes.get(row.server_id, ())))
        except (LookupError, TypeError, ValueError) as problem:
            log.error("action %s has no server, or no data: %s", row.id, problem)
            retries.count_exception(engine, row, problem)
    step, aborted = workflow.steps[index], [run for run in runs if run.data.abort]
    runs = [run for run in runs if run not in aborted]
    if lane == Lane.INSIDE:
        runs = _prepare(engine, workflow, step, runs)
    elif runs:
        runs = _call(engine, step, runs)
        engine.fault_point(workflow.name, step.name, "called")
    if runs or aborted:
        _commit(engine, workflow, index, [*runs, *aborted], lane)


def _with_volumes(
    tx: Connection, servers: dict[str, PlacedServerRow]
) -> tuple[dict[str, PlacedServerRow], dict[str, list[BlockDeviceRow]]]:
    having = [row for row in servers.values() if row.volumes]
    return servers, block_devices.of_servers(tx, having) if having else {}


def _prepare(
    engine: WorkflowEngine, workflow: AnyWorkflow, step: AnyStep, runs: Sequence[AnyRun]
) -> list[AnyRun]:
    """Do what the step prepares before its transaction; returns those that can go on. When that was
    not answered many times, one of them may be the reason: a part of them is prepared alone, each
    time another one."""
    if not step.prepare:
        return list(runs)
    if all(run.action.sends < MAX_UNANSWERED for run in runs):
        return _prepare_together(engine, workflow, step, runs)
    chosen = [
        run for run in runs if sha256(f"{run.action.id}{run.action.sends}".encode()).digest()[0] % 2
    ]
    answered = _prepare_together(engine, workflow, step, chosen or runs)
    others = [run for run in runs if run not in chosen] if chosen else []
    if others and answered:
        return answered + _prepare_together(engine, workflow, step, others)
    retries.postpone(engine, [run.action for run in others], MAX_SERVICE_PAUSE_SECONDS)
    return answered


def _prepare_together(
    engine: WorkflowEngine, workflow: AnyWorkflow, step: AnyStep, runs: Sequence[AnyRun]
) -> list[AnyRun]:
    """In one call for all, or for each where that fails."""
    assert step.prepare is not None
    asking = [workflow.run(run.action, run.server, run.volumes) for run in runs]
    try:
        if wanted := [run for run in asking if not step.is_skipped(run)]:
            step.prepare(engine, wanted)
            engine.fault_point(workflow.name, step.name, "proposed")
    except errors.Unavailable as problem:
        log.warning("%s waits: %s", workflow.name, problem)
        waiting = [run.action for run in runs]
        retries.postpone(engine, waiting, MAX_SERVICE_PAUSE_SECONDS, cause=problem.text)
        return []
    except Exception as problem:
        log.exception("%s cannot be prepared for %d servers", workflow.name, len(runs))
        if len(runs) > 1:
            return [
                asked for run in runs for asked in _prepare_together(engine, workflow, step, [run])
            ]
        retries.count_exception(engine, runs[0].action, problem)
        return []
    return asking


def _call(engine: WorkflowEngine, step: AnyStep, runs: Sequence[AnyRun]) -> list[AnyRun]:
    """Call the service for each; what it refuses for good is the step's failure. Those that it did
    not answer are postponed; returns the others."""

    def call(run: AnyRun) -> None:
        chosen = step.undo_call if run.is_undoing else step.call
        assert chosen is not None
        try:
            chosen(engine, run)
        except errors.Unavailable:
            raise
        except errors.Problem as problem:
            run.fail(problem.text, str(problem.__cause__ or ""), status=problem.status)

    answered = []
    for run, problem in zip(runs, engine.call_pool(step.lane, call, runs), strict=True):
        if problem is None:
            answered.append(run)
        elif isinstance(problem, errors.Unavailable):
            log.warning("action %s waits at step %s: %s", run.action.id, step.name, problem)
            retries.postpone(
                engine, [run.action], MAX_SERVICE_PAUSE_SECONDS, problem.wait, problem.text
            )
        else:
            log.error(
                "action %s cannot be advanced at step %s",
                run.action.id,
                step.name,
                exc_info=problem,
            )
            retries.count_exception(engine, run.action, problem)
    return answered


def _commit(
    engine: WorkflowEngine, workflow: AnyWorkflow, index: int, runs: Sequence[AnyRun], lane: Lane
) -> None:
    """The transaction of a burst and what follows it. When it fails, one for each: what was called
    or prepared is not repeated.

    Raises:
        Unavailable: the database does not answer at all, which is more than a row that somebody has
        locked.
    """
    try:
        written = engine.store.write(
            lambda tx: _write(tx, engine, workflow, index, runs, lane), alone=False
        )
    except errors.TooBusy as problem:
        log.warning("%d actions of %s wait: %s", len(runs), workflow.name, problem)
        locked = retries.find_locked(engine, (run.server.id for run in runs))
        waiting = [run for run in runs if run.server.id in locked or len(runs) == 1]
        if not waiting:
            _commit_each(engine, workflow, index, runs, lane)
            return
        retries.set_aside(engine, (run.server.id for run in waiting))
        retries.postpone(engine, [run.action for run in waiting], MAX_LOCK_PAUSE_SECONDS)
        if free := [run for run in runs if run not in waiting]:
            _commit(engine, workflow, index, free, lane)
        return
    except errors.Unavailable as problem:
        log.warning("%d actions of %s wait: %s", len(runs), workflow.name, problem)
        retries.postpone(engine, [run.action for run in runs], MAX_SERVICE_PAUSE_SECONDS)
        return
    except Exception as problem:
        log.exception("%d actions of %s cannot be written", len(runs), workflow.name)
        if len(runs) > 1:
            _commit_each(engine, workflow, index, runs, lane)
        else:
            retries.count_exception(engine, runs[0].action, problem)
        return
    engine.fault_point(workflow.name, workflow.steps[index].name, "committed")
    flush.send(engine, written)


def _commit_each(
    engine: WorkflowEngine, workflow: AnyWorkflow, index: int, runs: Sequence[AnyRun], lane: Lane
) -> None:
    """One after the other; where locks make that slow, the rest is left to the next round."""
    until = engine.clock.monotonic() + MAX_ONE_BY_ONE_SECONDS
    for number, run in enumerate(runs):
        if engine.clock.monotonic() > until:
            retries.postpone(engine, [left.action for left in runs[number:]], 0)
            return
        _commit(engine, workflow, index, [run], lane)


def _write(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    planned: Sequence[AnyRun],
    lane: Lane,
) -> flush.Written:
    """The transaction of a burst. Runs whose server has moved on, or that another conductor or
    another lane took, drop out."""
    servers, volumes = _with_volumes(
        tx, actions.lock_servers(tx, (run.server.id for run in planned))
    )
    shares = share_mappings.ids_of(tx, servers.values())
    heads = actions.lock(tx, (run.action.id for run in planned))
    runs, lost = [], []
    for plan in planned:
        server, head = servers.get(plan.server.id), heads[plan.action.id]
        if _where(head) != _where(plan.action):
            log.warning("action %s has gone on to %s without this burst", head.id, head.step)
        elif (
            server is not None
            and is_held(server, head)
            and head.state == ActionState.DUE
            and head.owner == engine.owner
        ):
            run = workflow.run(
                head,
                server,
                volumes.get(server.id, ()),
                shares=shares.get(server.id, ()),
                selection=plan.selection,
                problem=plan.problem,
                cleanups=plan.cleanups,
                volume_changes=dict(plan.volume_changes),
                began=plan.began,
                woken=head.due_at != plan.action.due_at,
            )
            plan.copy_data_to(run)
            runs.append(run)
        else:
            lost.append(head.id)
    if lost:
        actions.let_go(tx, engine.owner, lost)
    going_on = []
    for run in runs:
        why, run.data.abort = run.data.abort, None
        if why:
            run.fail(why)
        if run.is_undoing:
            undone(tx, engine, workflow, index, run, str(run.problem) if run.problem else None)
        elif why:
            fail(tx, engine, workflow, index, run)
        else:
            going_on.append(run)
    proceed(tx, engine, workflow, index, going_on, ready=lane)
    written = flush.write(tx, engine, runs)
    engine.fault_point(workflow.name, workflow.steps[index].name, "written")
    return written


def _where(action: ActionRow) -> tuple[Any, ...]:
    """What a burst must find as it took it: a lease that ran out may have led another one past this
    step, and another lane of this conductor may hold the action by now."""
    return action.workflow, action.step, action.phase, action.attempt


def is_held(server: ServerRow, action: ActionRow) -> bool:
    """Does this action still hold its server, under the fence that it was given?"""
    return bool(server.action == action.id and server.fence == action.fence)


def proceed(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    runs: Sequence[AnyRun],
    ready: Lane | None = None,
) -> None:
    """From this step on: do what is done here, start what is done on a host, finish what has no
    more steps.

    ``ready``: the lane in which the first of these steps has done its part outside the transaction.
    """
    for number, step in enumerate(workflow.steps[index:], index):
        skipping = [run for run in runs if step.is_skipped(run)]
        runs = [run for run in runs if run not in skipping]
        if runs and step.command:
            _start(tx, engine, step, runs)
            runs = []
        elif runs and _is_elsewhere(step, ready):
            for run in runs:
                if step.call:
                    run.record_event(step.name, StepEvent.STARTED)
                run.continue_at(step.name)
            runs = []
        elif runs:
            ignore_refusals(workflow, number, runs)
            sound = [run for run in runs if not run.problem]
            if step.apply and sound:
                step.apply(tx, engine, sound)
            runs = [run for run in runs if _is_through(tx, engine, workflow, number, step, run)]
        runs, ready = [*runs, *skipping], None
    for run in runs:
        finish(run, ActionState.DONE)


def _is_elsewhere(step: AnyStep, ready: Lane | None) -> bool:
    """Has the step a part outside the transaction that is not done yet?"""
    return bool((step.call and ready != step.lane) or (step.prepare and ready != Lane.INSIDE))


def _is_through(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    step: AnyStep,
    run: AnyRun,
) -> bool:
    if run.paused:
        run.head.setdefault("step", step.name)
        return False
    if run.problem:
        fail(tx, engine, workflow, index, run)
        return False
    run.record_event(step.name, StepEvent.SUCCEEDED, run.host, run.cleanup_message)
    if run.cleanup_message:
        run.data.left_undone = run.cleanup_message
    return True


def _start(tx: Connection, engine: WorkflowEngine, step: AnyStep, runs: Sequence[AnyRun]) -> None:
    """Write "started" and the command in the same transaction; it is cast after the commit."""
    assert step.command is not None
    placed = []
    for run in runs:
        host = step.host(run)
        if host is None:
            run.fail("The server is on no host; delete it and create it again.")
            fail(tx, engine, engine.workflows[run.action.workflow], 0, run)
            continue
        placed.append(run)
        run.record_event(step.name, StepEvent.STARTED, host)
        _send(run, host, CommandKind.DO, step, step.command(engine, run))
    if step.on_start and placed:
        step.on_start(tx, placed)


def _send(run: AnyRun, host: str, kind: CommandKind, step: AnyStep, verb: Verb) -> None:
    """Send the command of a step, and let the action wait for its result."""
    run.command(host, kind, step.name, verb)
    run.head.update(
        state=ActionState.WAITING,
        phase=ActionPhase(kind.value),
        due_at=None,
        step=step.name,
        host=host,
        verb=verb.name,
        sent_at=now(),
        sends=1,
        owner=None,
        lease_until=None,
    )


def take_result(tx: Connection, engine: WorkflowEngine, run: AnyRun, result: Result) -> None:
    """Write a host's result and go on from the next step."""
    workflow = engine.workflows[run.action.workflow]
    index = workflow.index(run.action.step)
    step = workflow.steps[index]
    if result.status not in FINAL_STATUSES:
        raise ValueError(f"{result.status!r} is no end of a command that this release knows")
    if result.status == ResultStatus.DEAD and (run.is_undoing or step.done_when_host_dead):
        result = replace(
            result, status=ResultStatus.DONE
        )  # nothing runs there, and what is left is a debt
    if run.is_undoing:
        undone(
            tx,
            engine,
            workflow,
            index,
            run,
            result.error if result.status == ResultStatus.FAILED else None,
        )
        return
    if result.status in (ResultStatus.FAILED, ResultStatus.DEAD):
        run.fail(
            result.error,
            result.details,
            result.retryable and not step.fails_on_any_host,
            reason=result.reason,
        )
        fail(tx, engine, workflow, index, run)
        return
    unknown = (
        "Its outcome is unknown and it was not repeated."
        if result.status == ResultStatus.UNKNOWN
        else None
    )
    if step.on_result:
        step.on_result(tx, run, result)
    run.record_event(step.name, StepEvent.SUCCEEDED, run.action.host, unknown)
    proceed(tx, engine, workflow, index + 1, [run])


def key_of(row: ActionRow) -> CommandKey:
    """Return the key of the command that an action waits for."""
    return CommandKey(CommandKind(row.phase), row.id, row.step or "", row.attempt)


# --- the end, and the way back ---
def fail(
    tx: Connection, engine: WorkflowEngine, workflow: AnyWorkflow, index: int, run: AnyRun
) -> None:
    """The step at ``index`` has definitely failed; its effect may have happened all the same."""
    problem = run.problem
    assert problem is not None
    step = workflow.steps[index]
    run.record_event(
        step.name, StepEvent.FAILED, step.host(run), str(problem), problem.details or None
    )
    run.data.problem = Failure(
        text=str(problem),
        details=problem.details,
        retryable=problem.retryable,
        status=problem.status,
        reason=problem.reason,
    )
    if _is_past_pivot(workflow, index):
        _end_failed(tx, engine, workflow, run)
        return
    for made in reversed(workflow.steps[: index + 1]):
        if made.undo:
            made.undo(tx, engine, run)
            run.record_event(made.name, StepEvent.UNDONE)
    undo_from(tx, engine, workflow, index, run)


def _is_past_pivot(workflow: AnyWorkflow, index: int) -> bool:
    return any(passed.pivot for passed in workflow.steps[:index])


def ignore_refusals(workflow: AnyWorkflow, index: int, runs: Iterable[AnyRun]) -> None:
    """What a service has refused at this step after the pivot fails no action."""
    step = workflow.steps[index]
    if step.call and _is_past_pivot(workflow, index):
        for run in runs:
            if run.problem:
                _ignore_refusal(step, run, str(run.problem))
                run.problem = None


def _ignore_refusal(step: AnyStep, run: AnyRun, why: str) -> None:
    """What this step cleans has been remembered one by one; but a server's ports are looked at as a
    whole too."""
    run.ignored_refusal = why
    if step.lane == Lane.NETWORK:
        run.add_cleanup(PORTS, run.server.id, why)


def undo_from(
    tx: Connection, engine: WorkflowEngine, workflow: AnyWorkflow, index: int, run: AnyRun
) -> None:
    """Start the next undo that a host or a service must do, from this step backwards; after the
    last, end."""
    for step in reversed(workflow.steps[: index + 1]):
        if step.is_skipped(run):
            continue
        host = step.host(run)
        if step.undo_command and host:
            _send(run, host, CommandKind.UNDO, step, step.undo_command(engine, run))
            return
        if step.undo_call:
            run.continue_at(step.name, phase=ActionPhase.UNDO)
            return
    _end_failed(tx, engine, workflow, run)


def undone(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    run: AnyRun,
    refused: str | None = None,
) -> None:
    """The undo of this step is over; go on with those before it."""
    step = workflow.steps[index]
    if refused and step.undo_call and not step.undo_command:
        _ignore_refusal(step, run, refused)
        refused = None
    run.record_event(
        step.name,
        StepEvent.UNDO_FAILED if refused else StepEvent.UNDONE,
        run.action.host,
        refused or run.cleanup_message,
    )
    if refused:
        run.data.add_undo_failure(step.name, refused)
    undo_from(tx, engine, workflow, index - 1, run)


def _end_failed(tx: Connection, engine: WorkflowEngine, workflow: AnyWorkflow, run: AnyRun) -> None:
    failure = run.data.problem
    assert failure is not None, "it has failed"
    problem = StepFailed(failure.text, failure.details, failure.retryable, reason=failure.reason)
    run.is_left_off = any(
        step.undo_starts_guest and step.name in run.data.undo_failures for step in workflow.steps
    )
    workflow.failed(tx, engine, run, problem)
    if run.head.get("state") == ActionState.DUE and run.head.get("phase") == ActionPhase.FORWARD:
        return  # the workflow chose to try again
    if run.data.undo_failures:
        undone = "; ".join(f"{step}: {why}" for step, why in run.data.undo_failures.items())
        text = f"{problem}; and it could not be undone: {undone}. Delete or rebuild it."
        run.set(vm_state=states.ERROR, fault=fault_of(tx, StepFailed(text, problem.details)))
    finish(run, ActionState.FAILED, str(problem))


def finish(run: AnyRun, state: ActionState, message: str | None = None) -> None:
    """The action lets its server go; secrets are forgotten."""
    row = BY_WORKFLOW[run.action.workflow]
    run.changes.update(task_state=None, action=None)
    if state == ActionState.DONE and row.after:
        run.changes.setdefault("vm_state", row.after)
        run.changes.setdefault("fault", None)
    run.head.update(
        actions.without_user_data(run.action.args),
        state=state,
        due_at=None,
        owner=None,
        lease_until=None,
        secrets=None,
        finished_at=now(),
    )
    if message := message or run.data.left_undone:
        run.head["message"] = message
