# SPDX-License-Identifier: Apache-2.0
"""The only executor of workflows: takes due actions, does the next step, writes down what happened.

``advance`` is a plain function of the engine; the threads that call it live in ``conductor.service``. It works in one
of the lanes: one for each neighbour, with the steps that call it, and INSIDE for all others. Everything works on
lists: what is due together is done in one transaction, and one by one when that fails. There is no recovery code: a
step found unfinished is simply the next step.
"""
from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

from common import errors
from common.models import Command, Result
from common.store import actions, allocations, cleanups, hosts, migrations, outbox
from common.store.engine import Connection, Row, now, told_by
from conductor import aside, notices, retries
from conductor.endings import UNDO, fail, finish, is_skipped, overlook, undone
from conductor.lanes import INSIDE, LANE_OF, LANES, OUTSIDE_STEPS
from conductor.saga import Engine, Run, Step, Workflow
from conductor.workflows import WORKFLOWS

log = logging.getLogger(__name__)
Sendings = dict[str, list[Command]]


class Written(NamedTuple):
    """What is left to do after the commit: commands by host, and the lanes in which some action is due."""

    sendings: Sendings
    due: frozenset[str] = frozenset()


NEIGHBOUR_AT_MOST, LOCKED_AT_MOST = 4, 60       #: seconds between two tries
ENDS = ("done", "failed", "dead", "unknown")     #: statuses of results that end a command
UNANSWERED = 8               #: tries of an action whose proposal nobody answers, in about twenty seconds
EACH_AT_MOST = 5.0           #: seconds in which actions of a burst that failed are written one by one
VERSIONS = {name: workflow.version for name, workflow in WORKFLOWS.items()}


def advance(engine: Engine, lane: str = INSIDE) -> int:
    """Take the due actions of a lane and bring each to where it waits, ends or changes lanes; returns how many were
    taken."""
    which: dict[str, Any] = ({"but": OUTSIDE_STEPS} if lane == INSIDE else
                             {"only": LANES[lane], "lease": engine.leases.get(lane, actions.LONG_LEASE)})
    rows = engine.store.write(lambda tx: actions.take(tx, engine.owner, VERSIONS, engine.batch, **which))
    groups: dict[tuple[str, int, str], list[Row[Any]]] = defaultdict(list)
    locked = aside.servers(engine) if rows else ()
    retries.postpone(engine, [row for row in rows if row.server_id in locked], LOCKED_AT_MOST)
    for row in (row for row in rows if row.server_id not in locked):
        alone = row.id if row.failures else ""      # and after the others
        try:
            groups[row.workflow, WORKFLOWS[row.workflow].index(row.step), alone].append(row)
        except LookupError as problem:
            log.error("action %s cannot be advanced: %s", row.id, problem)
            retries.count(engine, row, problem)
    for (name, index, _), members in sorted(groups.items(), key=lambda group: bool(group[0][2])):
        engine.fault_point(name, WORKFLOWS[name].steps[index].name, "taken")
        try:
            _burst(engine, WORKFLOWS[name], index, members, lane)
        except errors.Unavailable:
            raise
        except Exception:
            log.exception("%d actions of %s are left to the end of their lease", len(members), name)
    return len(rows)


def _burst(engine: Engine, workflow: Workflow, index: int, rows: Sequence[Row[Any]], lane: str) -> None:
    """Advance actions that stand at the same step: what is done outside first, then one transaction, then send."""
    servers = engine.store.read(lambda tx: actions.servers_of(tx, (row.server_id for row in rows)))
    runs = []
    for row in rows:
        try:
            runs.append(Run(row, servers[row.server_id], dict(row.data)))
        except (LookupError, TypeError, ValueError) as problem:
            log.error("action %s has no server, or no data: %s", row.id, problem)
            retries.count(engine, row, problem)
    step, aborted = workflow.steps[index], [run for run in runs if "abort" in run.data]
    runs = [run for run in runs if run not in aborted]
    if lane == INSIDE:
        runs = _propose(engine, workflow, step, runs)
    elif runs:
        runs = _call(engine, step, runs)
        engine.fault_point(workflow.name, step.name, "called")
    if runs or aborted:
        _commit(engine, workflow, index, [*runs, *aborted], lane)


