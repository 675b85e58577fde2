# SPDX-License-Identifier: Apache-2.0
"""Commands and debts that a host does not seem to know of: made again from the journal, in the
answer to its report.

Called by ``conductor.reports``. A command that cannot be made again keeps no other from being sent.
A live migration that runs can be aborted, or completed by force: the API writes that into the
record of the migration and tells the host at once; the host is told again with every periodic
report until the migration has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from common.models import UNDO, Command
from common.statuses import ActionPhase
from common.store.engine import Connection
from common.store.rows import ActionRow, BlockDeviceRow, PlacedServerRow
from common.store.servers import actions, block_devices, guests, migrations
from common.store.servers import shares as share_mappings
from conductor import runner
from conductor.run import DEBT, debt_command
from conductor.workflow import Workflows
from conductor.workflow_engine import WorkflowEngine

log = logging.getLogger(__name__)
BATCH_SIZE = 32  #: commands re-sent to a host in one answer
Failed = list[tuple[ActionRow, Exception]]  #: actions whose command could not be made, and why


def resend(
    tx: Connection, engine: WorkflowEngine, host: str, session: int, known: set[str], grace: int
) -> tuple[list[Command], Failed]:
    """What a host should be doing that is none of the ``known`` keys and older than ``grace``
    µs."""
    rows = actions.outstanding(tx, host, grace, BATCH_SIZE, _commands(known))
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
        debt_command(row.server_id, row.fence, session, row.keeps_files)
        for row in guests.debts(tx, host, grace, BATCH_SIZE, _debts(known))
    ]
    if debts:
        guests.mark_sent(tx, host, [command.server for command in debts])
    return commands + debts + control_commands(tx, engine.workflows, host, session), failed


def _commands(known: Collection[str]) -> set[actions.CommandOf]:
    """The keys of commands as the journal has them."""
    parts = [key.split("/") for key in known]
    return {
        (
            action,
            *(
                (ActionPhase.UNDO, step.removeprefix(UNDO))
                if step.startswith(UNDO)
                else (ActionPhase.FORWARD, step)
            ),
            int(attempt),
        )
        for action, step, attempt in (three for three in parts if _is_key(three))
        if action != DEBT
    }


def _debts(known: Collection[str]) -> set[tuple[str, int]]:
    """The debts among these keys: server and fence."""
    parts = [key.split("/") for key in known]
    return {
        (server, int(fence))
        for action, server, fence in (three for three in parts if _is_key(three))
        if action == DEBT
    }


def _is_key(parts: list[str]) -> bool:
    """Is it one that we made? Numbers that no column holds are none of ours."""
    return len(parts) == 3 and parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 10


def _made_again(
    engine: WorkflowEngine,
    row: ActionRow,
    server: PlacedServerRow,
    volumes: Sequence[BlockDeviceRow],
    shares: Sequence[str],
    session: int,
) -> Command | None:
    """The command that a waiting action has at its host."""
    if not engine.workflows.knows(row):
        return None
    workflow = engine.workflows[row.workflow]
    run = workflow.run(row, server, volumes, shares=shares)
    step = workflow.steps[workflow.index(row.step)]
    command = step.undo_command if run.is_undoing else step.command
    assert command is not None
    verb, args = command(engine, run)
    return Command(
        row.id,
        runner.name_in_key(row),
        row.attempt,
        server.id,
        row.fence,
        session,
        verb,
        args,
        row.request_id,
    )


# --- live migrations that run ---
def control_command(
    action: str, step: str, attempt: int, server: str, fence: int, session: int, control: str
) -> Command:
    """The command that controls the live migration of this action: ``control`` is abort or
    complete."""
    return Command(
        action,
        f"steer-{control}",
        attempt,
        server,
        fence,
        session,
        "steer",
        {"key": f"{action}/{step}/{attempt}", "wish": control},
    )


def control_commands(
    tx: Connection, workflows: Workflows, host: str, session: int
) -> list[Command]:
    """Return a command for each control that was requested of a live migration from this host."""
    requested = {
        row.action_id: row.requested_control for row in migrations.requested_controls(tx, host)
    }
    return (
        [
            control_command(
                row.id, row.step, row.attempt, row.server_id, row.fence, session, requested[row.id]
            )
            for row in actions.waiting(tx, requested)
            if row.host == host
            and row.step is not None
            and (row.workflow, row.step) in workflows.taking_controls
        ]
        if requested
        else []
    )
