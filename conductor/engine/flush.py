# SPDX-License-Identifier: Apache-2.0
"""What runs have collected is written in their transaction, and sent after its commit.

``write`` is called in the transaction, ``send`` after it, with what ``write`` returned. Between the
two a conductor may be killed: the next sync of a host brings what was not sent.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from common.domain.json_types import JsonObject
from common.domain.models import Command
from common.domain.statuses import ActionState, StepEvent
from common.service import metrics, tracing
from common.service.log import event
from common.store import cleanups
from common.store.engine import Connection, notification_settings
from common.store.hosts import hosts
from common.store.notifications import outbox
from common.store.placement import allocations
from common.store.servers import actions, block_devices, migrations
from conductor.engine.action_data import journal
from conductor.engine.engine import Lane
from conductor.engine.run import AnyRun
from conductor.engine.workflow_engine import WorkflowEngine

log = logging.getLogger(__name__)
Sendings = dict[str, list[Command]]  #: commands by host


class Written(NamedTuple):
    """What is left to do after the commit: commands by host, the lanes in which some action is due,
    and what to log."""

    sendings: Sendings
    due: frozenset[Lane] = frozenset()
    lines: tuple[tuple[str, JsonObject, int], ...] = ()  #: of the log; with their attempt


def write(tx: Connection, engine: WorkflowEngine, runs: Iterable[AnyRun]) -> Written:
    """Write the changes of runs, and return what is left to do after the commit."""
    runs = list(runs)
    for run in runs:
        if run.data is not None and (data := journal(run.data, run.action.data)) != run.action.data:
            run.head["data"] = data
        if run.head and (run.action.failures or run.action.cause) and "failures" not in run.head:
            run.head.update(failures=0, cause=None)
    actions.update_servers(tx, {run.server.id: run.changes for run in runs if run.changes})
    actions.update(tx, {run.action.id: run.head for run in runs if run.head})
    actions.append(tx, [event for run in runs for event in run.events])
    migrated = {run.args.migration: run.migration_changes for run in runs if run.migration_changes}
    if migrated:
        migrations.update(tx, migrated)
    if changed := {key: one for run in runs for key, one in run.volume_changes.items()}:
        block_devices.change(tx, changed)
    cleanups.add(tx, [row for run in runs for row in run.cleanups])
    allocations.judge(tx, [verdict for run in runs for verdict in run.build_verdicts])
    if settings := notification_settings(tx):
        outbox.add(tx, engine.notices(engine.workflows, runs, settings))
    sendings = with_sessions(tx, [sending for run in runs for sending in run.commands])
    return Written(
        sendings,
        frozenset(
            engine.workflows.lane_of.get(run.head.get("step") or "", Lane.INSIDE)
            for run in runs
            if run.head.get("state") == ActionState.DUE
        ),
        tuple(line for run in runs for line in _lines(run)),
    )


def _lines(run: AnyRun) -> Iterator[tuple[str, JsonObject, int]]:
    """What the log tells of a run: each step that is over, and the action's end. Durations of what
    a host did begin with its command, of other steps with the burst that took the action."""
    row = run.action
    micros = getattr(row, "locked_at", None)
    about = {"action": row.id, "workflow": row.workflow}
    whose = {"server": row.server_id, "request": row.request_id}
    took = (time.monotonic() - run.began) * 1000
    if row.state == ActionState.WAITING and row.sent_at and micros:
        took = (micros - row.sent_at) / 1000
    for one in run.events:
        if one["event"] != StepEvent.STARTED:
            step = {"step": one["step"], "event": one["event"], "host": one["host"]}
            parts = {**about, **step, "ms": max(0.0, took), **whose, "why": one["message"]}
            yield "step", parts, one["attempt"]
    if micros and (state := run.head.get("state")) in (ActionState.DONE, ActionState.FAILED):
        took = (micros - row.created_at) / 1000
        yield "action", {**about, "state": state, "ms": took, **whose}, run.attempt


def _count(what: str, parts: JsonObject) -> None:
    seconds = parts["ms"] / 1000
    if what == "step":
        metrics.STEPS.add(parts["workflow"], parts["step"], parts["event"])
        metrics.STEP_SECONDS.observe(seconds, parts["workflow"], parts["step"])
    else:
        metrics.ACTIONS.add(parts["workflow"], parts["state"])
        metrics.ACTION_SECONDS.observe(seconds, parts["workflow"], parts["state"])


def with_sessions(tx: Connection, sendings: Sequence[tuple[str, Command]]) -> Sendings:
    """Commands by host, each with the session that its host has now."""
    if not sendings:
        return {}
    sessions = hosts.sessions(tx, (host for host, _ in sendings))
    by_host: Sendings = defaultdict(list)
    for host, command in sendings:
        by_host[host].append(replace(command, session=sessions.get(host, 0)))
    return by_host


def send(engine: WorkflowEngine, written: Written) -> None:
    """One message a host; a lost one is made up for by the host's next sync."""
    for what, parts, attempt in written.lines:
        event(log, what, **parts)
        _count(what, parts)
        if tracing.spans:
            tracing.action(parts) if what == "action" else tracing.step(parts, attempt)
    for lane in sorted(written.due):
        engine.wake(lane)
    for host, commands in written.sendings.items():
        try:
            engine.messaging.do(host, commands)
        except Exception:
            log.exception(
                "commands for host %s cannot be sent; its next report asks for them", host
            )
        engine.fault_point(commands[0].verb, commands[0].key.label, "sent")
