# SPDX-License-Identifier: Apache-2.0
"""Aggregates in responses. The argument ``view`` of fields is the list of the aggregate's hosts."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.store.hosts.aggregates import ZONE
from common.store.rows import AggregateRow
from compute_api.compute.views.fields import Field, render_readable, visible_fields
from compute_api.compute.views.times import format_micros

#: Fields of the response to a create, in which the aggregate has no hosts and no metadata yet.
NEW: tuple[Field, ...] = (
    Field("id", "id"),
    Field("name", "name"),
    Field(ZONE, lambda row, view: row.meta.get(ZONE)),
    Field("created_at", lambda row, view: format_micros(row.created_at)),
    Field("updated_at", lambda row, view: format_micros(row.updated_at)),
    Field("deleted", lambda row, view: False),
    Field("deleted_at", lambda row, view: None),
    Field("uuid", "uuid", since="2.41"),
)
FIELDS: tuple[Field, ...] = (
    *NEW,
    Field("hosts", lambda row, view: view),
    Field("metadata", "meta"),
)


def one(
    row: AggregateRow, hosts: list[str], version: int, fields: tuple[Field, ...] = FIELDS
) -> JsonObject:
    """Return the body of a single aggregate.

    Args:
        row: The aggregate.
        hosts: Names of the hosts of the aggregate.
        version: The microversion of the request.
        fields: The fields of the body, ``NEW`` for the response to a create.
    """
    return {"aggregate": render_readable(visible_fields(fields, version), row, hosts)}


def many(rows: list[AggregateRow], hosts: dict[int, list[str]], version: int) -> JsonObject:
    """Return the body of the list of aggregates.

    Args:
        rows: The aggregates.
        hosts: Number of each aggregate -> names of its hosts.
        version: The microversion of the request.
    """
    getters = visible_fields(FIELDS, version)
    return {"aggregates": [render_readable(getters, row, hosts[row.id]) for row in rows]}
