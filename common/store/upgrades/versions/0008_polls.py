# SPDX-License-Identifier: Apache-2.0
"""Indexes for what services ask again and again: a migration by its action, and servers that rest in a state, whose
times stay when they are gone."""
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Make the indexes, and drop those that they replace."""
    op.create_index("ix_migrations_action", "migrations", ["action_id"])
    for since in ("shelved", "soft_deleted"):
        op.create_index(f"ix_servers_{since}", "servers", ["vm_state", f"{since}_at"])
        op.drop_index(f"ix_servers_{since}_at", "servers")
