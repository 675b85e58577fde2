# SPDX-License-Identifier: Apache-2.0
"""Execute workflows: take due actions, do their next steps, and record the results.

``advance`` is a plain function of the engine. Each thread of ``conductor.service`` that calls it
serves one lane: INSIDE, or the lane of an external service or of the fencing hook. Actions that are
due at the same step share one transaction. If that transaction fails, each action gets a separate
transaction. No recovery code exists: a conductor that takes over continues with the first step that
is not recorded as complete.

An action ends as done, or as failed after its completed steps were undone in reverse order. Most
undos change rows only and happen at once. An undo by a host or an external service is journalled in
the phase *undo*, and so survives crashes. If a host definitely refuses an undo, the server goes to
ERROR with a fault that names the step. If an external service refuses a call after the pivot or an
undo, the server is not affected, and a pending cleanup (``common.store.cleanups``) remains.
"""

from __future__ import annotations

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
from common.service.log import get_logger
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

log = get_logger(__name__)
AnyWorkflow = Workflow[Any, Any]
#: Maximum pause between two tries: for a service that does not answer, and for a locked row.
MAX_SERVICE_PAUSE_SECONDS, MAX_LOCK_PAUSE_SECONDS = 4, 60
#: Statuses of results that end a command.
FINAL_STATUSES = (
    ResultStatus.DONE,
    ResultStatus.FAILED,
    ResultStatus.DEAD,
    ResultStatus.UNKNOWN,
)
#: Tries without an answer, in about twenty seconds, after which ``_prepare`` splits a burst.
MAX_UNANSWERED = 8
#: Time limit for writing the actions of a failed burst one by one.
MAX_ONE_BY_ONE_SECONDS = 5.0


def advance(engine: WorkflowEngine, lane: Lane = Lane.INSIDE) -> int:
    """Take up to ``engine.batch`` due actions of a lane, and advance each.

    An action stops where it waits, fails, ends, changes its lane or needs a preparation. Actions of
    locked servers are postponed.

    Returns:
        The number of actions taken. ``engine.batch`` means that further actions may be due.

    Raises:
        Unavailable: The database does not answer.
    """
    selection: JsonObject = (
        {"but": engine.workflows.steps_with_calls}
        if lane == Lane.INSIDE
        else {
            "only": engine.workflows.lanes[lane],
            "lease": engine.lease_micros.get(lane, actions.LONG_LEASE),
        }
    )
    rows = engine.store.write(
        lambda tx: actions.take(
            tx, engine.owner, engine.workflows.versions, engine.batch, **selection
        )
    )
    groups: dict[tuple[str, int, str], list[ActionRow]] = defaultdict(list)
    locked = retries.locked_servers(engine) if rows else ()
    retries.postpone(
        engine, [row for row in rows if row.server_id in locked], MAX_LOCK_PAUSE_SECONDS
    )
    for row in (row for row in rows if row.server_id not in locked):
        # An action that has failed unexpectedly is advanced by itself, after the others.
        alone = row.id if row.failures else ""
        try:
            groups[row.workflow, engine.workflows[row.workflow].index(row.step), alone].append(row)
        except LookupError as problem:
            log.error("an action cannot be advanced", action=row.id, problem=problem)
            retries.count_exception(engine, row, problem)
    for (name, index, _), members in sorted(groups.items(), key=lambda group: bool(group[0][2])):
        engine.fault_point(name, engine.workflows[name].steps[index].name, "taken")
        try:
            _burst(engine, engine.workflows[name], index, members, lane)
        except errors.Unavailable:
            raise
        except Exception:
            log.exception(
                "actions of a workflow failed unexpectedly and wait until their leases expire",
                count=len(members),
                workflow=name,
            )
    return len(rows)


