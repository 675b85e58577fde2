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
    """Return the generation of a provider and its usage by resource class, in three SQL statements.

    An unused class of the inventories has the usage 0.

    Raises:
        NotFound: The provider does not exist.
    """

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
    """Return the usage of a project, or of a user in a project, by resource class.

    Since 1.38 the usage is grouped by consumer type, with the number of consumers, which takes two
    SQL statements instead of one. The parameter ``consumer_type`` selects one type, or with "all"
    puts all types in one group.

    Raises:
        Forbidden: The policy does not permit the caller to read this project's usage.
    """
    project, user = str(request.query_value("project_id")), request.query_value("user_id")
    request.require(RULE, {"project_id": project})
    if request.version < CONSUMER_TYPE:
        used: dict[str, int] = {}
        for row in request.read(consumers.totals, project, user):
            used[row.resource_class] = used.get(row.resource_class, 0) + int(row.used)
        return ApiResponse({"usages": used})
    requested_type = request.query_value("consumer_type")
    stored_type = (
        None
        if requested_type in (None, "all")
        else next(
            (key for key, name in TYPES.items() if name == requested_type), str(requested_type)
        )
    )
    rows, counts = request.read(
        lambda tx: (
            consumers.totals(tx, project, user, stored_type),
            consumers.counts(tx, project, user, stored_type),
        )
    )
    usages: dict[str, JsonObject] = {}
    for row in rows:
        key = "all" if requested_type == "all" else type_of(row.type)
        entry = usages.setdefault(key, {})
        entry[row.resource_class] = entry.get(row.resource_class, 0) + int(row.used)
    for type_name, number in counts.items():
        entry = usages.setdefault("all" if requested_type == "all" else type_of(type_name), {})
        entry["consumer_count"] = entry.get("consumer_count", 0) + number
    return ApiResponse({"usages": usages})
