# SPDX-License-Identifier: Apache-2.0
"""Consoles: whose token made an address, sealed, and which browser it belongs to. Older ones have
neither."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0016"
down_revision = "0015"
LONG_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Add the columns."""
    op.add_column("console_tokens", sa.Column("caller", LONG_TEXT))
    op.add_column("console_tokens", sa.Column("browser", sa.String(64)))
