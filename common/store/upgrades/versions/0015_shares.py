# SPDX-License-Identifier: Apache-2.0
"""Servers have shares: which, by which tag, and how far each is; and how many a server has, in its
own row."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the column and the table."""
    op.add_column("servers", sa.Column("shares", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "share_mappings",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("share_id", sa.String(36), nullable=False),
        sa.Column("tag", sa.String(255), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("protocol", sa.String(16), nullable=False),
        sa.Column("export_location", sa.Text(), nullable=False),
        sa.Column("access_to", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_share_mappings"),
        sa.UniqueConstraint("server_id", "share_id", name="uq_share_mappings_server_id_share_id"),
        sa.UniqueConstraint("server_id", "tag", name="uq_share_mappings_server_id_tag"),
    )
    op.create_index("ix_share_mappings_share", "share_mappings", ["share_id", "access_to"])
