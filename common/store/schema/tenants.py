# SPDX-License-Identifier: Apache-2.0
"""Tables of projects, quotas, key pairs, flavors and server groups."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from common.store.schema.columns import (
    NUMBERED,
    BigKey,
    Json,
    JsonObjectColumn,
    metadata,
    time_column,
    uuid_column,
)

projects = Table(
    "projects",
    metadata,
    Column("id", String(64), primary_key=True),
    # Locked by every change of counted objects.
    Column("quota_seq", BigInteger, nullable=False, server_default="0"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("project_id", String(64), primary_key=True),  # '*' holds the class "default"
    Column("user_id", String(64), primary_key=True, server_default=""),
    Column("resource", String(64), primary_key=True),
    Column("hard_limit", Integer, nullable=False),
)

keypairs = Table(
    "keypairs",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("type", String(16), nullable=False, server_default="ssh"),
    Column("fingerprint", String(255), nullable=False),
    Column("public_key", Text, nullable=False),
    time_column("created_at", nullable=False),
    UniqueConstraint("user_id", "name"),
    **NUMBERED,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("project_id", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    # Digest of the body. The same key with another body is an error.
    Column("digest", String(64), nullable=False),
    Column("reservation_id", String(32), nullable=False),
    uuid_column("server_id", nullable=False),
    time_column("created_at", nullable=False),
)

# --- sizes ---
flavors = Table(
    "flavors",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    Column("flavorid", String(255), nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("root_gb", Integer, nullable=False),
    Column("ephemeral_gb", Integer, nullable=False, server_default="0"),
    Column("swap_mb", Integer, nullable=False, server_default="0"),
    Column("rxtx_factor", Float, nullable=False, server_default="1"),
    Column("is_public", Boolean, nullable=False),
    Column("description", Text),
    Column("extra_specs", Json, nullable=False),
    time_column("created_at", nullable=False),
    **NUMBERED,
)

flavor_access = Table(
    "flavor_access",
    metadata,
    Column("flavor_id", BigInteger, primary_key=True, autoincrement=False),
    Column("project_id", String(64), primary_key=True),
)

server_groups = Table(
    "server_groups",
    metadata,
    uuid_column("id", primary_key=True),
    Column("project_id", String(64), nullable=False, index=True),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("policy", String(32), nullable=False),
    Column("rules", JsonObjectColumn, nullable=False),
    time_column("created_at", nullable=False),
)

server_group_members = Table(
    "server_group_members",
    metadata,
    uuid_column("group_id", primary_key=True),
    uuid_column("server_id", primary_key=True),
    Index("ix_server_group_members_server", "server_id"),
)
