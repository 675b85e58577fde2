# SPDX-License-Identifier: Apache-2.0
"""/resource_providers/UUID/aggregates: which groups a provider is in: those set by hand, and those of its host."""
from __future__ import annotations

from typing import Any

from common import ids
from common.store import allocations, providers
from common.store.engine import Connection, Row
from compute_api.placement_service.request import Answer, Request

WITH_GENERATION = 19


def index(request: Request, provider_uuid: str) -> Answer:
    """Two statements."""
    def work(tx: Connection) -> tuple[Row[Any], list[str]]:
        provider = providers.show(tx, provider_uuid)
        return provider, providers.aggregates_of(tx, [provider.id])[provider.id]
    return _view(request, *request.read(work))


def put(request: Request, provider_uuid: str) -> Answer:
    """These by hand, spelled as they were; a host's stay. Since 1.19 with a generation."""
    strict = request.version >= WITH_GENERATION
    wanted = [_usual(item) for item in (request.body["aggregates"] if strict else request.body)]

    def work(tx: Connection) -> tuple[Row[Any], list[str]]:
        provider = providers.lock(tx, provider_uuid, request.body["resource_provider_generation"] if strict else None)
        found = providers.set_aggregates(tx, provider, wanted)
        allocations.touch(tx, [provider.id])
        return providers.show(tx, provider_uuid), found
    return _view(request, *request.write(work))


def _usual(item: str) -> str:
    """With or without dashes; odd ones go, and capitals."""
    dashed, bare = ids.spellings(item)
    return bare if item == bare else dashed


def _view(request: Request, provider: Row[Any], found: list[str]) -> Answer:
    body: dict[str, Any] = {"aggregates": found}
    if request.version >= WITH_GENERATION:
        body["resource_provider_generation"] = provider.generation
    return Answer(body, modified=provider.changed_at)
