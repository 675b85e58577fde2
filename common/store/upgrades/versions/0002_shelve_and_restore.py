# SPDX-License-Identifier: Apache-2.0
"""Servers remember the image that they were shelved into, and since when they are shelved or
soft-deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("servers", sa.Column("shelved_image_id", sa.String(36)))
    op.add_column("servers", sa.Column("shelved_at", sa.BigInteger()))
    op.add_column("servers", sa.Column("soft_deleted_at", sa.BigInteger()))
    op.create_index("ix_servers_shelved_at", "servers", ["shelved_at"])
    op.create_index("ix_servers_soft_deleted_at", "servers", ["soft_deleted_at"])
