# SPDX-License-Identifier: Apache-2.0
"""Servers that move: the record of each move, whose allocation a guest's is, and hosts that were
fenced."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0005"
down_revision = "0004"

_JSON = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Add columns and a table."""
    op.add_column("guests", sa.Column("holder", sa.String(36)))
    op.add_column(
        "guests", sa.Column("keeps_files", sa.Boolean(), nullable=False, server_default="0")
    )
    op.add_column("services", sa.Column("fenced_at", sa.BigInteger()))
    op.create_table(
        "migrations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("action_id", sa.String(36), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("source_host", sa.String(255)),
        sa.Column("dest_host", sa.String(255)),
        sa.Column("old_flavor", _JSON, nullable=False),
        sa.Column("new_flavor", _JSON, nullable=False),
        sa.Column("was", sa.String(32), nullable=False),
        sa.Column("wish", sa.String(16)),
        sa.Column("progress", _JSON),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_migrations"),
        sa.UniqueConstraint("uuid", name="uq_migrations_uuid"),
    )
    for name, columns in (
        ("server", ["server_id", "status"]),
        ("status", ["status", "updated_at"]),
        ("page", ["created_at", "id"]),
        ("project", ["project_id", "created_at"]),
    ):
        op.create_index(f"ix_migrations_{name}", "migrations", columns)