def _burst(
    engine: WorkflowEngine, workflow: AnyWorkflow, index: int, rows: Sequence[ActionRow], lane: Lane
) -> None:
    """Advance actions at the same step: prepare or call, write one transaction, then send.

    An action whose abort was requested is not prepared or called. Its step, or the undo of its
    step, fails in the transaction. For an action with unreadable rows a failure is counted.

    Args:
        engine: The conductor's engine.
        workflow: The workflow of the actions.
        index: The position of the step.
        rows: The leased actions.
        lane: INSIDE prepares the step. Another lane calls its service.
    """
    servers, volumes = engine.store.read(
        lambda tx: _add_volumes(tx, actions.servers_of(tx, (row.server_id for row in rows)))
    )
    runs = []
    for row in rows:
        try:
            runs.append(workflow.run(row, servers[row.server_id], volumes.get(row.server_id, ())))
        except (LookupError, TypeError, ValueError) as problem:
            log.error(
                "the server or the data of an action cannot be read", action=row.id, problem=problem
            )
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


def _add_volumes(
    tx: Connection, servers: dict[str, PlacedServerRow]
) -> tuple[dict[str, PlacedServerRow], dict[str, list[BlockDeviceRow]]]:
    with_volumes = [row for row in servers.values() if row.volumes]
    return servers, block_devices.of_servers(tx, with_volumes) if with_volumes else {}


def _prepare(
    engine: WorkflowEngine, workflow: AnyWorkflow, step: AnyStep, runs: Sequence[AnyRun]
) -> list[AnyRun]:
    """Call the step's ``prepare`` and return the runs that can continue.

    If an action got no answer ``MAX_UNANSWERED`` times, the action's request may be the reason.
    Then a part of the runs, different in each round, is prepared first, and the others only if that
    part got an answer. Runs without an answer are postponed.
    """
    if not step.prepare:
        return list(runs)
    if all(run.action.sends < MAX_UNANSWERED for run in runs):
        return _prepare_together(engine, workflow, step, runs)
    sample = [
        run for run in runs if sha256(f"{run.action.id}{run.action.sends}".encode()).digest()[0] % 2
    ]
    answered = _prepare_together(engine, workflow, step, sample or runs)
    others = [run for run in runs if run not in sample] if sample else []
    if others and answered:
        return answered + _prepare_together(engine, workflow, step, others)
    retries.postpone(engine, [run.action for run in others], MAX_SERVICE_PAUSE_SECONDS)
    return answered


def _prepare_together(
    engine: WorkflowEngine, workflow: AnyWorkflow, step: AnyStep, runs: Sequence[AnyRun]
) -> list[AnyRun]:
    """Prepare all runs in one call, or each in its own call if that fails unexpectedly.

    Returns the prepared runs, and those that skip the step. Without an answer the runs are
    postponed. An unexpected failure of a single run is counted.
    """
    assert step.prepare is not None
    prepared = [workflow.run(run.action, run.server, run.volumes) for run in runs]
    try:
        if relevant := [run for run in prepared if not step.is_skipped(run)]:
            step.prepare(engine, relevant)
            engine.fault_point(workflow.name, step.name, "proposed")
    except errors.Unavailable as problem:
        log.warning(
            "actions of a workflow wait", count=len(runs), workflow=workflow.name, problem=problem
        )
        waiting = [run.action for run in runs]
        retries.postpone(engine, waiting, MAX_SERVICE_PAUSE_SECONDS, cause=problem.text)
        return []
    except Exception as problem:
        log.exception(
            "a step of a workflow cannot be prepared",
            step=step.name,
            workflow=workflow.name,
            count=len(runs),
        )
        if len(runs) > 1:
            return [
                ready for run in runs for ready in _prepare_together(engine, workflow, step, [run])
            ]
        retries.count_exception(engine, runs[0].action, problem)
        return []
    return prepared


