# SPDX-License-Identifier: Apache-2.0
"""Hosts: which guests they have told of that no record knew then."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "hosts",
        sa.Column("unclaimed", sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")),
    )
