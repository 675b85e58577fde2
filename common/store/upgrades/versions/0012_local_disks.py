# SPDX-License-Identifier: Apache-2.0
"""Servers keep what their request asked for in place of their flavor's ephemeral and swap disks."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "servers",
        sa.Column("disks", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")),
    )
