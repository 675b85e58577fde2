# SPDX-License-Identifier: Apache-2.0
"""Placement: what hosts can do, what is set by hand, bad hosts, and what a guest holds of its
host's parts."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"

_JSON = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Add columns and tables; providers need no host any more."""
    with op.batch_alter_table("providers") as providers:
        providers.alter_column("host", existing_type=sa.String(255), nullable=True)
        providers.add_column(
            sa.Column("failures", sa.Integer(), nullable=False, server_default="0")
        )
        providers.add_column(sa.Column("failed_at", sa.BigInteger()))
    op.create_index("ix_providers_root_uuid", "providers", ["root_uuid"])
    for name in ("host_reserved", "set_reserved"):
        op.add_column("inventories", sa.Column(name, sa.Integer()))
    for name in ("host_ratio", "set_ratio"):
        op.add_column("inventories", sa.Column(name, sa.Double()))
    with op.batch_alter_table("inventories") as inventories:
        inventories.alter_column(
            "allocation_ratio",
            existing_type=sa.Float(),
            type_=sa.Double(),
            existing_nullable=False,
            existing_server_default="1",
        )
    if op.get_bind().dialect.name in ("mysql", "mariadb"):  # whose Float had seven digits
        op.execute("UPDATE inventories SET allocation_ratio = ROUND(allocation_ratio, 5)")
    op.add_column(
        "inventories", sa.Column("excess", sa.Integer(), nullable=False, server_default="0")
    )
    stock = sa.table(
        "inventories",
        *map(sa.column, ("host_reserved", "host_ratio", "reserved", "allocation_ratio")),
    )
    op.execute(
        stock.update().values(host_reserved=stock.c.reserved, host_ratio=stock.c.allocation_ratio)
    )
    op.add_column(
        "provider_traits", sa.Column("by_hand", sa.Boolean(), nullable=False, server_default="0")
    )
    op.add_column("guests", sa.Column("fitting", _JSON))
    for name in ("cells", "devices", "facts", "metrics"):
        op.add_column("hosts", sa.Column(name, _JSON))
    op.add_column("hosts", sa.Column("metrics_at", sa.BigInteger()))
    op.create_index("ix_actions_state", "actions", ["state", "host"])
    _tables()


def _tables() -> None:
    op.create_table(
        "host_images",
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("image_id", sa.String(36), nullable=False),
        sa.Column("image", _JSON, nullable=False),
        sa.Column("asked_at", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger()),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("host", "image_id", name="pk_host_images"),
    )
    op.create_table(
        "provider_aggregates",
        sa.Column("provider_id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("aggregate_uuid", sa.String(36), nullable=False),
        sa.PrimaryKeyConstraint("provider_id", "aggregate_uuid", name="pk_provider_aggregates"),
    )
    op.create_index("ix_provider_aggregates_aggregate", "provider_aggregates", ["aggregate_uuid"])
    for name in ("resource_classes", "traits"):
        op.create_table(
            name,
            sa.Column("name", sa.String(255), nullable=False),
            sa.Column("created_at", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("name", name=f"pk_{name}"),
        )
