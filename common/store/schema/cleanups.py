# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups at external services."""

from __future__ import annotations

from sqlalchemy import Column, Integer, String, Table, Text, UniqueConstraint

from common.store.schema.columns import NUMBERED, Json, metadata, time_column, uuid_column

cleanups = Table(
    "cleanups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),  # as store.cleanups names them
    Column("target", String(64), nullable=False),  # id of what it is about, at the neighbour
    # Depends on the kind: a host, a backup type, an address, or "".
    Column("place", String(255), nullable=False),
    Column("args", Json, nullable=False),  # what else the cleanup must know
    uuid_column("server_id", nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("why", Text, nullable=False),  # what the neighbour said last
    Column("tries", Integer, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    time_column("due_at", nullable=False, index=True),  # of the next try
    UniqueConstraint("kind", "target", "place"),
    **NUMBERED,
)
