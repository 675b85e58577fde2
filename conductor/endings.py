# SPDX-License-Identifier: Apache-2.0
"""How an action ends: done, or failed after what it made has been undone, backwards from the step that failed.

Called by ``conductor.runner`` inside its transactions. Most of an undo is rows, and happens at once; what a host or a
neighbour must do is one journalled step each, in the phase *undo*, and survives crashes like any other. An undo that
a host definitely refuses is noted, and the server goes to ERROR with a fault that names the step: nothing hangs.
What a neighbour refuses after the pivot, or on the way back, changes nothing of the server: it is a pending cleanup
(``store.cleanups``).
"""
from __future__ import annotations

from collections.abc import Iterable

from common import states
from common.states import BY_WORKFLOW
from common.store.cleanups import PORTS
from common.store.engine import Connection, now
from conductor.networks import NETWORK
from conductor.saga import Engine, Run, Step, StepFailed, Workflow, fault_of

UNDO = "undo-"               #: before a step's name, in the key of the command that undoes it


def fail(tx: Connection, engine: Engine, workflow: Workflow, index: int, run: Run) -> None:
    """The step at ``index`` has definitely failed; its effect may have happened all the same."""
    problem = run.problem
    assert problem is not None
    step = workflow.steps[index]
    run.note(step.name, "failed", step.host(run), str(problem), problem.details or None)
    run.data["problem"] = {"text": str(problem), "details": problem.details, "retryable": problem.retryable,
                           "status": problem.status}
    if _is_past_pivot(workflow, index):
        _end_failed(tx, engine, workflow, run)
        return
    for made in reversed(workflow.steps[:index + 1]):
        if made.undo:
            made.undo(tx, engine, run)
            run.note(made.name, "undone")
    undo_from(tx, engine, workflow, index, run)


def _is_past_pivot(workflow: Workflow, index: int) -> bool:
    return any(passed.pivot for passed in workflow.steps[:index])


def overlook(workflow: Workflow, index: int, runs: Iterable[Run]) -> None:
    """What a neighbour has refused at this step after the pivot fails no action."""
    step = workflow.steps[index]
    if step.outside and _is_past_pivot(workflow, index):
        for run in runs:
            if run.problem:
                _overlook(step, run, str(run.problem))
                run.problem = None


def _overlook(step: Step, run: Run, why: str) -> None:
    """What this step cleans has been remembered one by one; but a server's ports are looked at as a whole too."""
    run.overlooked = why
    if step.neighbour == NETWORK:
        run.remember(PORTS, run.server.id, why)


def undo_from(tx: Connection, engine: Engine, workflow: Workflow, index: int, run: Run) -> None:
    """Start the next undo that a host or a neighbour must do, from this step backwards; after the last, end."""
    for step in reversed(workflow.steps[:index + 1]):
        if step.needed and not step.needed(run):
            continue
        host = step.host(run)
        if step.undo_command and host:
            verb, args = step.undo_command(engine, run)
            run.command(host, UNDO + step.name, verb, args)
            run.head.update(state="waiting", phase="undo", due_at=None, step=step.name, host=host, verb=verb,
                            sent_at=now(), sends=1, owner=None, lease_until=None, data=run.data)
            return
        if step.undo_outside:
            run.due(step.name, phase="undo")
            return
    _end_failed(tx, engine, workflow, run)


def undone(tx: Connection, engine: Engine, workflow: Workflow, index: int, run: Run, refused: str | None = None
           ) -> None:
    """The undo of this step is over; go on with those before it."""
    step = workflow.steps[index]
    if refused and step.undo_outside and not step.undo_command:
        _overlook(step, run, refused)
        refused = None
    run.note(step.name, "undo_failed" if refused else "undone", run.action.host, refused or run.left_undone)
    if refused:
        run.data.setdefault("undo_failed", []).append(f"{step.name}: {refused}")
    undo_from(tx, engine, workflow, index - 1, run)


def _end_failed(tx: Connection, engine: Engine, workflow: Workflow, run: Run) -> None:
    told = run.data["problem"]
    problem = StepFailed(told["text"], told["details"], told["retryable"])
    workflow.failed(tx, engine, run, problem)
    if run.head.get("state") == "due" and run.head.get("phase") == "do":
        return                                        # the workflow chose to try again
    if run.data.get("undo_failed"):
        text = f"{problem}; and it could not be undone: {'; '.join(run.data['undo_failed'])}. Delete or rebuild it."
        run.set(vm_state=states.ERROR, fault=fault_of(tx, StepFailed(text, problem.details)))
    finish(run, "failed", str(problem))


def finish(run: Run, state: str, message: str | None = None) -> None:
    """The action lets its server go; secrets are forgotten."""
    row = BY_WORKFLOW[run.action.workflow]
    run.changes.update(task_state=None, action=None)
    if state == "done" and row.after:
        run.changes.setdefault("vm_state", row.after)
        run.changes.setdefault("fault", None)
    run.head.update(state=state, due_at=None, owner=None, lease_until=None, secrets=None, finished_at=now())
    if message := message or run.data.get("left_undone"):
        run.head["message"] = message


def is_skipped(step: Step, run: Run) -> bool:
    """Has this action not got the step?"""
    return step.needed is not None and not step.needed(run)
