# SPDX-License-Identifier: Apache-2.0
"""Hosts remember which of their exchanges told their state last."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the column."""
    op.add_column("hosts", sa.Column("told", sa.BigInteger(), nullable=False, server_default="0"))
