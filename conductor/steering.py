# SPDX-License-Identifier: Apache-2.0
"""What is wished of a live migration that runs: to be aborted, or to be brought to its end.

The API writes the wish into the record of the migration and tells the host at once; the host is told again with every
periodic exchange until the migration has ended, so that a lost message only makes it late.
"""
from __future__ import annotations

from common.models import Command
from common.store import actions, migrations
from common.store.engine import Connection

STEP = "migrate"                 #: of the workflow: the command that is steered


def command(action: str, attempt: int, server: str, fence: int, session: int, wish: str) -> Command:
    """The command that steers the migration of this action: ``wish`` is abort or complete."""
    return Command(action, f"steer-{wish}", attempt, server, fence, session, "steer",
                   {"key": f"{action}/{STEP}/{attempt}", "wish": wish})


def on_host(tx: Connection, host: str, session: int) -> list[Command]:
    """What a host should know of the migrations that leave it."""
    wishes = {row.action_id: row.wish for row in migrations.wishes_on(tx, host)}
    return [command(row.id, row.attempt, row.server_id, row.fence, session, wishes[row.id])
            for row in actions.waiting(tx, wishes) if row.step == STEP and row.host == host] if wishes else []
