# SPDX-License-Identifier: Apache-2.0
"""Commands and debts that a host does not seem to know of: made again from the journal, in the
answer to its report.

Called by ``conductor.engine.reports``. A command that cannot be made again keeps no other from
being sent. A live migration that runs can be aborted, or completed by force: the API writes that
into the record of the migration and tells the host at once; the host is told again with every
periodic report until the migration has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from common.domain.command_key import CommandKey, CommandKind
from common.domain.models import Command, Control
from common.domain.statuses import ActionPhase
from common.domain.verbs import control_command, encode
from common.store.engine import Connection
from common.store.rows import ActionRow, BlockDeviceRow, PlacedServerRow
from common.store.servers import actions, block_devices, guests, migrations
from common.store.servers import shares as share_mappings
from conductor.engine import runner
from conductor.engine.run import cleanup_command
from conductor.engine.workflow import Workflows
from conductor.engine.workflow_engine import WorkflowEngine

log = logging.getLogger(__name__)
BATCH_SIZE = 32  #: commands re-sent to a host in one answer
MAX_ATTEMPT = 10**9  #: larger numbers, which a host may report, fit no column
Failed = list[tuple[ActionRow, Exception]]  #: actions whose command could not be made, and why


def resend(
    tx: Connection, engine: WorkflowEngine, host: str, session: int, known: set[str], grace: int
) -> tuple[list[Command], Failed]:
    """Return the commands that the host has lost: not among the ``known`` keys, and sent more than
    ``grace`` µs ago."""
    keys = CommandKey.parse_each(known).values()
    rows = actions.outstanding(tx, host, grace, BATCH_SIZE, _commands(keys))
    servers = actions.servers_of(tx, (row.server_id for row in rows)) if rows else {}
    having = [row for row in servers.values() if row.volumes]
    volumes = block_devices.of_servers(tx, having) if having else {}
    shares = share_mappings.ids_of(tx, servers.values())
    commands, failed = [], []
    for row in rows:
        try:
            command = (
                _made_again(
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
            log.exception("the command of action %s cannot be made again", row.id)
            failed.append((row, problem))
            continue
        if command is not None:
            commands.append(command)
    if rows:
        actions.mark_sent(tx, [row.id for row in rows])
    debts = [
        cleanup_command(row.server_id, row.fence, session, keep_files=row.keeps_files)
        for row in guests.debts(tx, host, grace, BATCH_SIZE, _debts(keys))
    ]
    if debts:
        guests.mark_sent(tx, host, [command.server for command in debts])
    return commands + debts + control_commands(tx, engine.workflows, host, session), failed


def _commands(keys: Iterable[CommandKey]) -> set[actions.CommandOf]:
    """Return the commands of actions, as the journal has them."""
    return {
        (key.owner, ActionPhase(key.kind.value), key.step, key.attempt)
        for key in keys
        if key.is_of_action and key.attempt <= MAX_ATTEMPT
    }


def _debts(keys: Iterable[CommandKey]) -> set[tuple[str, int]]:
    """Return the servers and fences of the cleanups."""
    return {(key.owner, key.attempt) for key in keys if key.kind is CommandKind.CLEANUP}


def _made_again(
    engine: WorkflowEngine,
    row: ActionRow,
    server: PlacedServerRow,
    volumes: Sequence[BlockDeviceRow],
    shares: Sequence[str],
    session: int,
) -> Command | None:
    """Return the command that an action waits for."""
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


# --- live migrations that run ---
def control_commands(
    tx: Connection, workflows: Workflows, host: str, session: int
) -> list[Command]:
    """Return the commands that control the live migrations which leave this host."""
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
