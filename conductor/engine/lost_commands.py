# SPDX-License-Identifier: Apache-2.0
"""Send lost commands and removals again, in the answer to a host's report.

A command that a host's report does not list is lost. The conductor builds the command again from
the journal. ``conductor.engine.reports`` calls this. If one command cannot be built, the others are
still sent.

The API can request an abort or a forced completion of a running live migration. The API records the
request in the migration and notifies the host at once. Each periodic report is answered with the
request until the migration has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.domain.command_key import CommandKey, CommandKind
from common.domain.models import Command, Control
from common.domain.statuses import ActionPhase
from common.domain.verbs import control_command, encode
from common.service.log import get_logger
from common.store.engine import Connection
from common.store.rows import ActionRow, BlockDeviceRow, PlacedServerRow
from common.store.servers import actions, block_devices, guests, migrations
from common.store.servers import shares as share_mappings
from conductor.engine import runner
from conductor.engine.run import cleanup_command
from conductor.engine.workflow import Workflows
from conductor.engine.workflow_engine import WorkflowEngine

log = get_logger(__name__)
#: Commands that one answer to a host contains at most.
BATCH_SIZE = 32
#: Hosts may report larger numbers, which fit no column.
MAX_ATTEMPT = 10**9
#: Actions without a command, and the error that occurred while the command was built.
Failed = list[tuple[ActionRow, Exception]]


def resend(
    tx: Connection, engine: WorkflowEngine, host: str, session: int, known: set[str], grace: int
) -> tuple[list[Command], Failed]:
    """Return a host's lost commands, pending removals and migration controls.

    At most ``BATCH_SIZE`` commands and ``BATCH_SIZE`` removals are returned, and marked as sent
    now. Rows locked by another transaction are left out. An action is marked too if its command
    cannot be built, or if this release does not know its workflow. The controls are not marked, so
    each call returns them.

    Args:
        tx: The transaction.
        engine: The conductor's engine.
        host: The host that has sent a report.
        session: The current session of the host.
        known: Keys of the commands that the report lists.
        grace: Microseconds. Commands sent more recently are not lost, but still on their way.

    Returns:
        The commands that the caller must send, and the actions whose command could not be built,
        each with the error.
    """
    keys = CommandKey.parse_each(known).values()
    rows = actions.outstanding(tx, host, grace, BATCH_SIZE, _journal_keys(keys))
    servers = actions.servers_of(tx, (row.server_id for row in rows)) if rows else {}
    with_volumes = [row for row in servers.values() if row.volumes]
    volumes = block_devices.of_servers(tx, with_volumes) if with_volumes else {}
    shares = share_mappings.ids_of(tx, servers.values())
    commands, failed = [], []
    for row in rows:
        try:
            command = (
                _build_command(
                    engine,
                    row,
                    servers[row.server_id],
                    volumes.get(row.server_id, ()),
                    shares.get(row.server_id, ()),
                    session,
                )
                if row.server_id in servers
                else None
            )
        except Exception as problem:
            log.exception("the command of an action cannot be built", action=row.id)
            failed.append((row, problem))
            continue
        if command is not None:
            commands.append(command)
    if rows:
        actions.mark_sent(tx, [row.id for row in rows])
    removals = [
        cleanup_command(row.server_id, row.fence, session, keep_files=row.keeps_files)
        for row in guests.removals(tx, host, grace, BATCH_SIZE, _removal_keys(keys))
    ]
    if removals:
        guests.mark_sent(tx, host, [command.server for command in removals])
    return commands + removals + control_commands(tx, engine.workflows, host, session), failed


def _journal_keys(keys: Iterable[CommandKey]) -> set[actions.CommandOf]:
    """Return the commands of actions as (action, phase, step, attempt).

    Other keys, and keys with an attempt above ``MAX_ATTEMPT``, are left out.
    """
    return {
        (key.owner, ActionPhase(key.kind.value), key.step, key.attempt)
        for key in keys
        if key.is_of_action and key.attempt <= MAX_ATTEMPT
    }


def _removal_keys(keys: Iterable[CommandKey]) -> set[tuple[str, int]]:
    """Return the server and the fence of each key of a removal. Other keys are left out."""
    return {(key.owner, key.attempt) for key in keys if key.kind is CommandKind.CLEANUP}


def _build_command(
    engine: WorkflowEngine,
    row: ActionRow,
    server: PlacedServerRow,
    volumes: Sequence[BlockDeviceRow],
    shares: Sequence[str],
    session: int,
) -> Command | None:
    """Return the command that an action waits for.

    None if this release lacks the workflow, or has only an older version.
    """
    if not engine.workflows.knows(row):
        return None
    workflow = engine.workflows[row.workflow]
    run = workflow.run(row, server, volumes, shares=shares)
    step = workflow.steps[workflow.index(row.step)]
    command = step.undo_command if run.is_undoing else step.command
    assert command is not None
    return encode(
        command(engine, run),
        runner.key_of(row),
        server=server.id,
        fence=row.fence,
        session=session,
        request_id=row.request_id,
    )


# --- running live migrations ---
def control_commands(
    tx: Connection, workflows: Workflows, host: str, session: int
) -> list[Command]:
    """Return the commands that abort or complete running live migrations away from this host.

    Only migrations for which a tenant or an operator has requested this, and whose action waits for
    this host's command of the live migration, have a command.
    """
    requested = {
        row.action_id: row.requested_control for row in migrations.requested_controls(tx, host)
    }
    return (
        [
            control_command(
                runner.key_of(row),
                Control(requested[row.id]),
                server=row.server_id,
                fence=row.fence,
                session=session,
            )
            for row in actions.waiting(tx, requested)
            if row.host == host
            and row.step is not None
            and (row.workflow, row.step) in workflows.taking_controls
        ]
        if requested
        else []
    )