def _propose(engine: Engine, workflow: Workflow, step: Step, runs: Sequence[Run]) -> list[Run]:
    """Ask what the step asks before its transaction; returns those that can go on. When that was not answered many
    times, one of them may be the reason: a part of them is asked for alone, each time another one."""
    if not step.propose:
        return list(runs)
    if all(run.action.sends < UNANSWERED for run in runs):
        return _ask(engine, workflow, step, runs)
    chosen = [run for run in runs if sha256(f"{run.action.id}{run.action.sends}".encode()).digest()[0] % 2]
    answered = _ask(engine, workflow, step, chosen or runs)
    others = [run for run in runs if run not in chosen] if chosen else []
    if others and answered:
        return answered + _ask(engine, workflow, step, others)
    retries.postpone(engine, [run.action for run in others], NEIGHBOUR_AT_MOST)
    return answered


def _ask(engine: Engine, workflow: Workflow, step: Step, runs: Sequence[Run]) -> list[Run]:
    """In one call for all, or for each where that fails."""
    assert step.propose is not None
    asking = [Run(run.action, run.server, dict(run.action.data)) for run in runs]
    try:
        if wanted := [run for run in asking if not is_skipped(step, run)]:
            step.propose(engine, wanted)
            engine.fault_point(workflow.name, step.name, "proposed")
    except errors.Unavailable as problem:
        log.warning("%s waits: %s", workflow.name, problem)
        retries.postpone(engine, [run.action for run in runs], NEIGHBOUR_AT_MOST)
        return []
    except Exception as problem:
        log.exception("%s cannot be proposed for %d servers", workflow.name, len(runs))
        if len(runs) > 1:
            return [asked for run in runs for asked in _ask(engine, workflow, step, [run])]
        retries.count(engine, runs[0].action, problem)
        return []
    return asking


def _call(engine: Engine, step: Step, runs: Sequence[Run]) -> list[Run]:
    """Call the neighbour for each; what it refuses for good is the step's failure. Those that it did not answer are
    postponed; returns the others."""
    def call(run: Run) -> None:
        ask = step.undo_outside if run.is_undoing else step.outside
        assert ask is not None
        try:
            ask(engine, run)
        except errors.Unavailable:
            raise
        except errors.Problem as problem:
            run.fail(problem.text, str(problem.__cause__ or ""), status=problem.status)

    answered = []
    for run, problem in zip(runs, engine.spread(step.neighbour, call, runs), strict=True):
        if problem is None:
            answered.append(run)
        elif isinstance(problem, errors.Unavailable):
            log.warning("action %s waits at step %s: %s", run.action.id, step.name, problem)
            retries.postpone(engine, [run.action], NEIGHBOUR_AT_MOST, problem.wait)
        else:
            log.error("action %s cannot be advanced at step %s", run.action.id, step.name, exc_info=problem)
            retries.count(engine, run.action, problem)
    return answered


def _commit(engine: Engine, workflow: Workflow, index: int, runs: Sequence[Run], lane: str) -> None:
    """The transaction of a burst and what follows it. When it fails, one for each: what was called or asked outside is
    not repeated.

    Raises:
        Unavailable: the database does not answer at all, which is more than a row that somebody has locked.
    """
    try:
        written = engine.store.write(lambda tx: _write(tx, engine, workflow, index, runs, lane), alone=False)
    except errors.TooBusy as problem:
        log.warning("%d actions of %s wait: %s", len(runs), workflow.name, problem)
        locked = aside.look(engine, (run.server.id for run in runs))
        waiting = [run for run in runs if run.server.id in locked or len(runs) == 1]
        if not waiting:
            _commit_each(engine, workflow, index, runs, lane)
            return
        aside.put(engine, (run.server.id for run in waiting))
        retries.postpone(engine, [run.action for run in waiting], LOCKED_AT_MOST)
        if free := [run for run in runs if run not in waiting]:
            _commit(engine, workflow, index, free, lane)
        return
    except errors.Unavailable as problem:
        log.warning("%d actions of %s wait: %s", len(runs), workflow.name, problem)
        retries.postpone(engine, [run.action for run in runs], NEIGHBOUR_AT_MOST)
        return
    except Exception as problem:
        log.exception("%d actions of %s cannot be written", len(runs), workflow.name)
        if len(runs) > 1:
            _commit_each(engine, workflow, index, runs, lane)
        else:
            retries.count(engine, runs[0].action, problem)
        return
    engine.fault_point(workflow.name, workflow.steps[index].name, "committed")
    send(engine, written)


