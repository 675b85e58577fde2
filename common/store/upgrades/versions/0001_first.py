# SPDX-License-Identifier: Apache-2.0
"""Create all tables.

Until the release of 0.1.0 the code's own schema is the only one, so a database of an earlier commit
is made anew. The release writes the tables out in this file, because later upgrades begin with
them.
"""

from alembic import op

from common.store.schema import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create them."""
    metadata.create_all(op.get_bind())
