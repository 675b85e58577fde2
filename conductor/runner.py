# SPDX-License-Identifier: Apache-2.0
"""The only executor of workflows: takes due actions, does the next step, writes down what happened.

``advance`` and ``resume`` are plain functions of the engine; the threads that call them live in
``conductor.service``. Everything works on lists: what is due together is done in one transaction, and one
by one when that fails. There is no recovery code: a step found unfinished is simply the next step.
"""
from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from common import errors
from common.clock import SECOND
from common.models import Command, Result
from common.states import BY_WORKFLOW
from common.store import actions, hosts
from common.store.engine import Connection, Row, now
from conductor.saga import Engine, Run, Step, Workflow
from conductor.workflows import WORKFLOWS

log = logging.getLogger(__name__)
Sendings = dict[str, list[Command]]


class Written(NamedTuple):
    """What is left to do after the commit: commands by host, and whether some action is due at once."""

    sendings: Sendings
    is_due: bool = False


SOON, NEIGHBOUR_AT_MOST, FAILING_AT_MOST = SECOND // 4, 4, 60     #: between two tries, first µs, then seconds
VERSIONS = {name: workflow.version for name, workflow in WORKFLOWS.items()}


def advance(engine: Engine) -> int:
    """Take due actions and bring each to where it waits or ends; returns how many were taken."""
    rows = engine.store.write(lambda tx: actions.take(tx, engine.owner, VERSIONS, engine.batch))
    groups: dict[tuple[str, int], list[Row[Any]]] = defaultdict(list)
    for row in rows:
        groups[row.workflow, WORKFLOWS[row.workflow].index(row.step)].append(row)
    for (name, index), members in groups.items():
        engine.fault_point(name, WORKFLOWS[name].steps[index].name, "taken")
        _burst(engine, WORKFLOWS[name], index, members)
    return len(rows)


def _burst(engine: Engine, workflow: Workflow, index: int, rows: Sequence[Row[Any]]) -> None:
    """Advance actions that stand at the same step: propose outside, then one transaction, then send."""
    step = workflow.steps[index]
    servers = engine.store.read(lambda tx: actions.servers_of(tx, (row.server_id for row in rows)))
    runs = [Run(row, servers[row.server_id], dict(row.data)) for row in rows if row.server_id in servers]
    try:
        if step.propose:
            step.propose(engine, runs)
            engine.fault_point(workflow.name, step.name, "proposed")
        written = engine.store.write(lambda tx: _write(tx, engine, workflow, index, runs))
    except errors.Unavailable as problem:
        log.warning("%s waits: %s", workflow.name, problem)
        _postpone(engine, rows, NEIGHBOUR_AT_MOST)
        return
    except Exception:
        if len(rows) > 1:
            for row in rows:
                _burst(engine, workflow, index, [row])
            return
        log.exception("action %s cannot be advanced at step %s; it is tried again", rows[0].id, step.name)
        _postpone(engine, rows, FAILING_AT_MOST)
        return
    engine.fault_point(workflow.name, step.name, "committed")
    send(engine, written)


def _postpone(engine: Engine, rows: Sequence[Row[Any]], at_most: int) -> None:
    """Look again soon; a failure that repeats is looked at less and less often, up to ``at_most`` seconds."""
    def work(tx: Connection) -> None:
        changes = {row.id: {"due_at": now() + min(at_most * SECOND, SOON * 2 ** min(row.sends, 8)),
                            "sends": row.sends + 1, "owner": None, "lease_until": None}
                   for row in actions.lock(tx, (row.id for row in rows)).values()
                   if row.owner == engine.owner and row.state == "due"}
        actions.update(tx, changes)
    engine.store.write(work)


def _write(tx: Connection, engine: Engine, workflow: Workflow, index: int, planned: Sequence[Run]) -> Written:
    """The transaction of a burst. Runs whose server has moved on, or that another conductor took, drop out."""
    servers = actions.lock_servers(tx, (run.server.id for run in planned))
    heads = actions.lock(tx, (run.action.id for run in planned))
    runs, lost = [], []
    for plan in planned:
        server, head = servers.get(plan.server.id), heads[plan.action.id]
        if server is not None and is_held(server, head) and head.state == "due" and head.owner == engine.owner:
            runs.append(Run(head, server, dict(head.data), plan.selection))
        else:
            lost.append(head.id)
    if lost:
        actions.let_go(tx, engine.owner, lost)
    proceed(tx, engine, workflow, index, runs, proposed=True)
    written = flush(tx, runs)
    engine.fault_point(workflow.name, workflow.steps[index].name, "written")
    return written


def is_held(server: Row[Any], action: Row[Any]) -> bool:
    """Does this action still hold its server, under the fence that it was given?"""
    return bool(server.action == action.id and server.fence == action.fence)


def proceed(tx: Connection, engine: Engine, workflow: Workflow, index: int, runs: Sequence[Run],
            proposed: bool = False) -> None:
    """From this step on: do what is done here, start what is done on a host, finish what has no more steps.

    ``proposed``: the first of these steps has made its proposal outside the transaction.
    """
    for step in workflow.steps[index:]:
        if not runs:
            return
        if step.command:
            _start(tx, engine, step, runs)
            return
        if step.propose and not proposed:
            for run in runs:
                run.head.update(state="due", due_at=now(), step=step.name, owner=None, lease_until=None, data=run.data)
            return
        assert step.apply is not None
        step.apply(tx, engine, runs)
        runs = [run for run in runs if _is_through(tx, engine, workflow, index, step, run)]
        index, proposed = index + 1, False
    for run in runs:
        finish(run, "done")


