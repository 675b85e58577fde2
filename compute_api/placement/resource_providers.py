# SPDX-License-Identifier: Apache-2.0
"""/resource_providers: the providers of hosts, and providers that operators create."""

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

#: Microversion of each link in the body of a provider.
_LINKS = {"inventories": 0, "usages": 0, "aggregates": 1, "traits": 6, "allocations": 11}
IN_TREES, ANSWERED, MAY_LEAVE = 14, 20, 37


def path(request: PlacementRequest, provider_uuid: str) -> str:
    """Return the URL path of a provider, for links in bodies."""
    return f"{request.prefix}/resource_providers/{provider_uuid}"


def view(request: PlacementRequest, row: ProviderRow) -> JsonObject:
    """Return a provider as the body contains it, with links and tree by microversion."""
    href = path(request, row.uuid)
    links = [
        {"rel": "self", "href": href},
        *(
            {"rel": part, "href": f"{href}/{part}"}
            for part, since in _LINKS.items()
            if request.version >= since
        ),
    ]
    body = {"uuid": row.uuid, "name": row.name, "generation": row.generation, "links": links}
    if request.version >= IN_TREES:
        body |= {"parent_provider_uuid": row.parent_uuid, "root_provider_uuid": row.root_uuid}
    return body


def index(request: PlacementRequest) -> ApiResponse:
    """Return the matching providers, with at most four SQL statements.

    Up to three statements check the classes and traits in the query.

    Raises:
        BadRequest: The query is invalid, or names an unknown trait or class.
    """
    values, version = request.query, request.version
    members = queries.members(values.get("member_of", []), version)
    required = queries.traits(values.get("required", []), version)
    tree, provider_uuid = request.query_value("in_tree"), request.query_value("uuid")
    filters = ProviderFilters(
        name=request.query_value("name"),
        uuid=provider_uuid and str(uuid.UUID(provider_uuid)),
        in_tree=tree and queries.tree(tree),
        member_of=members.required,
        not_member_of=members.forbidden,
        required=required.required,
        forbidden=required.forbidden,
        resources=queries.resources(values["resources"][-1]) if "resources" in values else {},
    )

    def find(tx: Connection) -> list[ProviderRow]:
        refuse_unknown(tx, filters)
        return provider_search.find(tx, filters)

    rows = request.read(find)
    return ApiResponse(
        {"resource_providers": [view(request, row) for row in rows]},
        modified=max((row.changed_at for row in rows), default=None),
    )


def refuse_unknown(tx: Connection, filters: ProviderFilters) -> None:
    """Check the traits and resource classes of a query, with at most three SQL statements.

    Raises:
        BadRequest: A trait or resource class does not exist.
    """
    queries.refuse_unknown("class", resource_classes.unknown(tx, filters.resources))
    names = frozenset().union(
        filters.forbidden, filters.root_forbidden, *filters.required, *filters.root_required
    )
    queries.refuse_unknown("trait", traits.unknown(tx, names))


def show(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Return a provider, with one SQL statement.

    Raises:
        NotFound: The provider does not exist.
    """
    row = request.read(providers.show, provider_uuid)
    return ApiResponse(view(request, row), modified=row.changed_at)


def create(request: PlacementRequest) -> ApiResponse:
    """Create a provider. Since 1.20 the response has a body.

    Raises:
        BadRequest: The parent does not exist, or is the provider itself.
        Conflict: The name or uuid is in use, or the parent is a host's provider.
        Unavailable: A concurrent request interfered. The client may repeat the request.
    """
    values = _normalize_uuids(request.body)
    row = request.make(
        providers.is_made,
        providers.create,
        values["name"],
        values.get("uuid"),
        values.get("parent_provider_uuid"),
    )
    headers = {"Location": request.base + path(request, row.uuid).removeprefix(request.prefix)}
    if request.version < ANSWERED:
        return ApiResponse(status=201, modified=row.changed_at, headers=headers)
    return ApiResponse(view(request, row), modified=row.changed_at, headers=headers)


def update(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Rename a provider, and move it below ``parent_provider_uuid`` if the body has this key.

    The parent None makes the provider the root of a tree.

    Raises:
        NotFound: The provider does not exist.
        BadRequest: The parent does not exist, or is the provider or below. Or the provider would
            leave its parent before 1.37.
        Conflict: The name is in use, the new parent belongs to a host, or the provider belongs to
            a host and its name or parent would change.
    """
    values = _normalize_uuids(request.body)

    def work(tx: Connection) -> ProviderRow:
        row = providers.lock(tx, provider_uuid)
        providers.rename(tx, row, values["name"])
        if "parent_provider_uuid" in values:
            providers.move(tx, row, values["parent_provider_uuid"], request.version >= MAY_LEAVE)
        return providers.show(tx, provider_uuid)

    row = request.write(work)
    return ApiResponse(view(request, row), modified=row.changed_at)


def delete(request: PlacementRequest, provider_uuid: str) -> None:
    """Delete a provider that an operator created.

    Raises:
        NotFound: The provider does not exist.
        Conflict: The provider belongs to a host, or has children or allocations.
    """
    request.write(providers.delete, provider_uuid)


def _normalize_uuids(body: JsonMapping) -> JsonObject:
    """Return the body with the values of keys that end with "uuid" in lower case with dashes."""
    return {
        name: str(uuid.UUID(value)) if name.endswith("uuid") and value is not None else value
        for name, value in body.items()
    }
