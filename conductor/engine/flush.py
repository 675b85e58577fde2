# SPDX-License-Identifier: Apache-2.0
"""Write the changes that runs have collected, and send their commands after the commit.

The transaction calls ``write``. After the commit the caller passes the result to ``send``. If the
conductor is killed between the two, each host gets the commands with the next report.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from common.domain.json_types import JsonObject
from common.domain.models import Command
from common.domain.statuses import ActionState, StepEvent
from common.service import metrics, tracing
from common.service.log import get_logger
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

log = get_logger(__name__)
#: Host -> commands.
Sendings = dict[str, list[Command]]


class Written(NamedTuple):
    """The work that remains after the commit."""

    sendings: Sendings
    #: Lanes in which an action is due.
    due: frozenset[Lane] = frozenset()
    #: Log events, as (name, fields, attempt).
    lines: tuple[tuple[str, JsonObject, int], ...] = ()


def write(tx: Connection, engine: WorkflowEngine, runs: Iterable[AnyRun]) -> Written:
    """Write the changes of runs in their transaction.

    If a run changes its action's row, the action's count of failures becomes 0 and the cause is
    removed, unless the run has counted a failure. Notifications about the runs go to the outbox, if
    the cloud has notifications configured.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        runs: The runs of this transaction, at most one for each action.

    Returns:
        The work for ``send``, which the caller does after the commit.
    """
    runs = list(runs)
    for run in runs:
        if run.data is not None and (data := journal(run.data, run.action.data)) != run.action.data:
            run.head["data"] = data
        if run.head and (run.action.failures or run.action.cause) and "failures" not in run.head:
            run.head.update(failures=0, cause=None)
    actions.update_servers(tx, {run.server.id: run.changes for run in runs if run.changes})
    actions.update(tx, {run.action.id: run.head for run in runs if run.head})
    actions.append(tx, [event for run in runs for event in run.events])
    migration_changes = {
        run.args.migration: run.migration_changes for run in runs if run.migration_changes
    }
    if migration_changes:
        migrations.update(tx, migration_changes)
    if volumes := {uuid: row for run in runs for uuid, row in run.volume_changes.items()}:
        block_devices.change(tx, volumes)
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
        tuple(line for run in runs for line in _log_events(run)),
    )


def _log_events(run: AnyRun) -> Iterator[tuple[str, JsonObject, int]]:
    """Yield the log events of a run, as (name, fields, attempt).

    There is a log event for each event of the journal except starts of steps, and for the end of
    the action. The duration of a command is measured from its latest sending, that of another step
    from the beginning of the burst.
    """
    row = run.action
    locked_at = getattr(row, "locked_at", None)
    action_fields = {"action": row.id, "workflow": row.workflow}
    ids = {"server": row.server_id, "request": row.request_id}
    milliseconds = (time.monotonic() - run.began) * 1000
    if row.state == ActionState.WAITING and row.sent_at and locked_at:
        milliseconds = (locked_at - row.sent_at) / 1000
    for entry in run.events:
        if entry["event"] != StepEvent.STARTED:
            step_fields = {"step": entry["step"], "event": entry["event"], "host": entry["host"]}
            fields = {
                **action_fields,
                **step_fields,
                "ms": max(0.0, milliseconds),
                **ids,
                "why": entry["message"],
            }
            yield "step", fields, entry["attempt"]
    if locked_at and (state := run.head.get("state")) in (ActionState.DONE, ActionState.FAILED):
        milliseconds = (locked_at - row.created_at) / 1000
        yield "action", {**action_fields, "state": state, "ms": milliseconds, **ids}, run.attempt


def _report_step(fields: JsonObject, attempt: int) -> None:
    """Write the log line, the metrics and the span of a completed step."""
    log.info("step", **fields)
    metrics.STEPS.add(fields["workflow"], fields["step"], fields["event"])
    metrics.STEP_SECONDS.observe(fields["ms"] / 1000, fields["workflow"], fields["step"])
    if tracing.spans:
        tracing.step(fields, attempt)


def _report_action(fields: JsonObject) -> None:
    """Write the log line, the metrics and the span of an action that ended."""
    log.info("action", **fields)
    metrics.ACTIONS.add(fields["workflow"], fields["state"])
    metrics.ACTION_SECONDS.observe(fields["ms"] / 1000, fields["workflow"], fields["state"])
    if tracing.spans:
        tracing.action(fields)


def with_sessions(tx: Connection, sendings: Sequence[tuple[str, Command]]) -> Sendings:
    """Return the commands by host, each with the current session of its host, or 0 without one."""
    if not sendings:
        return {}
    sessions = hosts.sessions(tx, (host for host, _ in sendings))
    by_host: Sendings = defaultdict(list)
    for host, command in sendings:
        by_host[host].append(replace(command, session=sessions.get(host, 0)))
    return by_host


def send(engine: WorkflowEngine, written: Written) -> None:
    """Log the steps, wake the lanes with due actions, and send one message to each host.

    A lost message is harmless, and so is a failure to send, which is logged: the answer to a later
    report of the host contains the commands.
    """
    for name, fields, attempt in written.lines:
        if name == "action":
            _report_action(fields)
        else:
            _report_step(fields, attempt)
    for lane in sorted(written.due):
        engine.wake(lane)
    for host, commands in written.sendings.items():
        try:
            engine.messaging.do(host, commands)
        except Exception:
            log.exception(
                "commands of a host cannot be sent; the answer to the next report of the host contains them",
                host=host,
            )
        engine.fault_point(commands[0].verb, commands[0].key.label, "sent")
