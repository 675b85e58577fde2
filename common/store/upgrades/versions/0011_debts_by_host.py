# SPDX-License-Identifier: Apache-2.0
"""An index for the look, once a second, for hosts that have debts."""

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Make the index."""
    op.create_index("ix_guests_wanted", "guests", ["wanted", "host"])
