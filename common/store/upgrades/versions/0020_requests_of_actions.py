# SPDX-License-Identifier: Apache-2.0
"""An index for those who look back at what a request has begun."""

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Make the index."""
    op.create_index("ix_actions_request", "actions", ["request_id"])
