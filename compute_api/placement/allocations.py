# SPDX-License-Identifier: Apache-2.0
"""/allocations: read only, since only the conductor's claim writes allocations."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.placement import consumers, providers
from common.store.rows import ProviderAllocation, ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.request import PlacementRequest

OWNERS, CONSUMER_GENERATION, CONSUMER_TYPE = 12, 28, 38
#: Types of consumers, as the API's users know them.
TYPES = {"server": "INSTANCE", "migration": "MIGRATION"}


def show(request: PlacementRequest, consumer_uuid: str) -> ApiResponse:
    """What a consumer holds; one statement. Nothing, for one that is not known."""
    rows = request.read(consumers.of_consumer, consumer_uuid)
    held: dict[str, JsonObject] = {}
    for row in rows:
        held.setdefault(row.uuid, {"generation": row.generation, "resources": {}})["resources"][
            row.resource_class
        ] = row.used
    body: JsonObject = {"allocations": held}
    if rows and request.version >= OWNERS:
        body |= {"project_id": rows[0].project_id, "user_id": rows[0].user_id}
    if rows and request.version >= CONSUMER_GENERATION:
        body["consumer_generation"] = rows[0].consumer_generation
    if rows and request.version >= CONSUMER_TYPE:
        body["consumer_type"] = type_of(rows[0].type)
    return ApiResponse(body, modified=rows[0].created_at if rows else None)


def of_provider(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """What is held of a provider; two statements."""

    def work(tx: Connection) -> tuple[ProviderRow, list[ProviderAllocation]]:
        provider = providers.show(tx, provider_uuid)
        return provider, consumers.of_provider(tx, provider.id)

    provider, rows = request.read(work)
    held: dict[str, JsonObject] = {}
    for row in rows:
        entry = held.setdefault(row.consumer_id, {"resources": {}})
        entry["resources"][row.resource_class] = row.used
        if request.version >= CONSUMER_GENERATION:
            entry["consumer_generation"] = row.consumer_generation
    return ApiResponse(
        {"allocations": held, "resource_provider_generation": provider.generation},
        modified=provider.changed_at,
    )


def type_of(kind: str) -> str:
    """A type of consumers, as the API's users know it."""
    return TYPES.get(kind, kind)


def refuse(request: PlacementRequest, **params: str) -> None:
    """Every way to write."""
    raise errors.Forbidden(
        "Allocations are written by Kilonova's own claim alone, when servers are placed and moved; "
        "they cannot be changed from outside. Change the server instead."
    )
