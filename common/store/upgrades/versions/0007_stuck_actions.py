# SPDX-License-Identifier: Apache-2.0
"""Actions count how often they failed where nobody foresaw it, and keep the cause; they name the
verb in hand."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns."""
    op.add_column(
        "actions", sa.Column("failures", sa.Integer(), nullable=False, server_default="0")
    )
    op.add_column("actions", sa.Column("cause", sa.Text()))
    op.add_column("actions", sa.Column("verb", sa.String(32)))
