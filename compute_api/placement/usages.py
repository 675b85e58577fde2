# SPDX-License-Identifier: Apache-2.0
"""/usages and /resource_providers/UUID/usages: sums of allocations."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.placement import consumers, inventories, providers
from common.store.rows import ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.allocations import CONSUMER_TYPE, TYPES, type_of
from compute_api.placement.request import PlacementRequest

RULE = "placement:usages"


def of_provider(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Every class that the provider has; three statements."""

    def work(tx: Connection) -> tuple[ProviderRow, dict[str, int]]:
        provider = providers.show(tx, provider_uuid)
        used = {name: amount for (_, name), amount in inventories.usages(tx, [provider.id]).items()}
        return provider, dict.fromkeys(inventories.of(tx, [provider.id])[provider.id], 0) | used

    provider, used = request.read(work)
    return ApiResponse(
        {"resource_provider_generation": provider.generation, "usages": used},
        modified=provider.changed_at,
    )


def index(request: PlacementRequest) -> ApiResponse:
    """Of a project, and in it of a user; one statement, since 1.38 two: then by type of
    consumers."""
    project, user = str(request.first("project_id")), request.first("user_id")
    request.require(RULE, {"project_id": project})
    if request.version < CONSUMER_TYPE:
        used: dict[str, int] = {}
        for row in request.read(consumers.totals, project, user):
            used[row.resource_class] = used.get(row.resource_class, 0) + int(row.used)
        return ApiResponse({"usages": used})
    asked = request.first("consumer_type")
    kind = (
        None
        if asked in (None, "all")
        else next((key for key, name in TYPES.items() if name == asked), str(asked))
    )
    rows, counts = request.read(
        lambda tx: (
            consumers.totals(tx, project, user, kind),
            consumers.counts(tx, project, user, kind),
        )
    )
    found: dict[str, JsonObject] = {}
    for row in rows:
        key = "all" if asked == "all" else type_of(row.type)
        entry = found.setdefault(key, {})
        entry[row.resource_class] = entry.get(row.resource_class, 0) + int(row.used)
    for held_by, number in counts.items():
        entry = found.setdefault("all" if asked == "all" else type_of(held_by), {})
        entry["consumer_count"] = entry.get("consumer_count", 0) + number
    return ApiResponse({"usages": found})
