# SPDX-License-Identifier: Apache-2.0
"""Commands and debts that a host does not seem to know of: made again from the journal, in the answer to its report.

Called by ``conductor.reports``. A command that cannot be made again keeps no other from being sent.
"""
from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from common.models import Command
from common.store import actions, guests
from common.store.engine import Connection, Row
from conductor import runner, steering
from conductor.endings import UNDO
from conductor.saga import DEBT, Engine, Run, debt_command
from conductor.workflows import WORKFLOWS, is_known

log = logging.getLogger(__name__)
AT_ONCE = 32                 #: commands re-sent to a host in one answer
Failed = list[tuple[Row[Any], Exception]]    #: actions whose command could not be made, and why


def forgotten(tx: Connection, engine: Engine, host: str, session: int, known: set[str], grace: int
              ) -> tuple[list[Command], Failed]:
    """What a host should be doing that is none of the ``known`` keys and older than ``grace`` µs."""
    rows = actions.outstanding(tx, host, grace, AT_ONCE, _commands(known))
    servers = actions.servers_of(tx, (row.server_id for row in rows)) if rows else {}
    commands, failed = [], []
    for row in rows:
        try:
            command = _made_again(engine, row, servers[row.server_id], session) if row.server_id in servers else None
        except Exception as problem:
            log.exception("the command of action %s cannot be made again", row.id)
            failed.append((row, problem))
            continue
        if command is not None:
            commands.append(command)
    if rows:
        actions.mark_sent(tx, [row.id for row in rows])
    debts = [debt_command(row.server_id, row.fence, session, row.keeps_files)
             for row in guests.debts(tx, host, grace, AT_ONCE, _debts(known))]
    if debts:
        guests.mark_sent(tx, host, [command.server for command in debts])
    return commands + debts + steering.on_host(tx, host, session), failed


def _commands(known: Collection[str]) -> set[actions.CommandOf]:
    """The keys of commands as the journal has them."""
    parts = [key.split("/") for key in known]
    return {(action, *(("undo", step.removeprefix(UNDO)) if step.startswith(UNDO) else ("do", step)), int(attempt))
            for action, step, attempt in (three for three in parts if _is_key(three)) if action != DEBT}


def _debts(known: Collection[str]) -> set[tuple[str, int]]:
    """The debts among these keys: server and fence."""
    parts = [key.split("/") for key in known]
    return {(server, int(fence)) for action, server, fence in (three for three in parts if _is_key(three))
            if action == DEBT}


def _is_key(parts: list[str]) -> bool:
    """Is it one that we made? Numbers that no column holds are none of ours."""
    return len(parts) == 3 and parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 10


def _made_again(engine: Engine, row: Row[Any], server: Row[Any], session: int) -> Command | None:
    """The command that a waiting action has at its host."""
    if not is_known(row):
        return None
    workflow, run = WORKFLOWS[row.workflow], Run(row, server, dict(row.data))
    step = workflow.steps[workflow.index(row.step)]
    command = step.undo_command if run.is_undoing else step.command
    assert command is not None
    verb, args = command(engine, run)
    return Command(row.id, runner.name_in_key(row), row.attempt, server.id, row.fence, session, verb, args)
