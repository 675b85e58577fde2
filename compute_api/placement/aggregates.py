# SPDX-License-Identifier: Apache-2.0
"""/resource_providers/UUID/aggregates.

A provider belongs to the aggregates that operators set here, and to the aggregates of its host.
"""

from __future__ import annotations

from common.domain import ids
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.placement import allocations, providers
from common.store.rows import ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.request import PlacementRequest

WITH_GENERATION = 19


def index(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Return the aggregates of a provider, with two SQL statements.

    Raises:
        NotFound: The provider does not exist.
    """

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.show(tx, provider_uuid)
        return provider, providers.aggregates_of(tx, [provider.id])[provider.id]

    return _view(request, *request.read(work))


def put(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Replace the aggregates that operators set for a provider, and return all aggregates.

    Aggregates of the provider's host stay. Since 1.19 the body contains the provider's generation.

    Raises:
        NotFound: The provider does not exist.
        Conflict: The provider has another generation than the body.
    """
    has_generation = request.version >= WITH_GENERATION
    uuids = [
        _normalize(item)
        for item in (request.body["aggregates"] if has_generation else request.body)
    ]

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.lock(
            tx,
            provider_uuid,
            request.body["resource_provider_generation"] if has_generation else None,
        )
        aggregates = providers.set_aggregates(tx, provider, uuids)
        allocations.touch(tx, [provider.id])
        return providers.show(tx, provider_uuid), aggregates

    return _view(request, *request.write(work))


def _normalize(item: str) -> str:
    """Return a uuid in lower case with dashes, or unchanged if in lower case without dashes."""
    dashed, bare = ids.spellings(item)
    return bare if item == bare else dashed


def _view(request: PlacementRequest, provider: ProviderRow, uuids: list[str]) -> ApiResponse:
    body: JsonObject = {"aggregates": uuids}
    if request.version >= WITH_GENERATION:
        body["resource_provider_generation"] = provider.generation
    return ApiResponse(body, modified=provider.changed_at)
