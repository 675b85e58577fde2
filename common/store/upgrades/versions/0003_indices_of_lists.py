# SPDX-License-Identifier: Apache-2.0
"""Lists of the servers of all projects have an index for each frequent filter."""

from alembic import op

from common.store.upgrades.steps import add_index

revision = "0003"
down_revision = "0002"
USABLE_FROM = "0001"


def upgrade() -> None:
    """Add four indices of ``servers``."""
    for name, column in (
        ("ix_servers_user", "user_id"),
        ("ix_servers_image", "image_id"),
        ("ix_servers_flavor", "flavor_id"),
        ("ix_servers_state", "vm_state"),
    ):
        add_index(op, "servers", name, [column, "deleted", "created_at", "id"])