def _call(engine: WorkflowEngine, step: AnyStep, runs: Sequence[AnyRun]) -> list[AnyRun]:
    """Call the service of the step or of its undo for each run, and return the answered runs.

    A definite refusal counts as an answer, and becomes the failure of the run's step. Runs without
    an answer are postponed. An unexpected error is counted for the run's action.
    """

    def call(run: AnyRun) -> None:
        service_call = step.undo_call if run.is_undoing else step.call
        assert service_call is not None
        try:
            service_call(engine, run)
        except errors.Unavailable:
            raise
        except errors.Problem as problem:
            run.fail(problem.text, str(problem.__cause__ or ""), status=problem.status)

    answered = []
    for run, problem in zip(runs, engine.call_pool(step.lane, call, runs), strict=True):
        if problem is None:
            answered.append(run)
        elif isinstance(problem, errors.Unavailable):
            log.warning("an action waits", action=run.action.id, step=step.name, problem=problem)
            retries.postpone(
                engine, [run.action], MAX_SERVICE_PAUSE_SECONDS, problem.wait, problem.text
            )
        else:
            log.error(
                "an action cannot be advanced",
                action=run.action.id,
                step=step.name,
                exc_info=problem,
            )
            retries.count_exception(engine, run.action, problem)
    return answered


def _commit(
    engine: WorkflowEngine, workflow: AnyWorkflow, index: int, runs: Sequence[AnyRun], lane: Lane
) -> None:
    """Write the transaction of a burst, and send the commands after the commit.

    If the transaction fails, the runs are written one by one without repeating ``call`` or
    ``prepare``, and the failure of a single run is counted. If rows are locked, their actions are
    postponed and the others are written. If the database does not answer, all are postponed.

    Raises:
        Unavailable: The database does not answer afterwards either, for example to postpone.
    """
    try:
        written = engine.store.write(
            lambda tx: _write(tx, engine, workflow, index, runs, lane), alone=False
        )
    except errors.TooBusy as problem:
        log.warning(
            "actions of a workflow wait", count=len(runs), workflow=workflow.name, problem=problem
        )
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
        log.warning(
            "actions of a workflow wait", count=len(runs), workflow=workflow.name, problem=problem
        )
        retries.postpone(engine, [run.action for run in runs], MAX_SERVICE_PAUSE_SECONDS)
        return
    except Exception as problem:
        log.exception(
            "actions of a workflow cannot be written", count=len(runs), workflow=workflow.name
        )
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
    """Write runs one by one, and leave the rest to the next round once the time limit is over."""
    until = engine.clock.monotonic() + MAX_ONE_BY_ONE_SECONDS
    for number, run in enumerate(runs):
        if engine.clock.monotonic() > until:
            retries.postpone(engine, [rest.action for rest in runs[number:]], 0)
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
    """Run the transaction of a burst, and return the work that the caller does after the commit.

    A run is left out if another conductor or lane has advanced or leased its action, or if its
    server has another action or fence by now.
    """
    servers, volumes = _add_volumes(
        tx, actions.lock_servers(tx, (run.server.id for run in planned))
    )
    shares = share_mappings.ids_of(tx, servers.values())
    heads = actions.lock(tx, (run.action.id for run in planned))
    runs, ids_to_release = [], []
    for plan in planned:
        server, head = servers.get(plan.server.id), heads[plan.action.id]
        if _position(head) != _position(plan.action):
            log.warning("an action was advanced by another burst", action=head.id, step=head.step)
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
            ids_to_release.append(head.id)
    if ids_to_release:
        actions.let_go(tx, engine.owner, ids_to_release)
    continuing = []
    for run in runs:
        why, run.data.abort = run.data.abort, None
        if why:
            run.fail(why)
        if run.is_undoing:
            continue_undo(
                tx, engine, workflow, index, run, str(run.problem) if run.problem else None
            )
        elif why:
            fail(tx, engine, workflow, index, run)
        else:
            continuing.append(run)
    proceed(tx, engine, workflow, index, continuing, ready=lane)
    written = flush.write(tx, engine, runs)
    engine.fault_point(workflow.name, workflow.steps[index].name, "written")
    return written


def _position(action: ActionRow) -> tuple[Any, ...]:
    """Return the position of an action: workflow, step, phase and attempt.

    A burst compares the position under the lock with the position at the beginning of the burst.
    They differ if the lease expired and another conductor advanced the action, or if another lane
    of this conductor advanced it.
    """
    return action.workflow, action.step, action.phase, action.attempt


