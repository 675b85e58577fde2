# SPDX-License-Identifier: Apache-2.0
"""Tokens with which hosts join, each good once and for an hour: kilonova host add."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "host_joins",
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("used_by", sa.String(64)),
        sa.Column("used_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("host", name="pk_host_joins"),
    )
