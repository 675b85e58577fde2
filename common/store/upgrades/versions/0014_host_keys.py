# SPDX-License-Identifier: Apache-2.0
"""Which keys of hosts count. A host that is known needs one before it is heard again: kilonova host
add."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "host_keys",
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("previous_until", sa.BigInteger(), nullable=True),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host", name="pk_host_keys"),
    )