def is_held(server: ServerRow, action: ActionRow) -> bool:
    """Return True if this is the server's running action, and both have the same fence."""
    return bool(server.action == action.id and server.fence == action.fence)


def proceed(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    runs: Sequence[AnyRun],
    ready: Lane | None = None,
) -> None:
    """Advance runs from the step at ``index`` on, as far as this transaction can.

    A run ends after its last step, waits for the result of a command, or becomes due again for the
    call or preparation that the next step needs. A run whose step pauses or fails stops there, and
    ``fail`` processes the failure. The caller writes the changes of the runs.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        workflow: The workflow of the runs.
        index: The position of the first step.
        runs: The runs.
        ready: The lane that has completed the call or preparation of the first step. None: no lane.
    """
    for number, step in enumerate(workflow.steps[index:], index):
        skipping = [run for run in runs if step.is_skipped(run)]
        runs = [run for run in runs if run not in skipping]
        if runs and step.command:
            _start(tx, engine, workflow, number, runs)
            runs = []
        elif runs and _is_elsewhere(step, ready):
            for run in runs:
                if step.call:
                    run.record_event(step.name, StepEvent.STARTED)
                run.continue_at(step.name)
            runs = []
        elif runs:
            ignore_refusals(workflow, number, runs)
            succeeded = [run for run in runs if not run.problem]
            if step.apply and succeeded:
                step.apply(tx, engine, succeeded)
            runs = [run for run in runs if _is_through(tx, engine, workflow, number, step, run)]
        runs, ready = [*runs, *skipping], None
    for run in runs:
        finish(run, ActionState.DONE)


def _is_elsewhere(step: AnyStep, ready: Lane | None) -> bool:
    """Return True if the step has a call or preparation that lane ``ready`` has not completed."""
    return bool((step.call and ready != step.lane) or (step.prepare and ready != Lane.INSIDE))


def _is_through(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    step: AnyStep,
    run: AnyRun,
) -> bool:
    """Record the outcome of a step, and return True if the run continues with the next step.

    A run does not continue if its step is paused or has failed. ``fail`` processes a failure.
    """
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


def _start(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    runs: Sequence[AnyRun],
) -> None:
    """Record the start of a step and its command. The command is sent after the commit.

    A run whose step has no host fails at the first step of the workflow, so later steps are not
    undone.
    """
    step = workflow.steps[index]
    assert step.command is not None
    placed = []
    for run in runs:
        host = step.host(run)
        if host is None:
            run.fail(f"Server {run.server.id} is on no host. Delete it and create it again.")
            fail(tx, engine, workflow, index, run)
            continue
        placed.append(run)
        run.record_event(step.name, StepEvent.STARTED, host)
        _send(run, host, CommandKind.DO, step, step.command(engine, run))
    if step.on_start and placed:
        step.on_start(tx, placed)


