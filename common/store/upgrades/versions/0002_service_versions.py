# SPDX-License-Identifier: Apache-2.0
"""Services have the version of their code."""

from alembic import op
from sqlalchemy import Column, String

from common.store.upgrades.steps import add_column

revision = "0002"
down_revision = "0001"
USABLE_FROM = "0001"


def upgrade() -> None:
    """Add ``services.version``."""
    add_column(op, "services", Column("version", String(64)))
