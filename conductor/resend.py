# SPDX-License-Identifier: Apache-2.0
"""Commands and debts that a host does not seem to know of: made again from the journal, in the answer to its report.

Called by ``conductor.reports``. A command that cannot be made again keeps no other from being sent.
"""
from __future__ import annotations

import logging
from typing import Any

from common.models import Command
from common.store import actions, guests
from common.store.engine import Connection, Row
from conductor import runner, steering
from conductor.saga import Engine, Run, debt_command
from conductor.workflows import WORKFLOWS

log = logging.getLogger(__name__)
AT_ONCE = 32                 #: commands re-sent to a host in one answer


def forgotten(tx: Connection, engine: Engine, host: str, session: int, known: set[str], grace: int) -> list[Command]:
    """What a host should be doing that is none of the ``known`` keys and older than ``grace`` µs."""
    rows = [row for row in actions.outstanding(tx, host, grace, AT_ONCE)
            if f"{row.id}/{runner.name_in_key(row)}/{row.attempt}" not in known]
    servers = actions.servers_of(tx, (row.server_id for row in rows)) if rows else {}
    commands = []
    for row in rows:
        try:
            command = _made_again(engine, row, servers[row.server_id], session) if row.server_id in servers else None
        except Exception:
            log.exception("the command of action %s cannot be made again", row.id)
            continue
        if command is not None:
            commands.append(command)
    if rows:
        actions.mark_sent(tx, [row.id for row in rows])
    debts = [command for command in (debt_command(row.server_id, row.fence, session, row.keeps_files) for row in
                                     guests.debts(tx, host, grace, AT_ONCE)) if command.key not in known]
    if debts:
        guests.mark_sent(tx, host, [command.server for command in debts])
    return commands + debts + steering.on_host(tx, host, session)


def _made_again(engine: Engine, row: Row[Any], server: Row[Any], session: int) -> Command | None:
    """The command that a waiting action has at its host."""
    if not runner.is_known(row):
        return None
    workflow, run = WORKFLOWS[row.workflow], Run(row, server, dict(row.data))
    step = workflow.steps[workflow.index(row.step)]
    command = step.undo_command if run.is_undoing else step.command
    assert command is not None
    verb, args = command(engine, run)
    return Command(row.id, runner.name_in_key(row), row.attempt, server.id, row.fence, session, verb, args)
