# SPDX-License-Identifier: Apache-2.0
"""/resource_providers/UUID/aggregates: those set by hand, and those of the provider's host."""

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
    """Two statements."""

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.show(tx, provider_uuid)
        return provider, providers.aggregates_of(tx, [provider.id])[provider.id]

    return _view(request, *request.read(work))


def put(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """These by hand, spelled as they were; a host's stay. Since 1.19 with a generation."""
    strict = request.version >= WITH_GENERATION
    wanted = [_usual(item) for item in (request.body["aggregates"] if strict else request.body)]

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.lock(
            tx, provider_uuid, request.body["resource_provider_generation"] if strict else None
        )
        found = providers.set_aggregates(tx, provider, wanted)
        allocations.touch(tx, [provider.id])
        return providers.show(tx, provider_uuid), found

    return _view(request, *request.write(work))


def _usual(item: str) -> str:
    """With or without dashes; odd ones go, and capitals."""
    dashed, bare = ids.spellings(item)
    return bare if item == bare else dashed


def _view(request: PlacementRequest, provider: ProviderRow, found: list[str]) -> ApiResponse:
    body: JsonObject = {"aggregates": found}
    if request.version >= WITH_GENERATION:
        body["resource_provider_generation"] = provider.generation
    return ApiResponse(body, modified=provider.changed_at)