def _commit_each(engine: Engine, workflow: Workflow, index: int, runs: Sequence[Run], lane: str) -> None:
    """One after the other; where locks make that slow, the rest is left to the next round."""
    until = engine.clock.monotonic() + EACH_AT_MOST
    for number, run in enumerate(runs):
        if engine.clock.monotonic() > until:
            retries.postpone(engine, [left.action for left in runs[number:]], 0)
            return
        _commit(engine, workflow, index, [run], lane)


def _write(tx: Connection, engine: Engine, workflow: Workflow, index: int, planned: Sequence[Run], lane: str
           ) -> Written:
    """The transaction of a burst. Runs whose server has moved on, or that another conductor or another lane took,
    drop out."""
    servers = actions.lock_servers(tx, (run.server.id for run in planned))
    heads = actions.lock(tx, (run.action.id for run in planned))
    runs, lost = [], []
    for plan in planned:
        server, head = servers.get(plan.server.id), heads[plan.action.id]
        if _where(head) != _where(plan.action):
            log.warning("action %s has gone on to %s without this burst", head.id, head.step)
        elif server is not None and is_held(server, head) and head.state == "due" and head.owner == engine.owner:
            runs.append(Run(head, server, {**head.data, **plan.left}, plan.selection, plan.problem,
                            pending=plan.pending, woken=head.due_at != plan.action.due_at))
        else:
            lost.append(head.id)
    if lost:
        actions.let_go(tx, engine.owner, lost)
    going_on = []
    for run in runs:
        if why := run.data.pop("abort", None):
            run.fail(why)
        if run.is_undoing:
            undone(tx, engine, workflow, index, run, str(run.problem) if run.problem else None)
        elif why:
            fail(tx, engine, workflow, index, run)
        else:
            going_on.append(run)
    proceed(tx, engine, workflow, index, going_on, ready=lane)
    written = flush(tx, runs)
    engine.fault_point(workflow.name, workflow.steps[index].name, "written")
    return written


def _where(action: Row[Any]) -> tuple[Any, ...]:
    """What a burst must find as it took it: a lease that ran out may have led another one past this step, and another
    lane of this conductor may hold the action by now."""
    return action.workflow, action.step, action.phase, action.attempt


def is_held(server: Row[Any], action: Row[Any]) -> bool:
    """Does this action still hold its server, under the fence that it was given?"""
    return bool(server.action == action.id and server.fence == action.fence)


def proceed(tx: Connection, engine: Engine, workflow: Workflow, index: int, runs: Sequence[Run],
            ready: str | None = None) -> None:
    """From this step on: do what is done here, start what is done on a host, finish what has no more steps.

    ``ready``: the lane in which the first of these steps has done its part outside the transaction.
    """
    for number, step in enumerate(workflow.steps[index:], index):
        skipping = [run for run in runs if is_skipped(step, run)]
        runs = [run for run in runs if run not in skipping]
        if runs and step.command:
            _start(tx, engine, step, runs)
            runs = []
        elif runs and _is_elsewhere(step, ready):
            for run in runs:
                if step.outside:
                    run.note(step.name, "started")
                run.due(step.name)
            runs = []
        elif runs:
            overlook(workflow, number, runs)
            sound = [run for run in runs if not run.problem]
            if step.apply and sound:
                step.apply(tx, engine, sound)
            runs = [run for run in runs if _is_through(tx, engine, workflow, number, step, run)]
        runs, ready = [*runs, *skipping], None
    for run in runs:
        finish(run, "done")


