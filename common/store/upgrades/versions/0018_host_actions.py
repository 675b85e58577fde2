# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations of hosts, which conductors carry out, with a journal of each."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0018"
down_revision = "0017"
LONG_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "host_actions",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("open_host", sa.String(255)),
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("args", LONG_TEXT, nullable=False),
        sa.Column("progress", LONG_TEXT, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("locked_by", sa.String(255)),
        sa.Column("locked_until", sa.BigInteger(), nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_host_actions"),
        sa.UniqueConstraint("open_host", name="uq_host_actions_open_host"),
    )
    op.create_index("ix_host_actions_host_created_at", "host_actions", ["host", "created_at"])
    op.create_table(
        "host_action_events",
        sa.Column("action_id", sa.String(36), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("server_id", sa.String(36)),
        sa.Column("migration", sa.String(36)),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("action_id", "seq", name="pk_host_action_events"),
    )
