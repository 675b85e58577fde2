# SPDX-License-Identifier: Apache-2.0
"""Indexes for what services ask again and again: a migration by its action, and servers that rest
in a state, whose times stay when they are gone. And injected files, which were readable in the
arguments of actions, are removed from those that have ended."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_ACTIONS = sa.table("actions", sa.column("id"), sa.column("args"), sa.column("state"))


def upgrade() -> None:
    """Make the indexes, drop those that they replace, remove the files."""
    op.create_index("ix_migrations_action", "migrations", ["action_id"])
    for since in ("shelved", "soft_deleted"):
        op.create_index(f"ix_servers_{since}", "servers", ["vm_state", f"{since}_at"])
        op.drop_index(f"ix_servers_{since}_at", "servers")
    connection, ended = op.get_bind(), ("done", "failed", "superseded")
    found = sa.select(_ACTIONS.c.id, _ACTIONS.c.args).where(
        _ACTIONS.c.state.in_(ended), _ACTIONS.c.args.contains('"files"')
    )
    for row in connection.execute(found).all():
        args = {name: value for name, value in json.loads(row.args).items() if name != "files"}
        connection.execute(
            sa.update(_ACTIONS).where(_ACTIONS.c.id == row.id).values(args=json.dumps(args))
        )