def _send(run: AnyRun, host: str, kind: CommandKind, step: AnyStep, verb: Verb) -> None:
    """Add a step's command to the run, and let the action wait for the result.

    ``flush.send`` sends the command after the commit.
    """
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
    """Process a host's result of the command that the action waits for.

    After success, and if the outcome is unknown, the run continues with the next step. ``fail``
    processes a definite failure, and the result of an undo continues the undo. A dead host counts
    as success for an undo and for a step with ``done_when_host_dead``, otherwise as a failure. The
    caller writes the changes of the run.

    Raises:
        LookupError: This release does not have the action's step.
        ValueError: The status of the result is not a final status of this release.
    """
    workflow = engine.workflows[run.action.workflow]
    index = workflow.index(run.action.step)
    step = workflow.steps[index]
    if result.status not in FINAL_STATUSES:
        raise ValueError(f"the result of {result.key} has the unknown status {result.status!r}")
    if result.status == ResultStatus.DEAD and (run.is_undoing or step.done_when_host_dead):
        # No guest runs on the dead host, and its files are a pending cleanup.
        result = replace(result, status=ResultStatus.DONE)
    if run.is_undoing:
        continue_undo(
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
        f"The outcome of {run.action.verb} is unknown. The command was not repeated."
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


# --- end and undo ---
def fail(
    tx: Connection, engine: WorkflowEngine, workflow: AnyWorkflow, index: int, run: AnyRun
) -> None:
    """Record the failure ``run.problem`` of the step at ``index``, and begin the undo.

    The failed step is undone too, because its effect may exist. After the pivot there is no undo:
    the action ends as failed, or its workflow begins another try.
    """
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
    for completed in reversed(workflow.steps[: index + 1]):
        if completed.undo:
            completed.undo(tx, engine, run)
            run.record_event(completed.name, StepEvent.UNDONE)
    undo_from(tx, engine, workflow, index, run)


def _is_past_pivot(workflow: AnyWorkflow, index: int) -> bool:
    return any(step.pivot for step in workflow.steps[:index])


def ignore_refusals(workflow: AnyWorkflow, index: int, runs: Iterable[AnyRun]) -> None:
    """Clear refusals by a service after the pivot, because they do not fail the action.

    Each refusal becomes a message of the step. At the network service a pending cleanup of the
    server's ports is added.
    """
    step = workflow.steps[index]
    if step.call and _is_past_pivot(workflow, index):
        for run in runs:
            if run.problem:
                _ignore_refusal(step, run, str(run.problem))
                run.problem = None


def _ignore_refusal(step: AnyStep, run: AnyRun, why: str) -> None:
    """Record a refusal as a message of the step.

    Pending cleanups of single objects are left to the step. At the network service a cleanup of all
    the server's ports is added here.
    """
    run.ignored_refusal = why
    if step.lane == Lane.NETWORK:
        run.add_cleanup(PORTS, run.server.id, why)


def undo_from(
    tx: Connection, engine: WorkflowEngine, workflow: AnyWorkflow, index: int, run: AnyRun
) -> None:
    """Start the next undo by a host or a service, backwards from the step at ``index``.

    If no such undo is left, the action ends as failed, or its workflow begins another try.
    """
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


def continue_undo(
    tx: Connection,
    engine: WorkflowEngine,
    workflow: AnyWorkflow,
    index: int,
    run: AnyRun,
    refused: str | None = None,
) -> None:
    """Record the end of a step's undo, and continue with the undo of the steps before it.

    ``refused`` is the reason why the undo failed, or None after a successful undo. A refusal by a
    service does not count as a failed undo, and becomes a message of the step.
    """
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
    assert failure is not None, "a failed action has a failure in its data"
    problem = StepFailed(failure.text, failure.details, failure.retryable, reason=failure.reason)
    run.is_left_off = any(
        step.undo_starts_guest and step.name in run.data.undo_failures for step in workflow.steps
    )
    workflow.failed(tx, engine, run, problem)
    if run.head.get("state") == ActionState.DUE and run.head.get("phase") == ActionPhase.FORWARD:
        return  # ``failed`` of the workflow has begun another try.
    if run.data.undo_failures:
        failures = "; ".join(f"{step}: {why}" for step, why in run.data.undo_failures.items())
        text = (
            f"{problem} Completed steps could not be undone: {failures} Delete or rebuild server "
            f"{run.server.id}."
        )
        run.set(vm_state=states.ERROR, fault=fault_of(tx, StepFailed(text, problem.details)))
    finish(run, ActionState.FAILED, str(problem))


def finish(run: AnyRun, state: ActionState, message: str | None = None) -> None:
    """End the action: release the server, and delete the action's secrets and user data.

    The caller writes these changes of the run.

    Args:
        run: The run of the action.
        state: DONE or FAILED. DONE sets the vm_state that ``states.Action.after`` defines, if any,
            and then clears the fault. A value that the run has set is kept.
        message: The message of the action. None: the reasons of its pending cleanups, if any.
    """
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
