# SPDX-License-Identifier: Apache-2.0
"""/resource_providers: every provider, and those that operators make by hand."""

from __future__ import annotations

import uuid

from common.domain.json_types import JsonMapping, JsonObject
from common.store.engine import Connection
from common.store.placement import provider_search, providers, resource_classes, traits
from common.store.placement.provider_search import ProviderFilters
from common.store.rows import ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement import queries
from compute_api.placement.request import PlacementRequest

#: Since when a provider shows the way to each of its parts.
_LINKS = {"inventories": 0, "usages": 0, "aggregates": 1, "traits": 6, "allocations": 11}
IN_TREES, ANSWERED, MAY_LEAVE = 14, 20, 37


def path(request: PlacementRequest, provider_uuid: str) -> str:
    """Where a provider is, as bodies say it."""
    return f"{request.prefix}/resource_providers/{provider_uuid}"


def view(request: PlacementRequest, row: ProviderRow) -> JsonObject:
    """One provider as a body."""
    place = path(request, row.uuid)
    links = [
        {"rel": "self", "href": place},
        *(
            {"rel": part, "href": f"{place}/{part}"}
            for part, since in _LINKS.items()
            if request.version >= since
        ),
    ]
    body = {"uuid": row.uuid, "name": row.name, "generation": row.generation, "links": links}
    if request.version >= IN_TREES:
        body |= {"parent_provider_uuid": row.parent_uuid, "root_provider_uuid": row.root_uuid}
    return body


def index(request: PlacementRequest) -> ApiResponse:
    """At most four statements: are the classes and traits known, and the list."""
    values, version = request.query, request.version
    members = queries.members(values.get("member_of", []), version)
    required = queries.traits(values.get("required", []), version)
    tree, wanted_uuid = request.first("in_tree"), request.first("uuid")
    wanted = ProviderFilters(
        name=request.first("name"),
        uuid=wanted_uuid and str(uuid.UUID(wanted_uuid)),
        in_tree=tree and queries.tree(tree),
        member_of=members.wanted,
        not_member_of=members.unwanted,
        required=required.wanted,
        forbidden=required.unwanted,
        resources=queries.resources(values["resources"][-1]) if "resources" in values else {},
    )

    def find(tx: Connection) -> list[ProviderRow]:
        refuse_unknown(tx, wanted)
        return provider_search.find(tx, wanted)

    rows = request.read(find)
    return ApiResponse(
        {"resource_providers": [view(request, row) for row in rows]},
        modified=max((row.changed_at for row in rows), default=None),
    )


def refuse_unknown(tx: Connection, wanted: ProviderFilters) -> None:
    """Raises BadRequest for traits and classes that there are none of; at most three statements."""
    queries.refuse_unknown("class", resource_classes.unknown(tx, wanted.resources))
    names = frozenset().union(
        wanted.forbidden, wanted.root_forbidden, *wanted.required, *wanted.root_required
    )
    queries.refuse_unknown("trait", traits.unknown(tx, names))


def show(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """One statement."""
    row = request.read(providers.show, provider_uuid)
    return ApiResponse(view(request, row), modified=row.changed_at)


def create(request: PlacementRequest) -> ApiResponse:
    """Since 1.20 the answer has a body."""
    wanted = _plain(request.body)
    row = request.make(
        providers.is_made,
        providers.create,
        wanted["name"],
        wanted.get("uuid"),
        wanted.get("parent_provider_uuid"),
    )
    where = {"Location": request.base + path(request, row.uuid).removeprefix(request.prefix)}
    if request.version < ANSWERED:
        return ApiResponse(status=201, modified=row.changed_at, headers=where)
    return ApiResponse(view(request, row), modified=row.changed_at, headers=where)


def update(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Another name, and with parent_provider_uuid another place."""
    wanted = _plain(request.body)

    def work(tx: Connection) -> ProviderRow:
        row = providers.lock(tx, provider_uuid)
        providers.rename(tx, row, wanted["name"])
        if "parent_provider_uuid" in wanted:
            providers.move(tx, row, wanted["parent_provider_uuid"], request.version >= MAY_LEAVE)
        return providers.show(tx, provider_uuid)

    row = request.write(work)
    return ApiResponse(view(request, row), modified=row.changed_at)


def delete(request: PlacementRequest, provider_uuid: str) -> None:
    """Only of a provider made by hand."""
    request.write(providers.delete, provider_uuid)


def _plain(body: JsonMapping) -> JsonObject:
    """The body with its uuids written in the one way."""
    return {
        name: str(uuid.UUID(value)) if name.endswith("uuid") and value is not None else value
        for name, value in body.items()
    }
