# SPDX-License-Identifier: Apache-2.0
"""Hosts: how many of their messages conductors have refused, and when they refused the last one."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    """Add the columns."""
    op.add_column(
        "hosts",
        sa.Column("refused_messages", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.add_column("hosts", sa.Column("refused_at", sa.BigInteger()))
