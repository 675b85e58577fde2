# SPDX-License-Identifier: Apache-2.0
"""Tables of resource providers, inventories and allocations."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table

from common.store.schema.columns import NUMBERED, BigKey, metadata, time_column, uuid_column

providers = Table(
    "providers",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    uuid_column("uuid", nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    # NULL: an operator's provider.
    Column("host", String(255), unique=True),
    uuid_column("parent_uuid"),
    uuid_column("root_uuid", nullable=False, index=True),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    # Also set by changes of the service or the aggregates.
    time_column("changed_at", nullable=False),
    # Failed builds in a row.
    Column("failures", Integer, nullable=False, server_default="0"),
    # Time of the last failure or the last trial since.
    time_column("failed_at"),
    Index("ix_providers_changed", "changed_at"),
    **NUMBERED,
)

inventories = Table(
    "inventories",
    metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("resource_class", String(255), primary_key=True),
    Column("total", Integer, nullable=False),
    Column("reserved", Integer, nullable=False, server_default="0"),
    Column("min_unit", Integer, nullable=False, server_default="1"),
    Column("max_unit", Integer, nullable=False, server_default="2147483647"),
    Column("step_size", Integer, nullable=False, server_default="1"),
    Column("allocation_ratio", Double, nullable=False, server_default="1"),
    # Origins of reserved and allocation_ratio: an operator's value, else aggregates, else the host.
    # Reported by the host. NULL: an operator's class.
    Column("host_reserved", Integer),
    Column("host_ratio", Double),
    # Set by an operator.
    Column("set_reserved", Integer),
    Column("set_ratio", Double),
    # The usage at the moment when the capacity was reduced to less.
    Column("excess", Integer, nullable=False, server_default="0"),
)

provider_traits = Table(
    "provider_traits",
    metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("trait", String(255), primary_key=True),
    # False: reported by the host or its service.
    Column("by_hand", Boolean, nullable=False, server_default="0"),
)

provider_aggregates = Table(  # set by hand; hosts' aggregates come on top
    "provider_aggregates",
    metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    uuid_column("aggregate_uuid", primary_key=True),
    Index("ix_provider_aggregates_aggregate", "aggregate_uuid"),
)

resource_classes = Table(  # CUSTOM_* only, the others are standard
    "resource_classes",
    metadata,
    Column("name", String(255), primary_key=True),
    time_column("created_at", nullable=False),
)

traits = Table(  # CUSTOM_* only
    "traits",
    metadata,
    Column("name", String(255), primary_key=True),
    time_column("created_at", nullable=False),
)

consumers = Table(
    "consumers",
    metadata,
    uuid_column("id", primary_key=True),  # a server, or a migration
    Column("type", String(16), nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
)

allocations = Table(
    "allocations",
    metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("consumer_id", String(36), primary_key=True),
    Column("resource_class", String(255), primary_key=True),
    Column("used", Integer, nullable=False),
    Index("ix_allocations_usage", "provider_id", "resource_class", "used"),
    Index("ix_allocations_consumer", "consumer_id"),
)