def _is_elsewhere(step: Step, ready: str | None) -> bool:
    """Has the step a part outside the transaction that is not done yet?"""
    return bool(step.outside and ready != step.neighbour or step.propose and ready != INSIDE)


def _is_through(tx: Connection, engine: Engine, workflow: Workflow, index: int, step: Step, run: Run) -> bool:
    if run.paused:
        run.head["step"] = step.name
        return False
    if run.problem:
        fail(tx, engine, workflow, index, run)
        return False
    run.note(step.name, "succeeded", run.host, run.left_undone)
    if run.left_undone:
        run.data["left_undone"] = run.left_undone
    return True


def _start(tx: Connection, engine: Engine, step: Step, runs: Sequence[Run]) -> None:
    """Write "started" and the command in the same transaction; it is cast after the commit."""
    assert step.command is not None
    placed = []
    for run in runs:
        host = step.host(run)
        if host is None:
            run.fail("The server is on no host; delete it and create it again.")
            fail(tx, engine, WORKFLOWS[run.action.workflow], 0, run)
            continue
        placed.append(run)
        verb, args = step.command(engine, run)
        run.note(step.name, "started", host)
        run.command(host, step.name, verb, args)
        run.head.update(state="waiting", due_at=None, step=step.name, host=host, verb=verb, sent_at=now(),
                        sends=1, owner=None, lease_until=None)
    if step.before and placed:
        step.before(tx, placed)


def take_result(tx: Connection, engine: Engine, run: Run, result: Result) -> None:
    """Write a host's result and go on from the next step."""
    workflow = WORKFLOWS[run.action.workflow]
    index = workflow.index(run.action.step)
    step = workflow.steps[index]
    if result.status not in ENDS:
        raise ValueError(f"{result.status!r} is no end of a command that this release knows")
    if result.status == "dead" and (run.is_undoing or step.dead_is_done):
        result = replace(result, status="done")       # nothing runs there, and what is left is a debt
    if run.is_undoing:
        undone(tx, engine, workflow, index, run, result.error if result.status == "failed" else None)
        return
    if result.status in ("failed", "dead"):
        run.fail(result.error, result.details, result.retryable and not step.final)
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
    for run in runs:
        if run.data != run.action.data:
            run.head["data"] = run.data
        if run.head and (run.action.failures or run.action.cause) and "failures" not in run.head:
            run.head.update(failures=0, cause=None)
    actions.update_servers(tx, {run.server.id: run.changes for run in runs if run.changes})
    actions.update(tx, {run.action.id: run.head for run in runs if run.head})
    actions.append(tx, [event for run in runs for event in run.events])
    moved = {run.action.args["migration"]: run.moved for run in runs if run.moved}
    if moved:
        migrations.update(tx, moved)
    cleanups.add(tx, [row for run in runs for row in run.pending])
    allocations.judge(tx, [verdict for run in runs for verdict in run.verdicts])
    if telling := told_by(tx):
        outbox.add(tx, notices.of(runs, telling))
    sendings = with_sessions(tx, [sending for run in runs for sending in run.commands])
    return Written(sendings, frozenset(LANE_OF.get(run.head.get("step") or "", INSIDE) for run in runs
                                       if run.head.get("state") == "due"))


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
    for lane in sorted(written.due):
        engine.ring(lane)
    for host, commands in written.sendings.items():
        try:
            engine.post.do(host, commands)
        except Exception:
            log.exception("commands for host %s cannot be sent; its next exchange asks for them", host)
        engine.fault_point(commands[0].verb, commands[0].step, "sent")


def name_in_key(row: Row[Any]) -> str:
    """What a waiting action's step is called in the key of its command."""
    return f"{UNDO if row.phase == 'undo' else ''}{row.step}"
