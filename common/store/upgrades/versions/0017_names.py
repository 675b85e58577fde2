# SPDX-License-Identifier: Apache-2.0
"""Columns have the field's names. Every process that reads the database has its version, so none
looks for the old ones (docs/decisions/0044).
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0017"
down_revision = "0016"
LONG_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Rename the columns."""
    op.alter_column("hosts", "cells", new_column_name="numa_nodes", existing_type=LONG_TEXT)
    op.alter_column(
        "hosts",
        "told",
        new_column_name="newest_exchange",
        existing_type=sa.BigInteger(),
        existing_nullable=False,
        existing_server_default="0",
    )
    op.alter_column("guests", "fitting", new_column_name="assignment", existing_type=LONG_TEXT)
    op.alter_column(
        "migrations", "wish", new_column_name="requested_control", existing_type=sa.String(16)
    )
