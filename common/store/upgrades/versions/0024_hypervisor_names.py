# SPDX-License-Identifier: Apache-2.0
"""Hosts: find the host that has the name of a hypervisor, and keep the name that was refused."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    """Add the column and the index."""
    op.add_column("hosts", sa.Column("refused_hostname", sa.String(255)))
    op.create_index("ix_hosts_hypervisor_hostname", "hosts", ["hypervisor_hostname"])
