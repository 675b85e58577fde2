# SPDX-License-Identifier: Apache-2.0
"""Create all tables.

Before the release of 0.1.0, the schema of the code is the only one, so databases of earlier commits
must be created anew. The release writes the tables into this file, because later upgrades start
from them.
"""

from alembic import op

from common.store.schema import metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables of the schema."""
    metadata.create_all(op.get_bind())
