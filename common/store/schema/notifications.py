# SPDX-License-Identifier: Apache-2.0
"""The outbox of notifications, and the leases of duties, for example of its sender."""

from __future__ import annotations

from sqlalchemy import Column, String, Table

from common.store.schema.columns import NUMBERED, BigKey, Json, metadata, time_column

notifications = Table(  # the outbox: a row goes when a broker has it
    "notifications",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    Column("event", String(64), nullable=False),
    # Id of the object. Rows with the same key are sent in order.
    Column("key", String(255), nullable=False),
    Column("publisher", String(255), nullable=False),
    Column("body", Json, nullable=False),  # request, object, about
    time_column("created_at", nullable=False),
    **NUMBERED,
)

leases = Table(  # duties, each of a single process at a time
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    time_column("until", nullable=False),
)
