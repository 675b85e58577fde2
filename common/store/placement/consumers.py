# SPDX-License-Identifier: Apache-2.0
"""Queries of allocations by consumer, provider and project, for the placement service.

Only ``allocations`` writes.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.rows import ConsumerAllocation, Holding, ProviderAllocation
from common.store.schema import allocations, consumers, providers


def of_consumer(tx: Connection, consumer: str) -> list[ConsumerAllocation]:
    """Return a consumer's allocations, sorted by provider and resource class, in one statement.

    The rows contain the provider's uuid and generation, and the consumer's columns. The list is
    empty for an unknown consumer.
    """
    return list(
        tx.execute(
            sa.select(
                allocations.c.resource_class,
                allocations.c.used,
                providers.c.uuid,
                providers.c.generation,
                consumers.c.project_id,
                consumers.c.user_id,
                consumers.c.type,
                consumers.c.created_at,
                consumers.c.generation.label("consumer_generation"),
            )
            .select_from(
                allocations.join(providers, providers.c.id == allocations.c.provider_id).join(
                    consumers, consumers.c.id == allocations.c.consumer_id
                )
            )
            .where(allocations.c.consumer_id == consumer)
            .order_by(providers.c.id, allocations.c.resource_class)
        )
    )


def of_provider(tx: Connection, provider_id: int) -> list[ProviderAllocation]:
    """Return a provider's allocations, sorted by consumer and resource class, in one statement."""
    return list(
        tx.execute(
            sa.select(
                allocations.c.consumer_id,
                allocations.c.resource_class,
                allocations.c.used,
                consumers.c.created_at,
                consumers.c.generation.label("consumer_generation"),
            )
            .select_from(allocations.join(consumers, consumers.c.id == allocations.c.consumer_id))
            .where(allocations.c.provider_id == provider_id)
            .order_by(allocations.c.consumer_id, allocations.c.resource_class)
        )
    )


def totals(
    tx: Connection, project_id: str, user_id: str | None = None, kind: str | None = None
) -> list[Holding]:
    """Return a project's usage per type of consumer and resource class, in one statement.

    ``user_id`` and ``kind`` (a type of consumer) restrict the consumers. None: all.
    """
    query = sa.select(
        consumers.c.type,
        allocations.c.resource_class,
        sa.func.sum(allocations.c.used).label("used"),
    )
    return list(
        tx.execute(
            _filter_holder(query, project_id, user_id, kind).group_by(
                consumers.c.type, allocations.c.resource_class
            )
        )
    )


def counts(
    tx: Connection, project_id: str, user_id: str | None = None, kind: str | None = None
) -> dict[str, int]:
    """Return type -> number of a project's consumers with allocations, in one statement.

    ``user_id`` and ``kind`` (a type of consumer) restrict the consumers. None: all.
    """
    query = sa.select(consumers.c.type, sa.func.count(consumers.c.id.distinct()).label("number"))
    return {
        row.type: row.number
        for row in tx.execute(
            _filter_holder(query, project_id, user_id, kind).group_by(consumers.c.type)
        )
    }


def _filter_holder(
    query: sa.Select[Any], project_id: str, user_id: str | None, kind: str | None
) -> sa.Select[Any]:
    query = query.select_from(
        allocations.join(consumers, consumers.c.id == allocations.c.consumer_id)
    ).where(consumers.c.project_id == project_id)
    if user_id is not None:
        query = query.where(consumers.c.user_id == user_id)
    return query if kind is None else query.where(consumers.c.type == kind)