def _is_through(tx: Connection, engine: Engine, workflow: Workflow, index: int, step: Step, run: Run) -> bool:
    if run.paused:
        run.head["step"] = step.name
        return False
    if run.problem:
        fail(tx, engine, workflow, index, run)
        return False
    run.note(step.name, "succeeded", run.host)
    return True


def _start(tx: Connection, engine: Engine, step: Step, runs: Sequence[Run]) -> None:
    """Write "started" and the command in the same transaction; it is cast after the commit."""
    assert step.command is not None
    placed = []
    for run in runs:
        if run.host is None:
            run.fail("The server is on no host; delete it and create it again.")
            fail(tx, engine, WORKFLOWS[run.action.workflow], 0, run)
            continue
        placed.append(run)
        verb, args = step.command(engine, run)
        run.note(step.name, "started", run.host)
        run.command(run.host, step.name, verb, args)
        run.head.update(state="waiting", due_at=None, step=step.name, host=run.host, sent_at=now(), sends=1,
                        owner=None, lease_until=None)
    if step.before and placed:
        step.before(tx, placed)


def fail(tx: Connection, engine: Engine, workflow: Workflow, index: int, run: Run) -> None:
    """Undo backwards from the step that failed (its effect may have happened), then end or retry."""
    problem = run.problem
    assert problem is not None
    step = workflow.steps[index]
    run.note(step.name, "failed", run.host, str(problem), problem.details or None)
    if not any(passed.pivot for passed in workflow.steps[:index]):
        for made in reversed(workflow.steps[:index + 1]):
            if made.undo:
                made.undo(tx, engine, run)
                run.note(made.name, "undone")
    workflow.failed(tx, engine, run, problem)
    if run.head.get("state") != "due":
        finish(run, "failed", str(problem))


def finish(run: Run, state: str, message: str | None = None) -> None:
    """The action lets its server go; secrets are forgotten."""
    row = BY_WORKFLOW[run.action.workflow]
    run.changes.setdefault("task_state", None)
    run.changes.update(action=None)
    if state == "done" and row.after:
        run.changes.setdefault("vm_state", row.after)
        run.changes.setdefault("fault", None)
    run.head.update(state=state, due_at=None, owner=None, lease_until=None, secrets=None, finished_at=now())
    if message:
        run.head["message"] = message


def take_result(tx: Connection, engine: Engine, run: Run, result: Result) -> None:
    """Write a host's result and go on from the next step."""
    workflow = WORKFLOWS[run.action.workflow]
    index = workflow.index(run.action.step)
    step = workflow.steps[index]
    if result.status == "failed":
        run.fail(result.error, result.details, result.retryable)
        fail(tx, engine, workflow, index, run)
        return
    unknown = "Its outcome is unknown and it was not repeated." if result.status == "unknown" else None
    if step.done:
        step.done(tx, run, result)
    run.note(step.name, "succeeded", run.action.host, unknown)
    proceed(tx, engine, workflow, index + 1, [run])


def flush(tx: Connection, runs: Iterable[Run]) -> Written:
    """Write what the runs have collected; returns what is left to do after the commit."""
    runs = list(runs)
    actions.update_servers(tx, {run.server.id: run.changes for run in runs if run.changes})
    actions.update(tx, {run.action.id: run.head for run in runs if run.head})
    actions.append(tx, [event for run in runs for event in run.events])
    sendings = with_sessions(tx, [sending for run in runs for sending in run.commands])
    return Written(sendings, any(run.head.get("state") == "due" for run in runs))


def with_sessions(tx: Connection, sendings: Sequence[tuple[str, Command]]) -> Sendings:
    """Commands by host, each with the session that its host has now."""
    if not sendings:
        return {}
    sessions = hosts.sessions(tx, (host for host, _ in sendings))
    by_host: Sendings = defaultdict(list)
    for host, command in sendings:
        by_host[host].append(Command(command.action, command.step, command.attempt, command.server, command.fence,
                                     sessions.get(host, 0), command.verb, command.args))
    return by_host


def send(engine: Engine, written: Written) -> None:
    """One message a host; a lost one is made up for by the host's next sync."""
    if written.is_due:
        engine.ring()
    for host, commands in written.sendings.items():
        engine.post.do(host, commands)
        engine.fault_point(commands[0].verb, commands[0].step, "sent")


def rebuild_command(engine: Engine, row: Row[Any], server: Row[Any], session: int) -> Command | None:
    """The command that a waiting action has at its host, made again from the journal."""
    workflow = WORKFLOWS.get(row.workflow)
    if workflow is None or workflow.version < row.version:
        return None
    step = workflow.steps[workflow.index(row.step)]
    assert step.command is not None
    verb, args = step.command(engine, Run(row, server, dict(row.data)))
    return Command(row.id, row.step, row.attempt, server.id, row.fence, session, verb, args)
