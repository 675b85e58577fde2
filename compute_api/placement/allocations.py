# SPDX-License-Identifier: Apache-2.0
"""/allocations: read-only, because only the conductor's claim writes allocations."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.placement import consumers, providers
from common.store.rows import ProviderAllocation, ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.request import PlacementRequest

OWNERS, CONSUMER_GENERATION, CONSUMER_TYPE = 12, 28, 38
#: Placement's name of each consumer type.
TYPES = {"server": "INSTANCE", "migration": "MIGRATION"}


def show(request: PlacementRequest, consumer_uuid: str) -> ApiResponse:
    """Return the allocations of a consumer, with one SQL statement.

    For an unknown consumer the object ``allocations`` is empty, which is no error.
    """
    rows = request.read(consumers.of_consumer, consumer_uuid)
    allocations: dict[str, JsonObject] = {}
    for row in rows:
        allocations.setdefault(row.uuid, {"generation": row.generation, "resources": {}})[
            "resources"
        ][row.resource_class] = row.used
    body: JsonObject = {"allocations": allocations}
    if rows and request.version >= OWNERS:
        body |= {"project_id": rows[0].project_id, "user_id": rows[0].user_id}
    if rows and request.version >= CONSUMER_GENERATION:
        body["consumer_generation"] = rows[0].consumer_generation
    if rows and request.version >= CONSUMER_TYPE:
        body["consumer_type"] = type_of(rows[0].type)
    return ApiResponse(body, modified=rows[0].created_at if rows else None)


def of_provider(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Return the allocations of a provider, with two SQL statements.

    Raises:
        NotFound: The provider does not exist.
    """

    def work(tx: Connection) -> tuple[ProviderRow, list[ProviderAllocation]]:
        provider = providers.show(tx, provider_uuid)
        return provider, consumers.of_provider(tx, provider.id)

    provider, rows = request.read(work)
    allocations: dict[str, JsonObject] = {}
    for row in rows:
        entry = allocations.setdefault(row.consumer_id, {"resources": {}})
        entry["resources"][row.resource_class] = row.used
        if request.version >= CONSUMER_GENERATION:
            entry["consumer_generation"] = row.consumer_generation
    return ApiResponse(
        {"allocations": allocations, "resource_provider_generation": provider.generation},
        modified=provider.changed_at,
    )


def type_of(kind: str) -> str:
    """Return Placement's name of a consumer type, or the type itself if Placement has no name."""
    return TYPES.get(kind, kind)


def refuse(request: PlacementRequest, **params: str) -> None:
    """Refuse every request that would change allocations.

    Raises:
        Forbidden: Always.
    """
    raise errors.Forbidden(
        "Clients cannot change allocations. Kilonova writes them when servers are placed and moved; "
        "change the server instead."
    )
