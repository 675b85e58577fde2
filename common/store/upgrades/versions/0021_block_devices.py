# SPDX-License-Identifier: Apache-2.0
"""Servers have volumes: which, by which attachment, and how far each is; and how many a server has,
in its own row."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Add the column and the table."""
    op.add_column("servers", sa.Column("volumes", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "block_devices",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("volume_id", sa.String(36), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attachment_id", sa.String(36), nullable=True),
        sa.Column(
            "connection",
            sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb"),
            nullable=True,
        ),
        sa.Column("source_type", sa.String(16), nullable=False),
        sa.Column("source_id", sa.String(36), nullable=True),
        sa.Column("volume_type", sa.String(255), nullable=True),
        sa.Column("size_gb", sa.Integer(), nullable=True),
        sa.Column("boot_index", sa.Integer(), nullable=True),
        sa.Column("device_name", sa.String(255), nullable=False),
        sa.Column("disk_bus", sa.String(16), nullable=True),
        sa.Column("device_type", sa.String(16), nullable=True),
        sa.Column("tag", sa.String(255), nullable=True),
        sa.Column("delete_on_termination", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("read_only", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("multiattach", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_block_devices"),
        sa.UniqueConstraint("server_id", "volume_id", name="uq_block_devices_server_id_volume_id"),
        sa.UniqueConstraint(
            "server_id", "device_name", name="uq_block_devices_server_id_device_name"
        ),
    )
    op.create_index("ix_block_devices_volume", "block_devices", ["volume_id"])
