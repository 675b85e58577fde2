# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups at external services."""

from __future__ import annotations

from sqlalchemy import Column, Integer, String, Table, Text, UniqueConstraint

from common.store.schema.columns import NUMBERED, Json, metadata, time_column, uuid_column

cleanups = Table(
    "cleanups",
    metadata,
    Column("id", Integer, primary_key=True),
    # A kind in common.store.cleanups.
    Column("kind", String(16), nullable=False),
    # Id of the object at the external service.
    Column("target", String(64), nullable=False),
    # Depends on the kind: a host, a backup type, an address, a volume, or "".
    Column("place", String(255), nullable=False),
    # Further arguments of the cleanup.
    Column("args", Json, nullable=False),
    uuid_column("server_id", nullable=False),
    Column("project_id", String(64), nullable=False),
    # Reason of the cleanup, or of the latest failed try.
    Column("why", Text, nullable=False),
    Column("tries", Integer, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    # Time of the next try.
    time_column("due_at", nullable=False, index=True),
    UniqueConstraint("kind", "target", "place"),
    **NUMBERED,
)
