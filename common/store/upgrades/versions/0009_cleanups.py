# SPDX-License-Identifier: Apache-2.0
"""What neighbours have still to remove."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0009"
down_revision = "0008"

_JSON = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Add a table."""
    op.create_table(
        "cleanups",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("place", sa.String(255), nullable=False),
        sa.Column("args", _JSON, nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cleanups"),
        sa.UniqueConstraint("kind", "target", "place", name="uq_cleanups_kind_target_place"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_cleanups_due_at", "cleanups", ["due_at"])
