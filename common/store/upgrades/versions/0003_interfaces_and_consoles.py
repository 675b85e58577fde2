# SPDX-License-Identifier: Apache-2.0
"""Servers have network interfaces and a password that their guest posted; consoles have tokens."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns and the table."""
    op.add_column(
        "servers",
        sa.Column("interfaces", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")),
    )
    op.add_column("servers", sa.Column("password", sa.Text()))
    op.create_table(
        "console_tokens",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("hash", name="pk_console_tokens"),
    )
    op.create_index("ix_console_tokens_expires_at", "console_tokens", ["expires_at"])
    op.create_index("ix_console_tokens_server", "console_tokens", ["server_id"])
