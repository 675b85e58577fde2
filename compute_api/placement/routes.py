# SPDX-License-Identifier: Apache-2.0
"""The routes of the placement service.

Each row is one operation with its microversions, policy rule and schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.domain.json_types import JsonObject
from compute_api.http.routing import ApiRoute
from compute_api.placement import (
    aggregates,
    allocation_candidates,
    allocations,
    inventories,
    microversions,
    resource_classes,
    resource_providers,
    schemas,
    traits,
    usages,
)
from compute_api.placement.request import PlacementRequest


def _show_versions(request: PlacementRequest) -> JsonObject:
    return {
        "versions": [
            {
                "id": "v1.0",
                "min_version": microversions.text(microversions.MIN),
                "status": "CURRENT",
                "max_version": microversions.text(microversions.MAX),
                "links": [{"rel": "self", "href": ""}],
            }
        ]
    }


@dataclass(frozen=True, slots=True)
class PlacementRoute(ApiRoute):
    """One operation of the placement service."""

    body: schemas.PlacementSchema | None = None
    query: schemas.PlacementSchema = schemas.NOTHING
    #: Since 1.15, successful responses have the headers Last-Modified and Cache-Control.
    cached: bool = True
    #: The operation needs no token.
    is_public: bool = False


_P, _RP = "placement:", "/resource_providers/{provider_uuid}"
_ONE = _RP + "/inventories/{resource_class}"


def _delete(
    path: str, handler: Callable[..., Any], rule: str, since: str = "1.0"
) -> PlacementRoute:
    return PlacementRoute("DELETE", path, handler, rule, since, success=204, cached=False)


def _refuse(method: str, path: str, rule: str, since: str = "1.0") -> PlacementRoute:
    return PlacementRoute(
        method,
        path,
        allocations.refuse,
        rule,
        since,
        query=schemas.ANYTHING,
        cached=False,
        body=None if method == "DELETE" else schemas.ANYTHING,
    )


ROUTES: tuple[PlacementRoute, ...] = (
    PlacementRoute("GET", "/", _show_versions, "", query=schemas.ANYTHING, is_public=True),
    PlacementRoute(
        "GET",
        "/resource_providers",
        resource_providers.index,
        _P + "resource_providers:list",
        query=schemas.LIST_PROVIDERS,
    ),
    PlacementRoute(
        "POST",
        "/resource_providers",
        resource_providers.create,
        _P + "resource_providers:create",
        body=schemas.CREATE_PROVIDER,
    ),
    PlacementRoute("GET", _RP, resource_providers.show, _P + "resource_providers:show"),
    PlacementRoute(
        "PUT",
        _RP,
        resource_providers.update,
        _P + "resource_providers:update",
        body=schemas.UPDATE_PROVIDER,
    ),
    _delete(_RP, resource_providers.delete, _P + "resource_providers:delete"),
    PlacementRoute(
        "GET", _RP + "/inventories", inventories.index, _P + "resource_providers:inventories:list"
    ),
    PlacementRoute(
        "POST",
        _RP + "/inventories",
        inventories.add,
        _P + "resource_providers:inventories:create",
        body=schemas.ADD_INVENTORY,
    ),
    PlacementRoute(
        "PUT",
        _RP + "/inventories",
        inventories.put_all,
        _P + "resource_providers:inventories:update",
        body=schemas.PUT_INVENTORIES,
    ),
    _delete(
        _RP + "/inventories",
        inventories.delete_all,
        _P + "resource_providers:inventories:delete",
        "1.5",
    ),
    PlacementRoute("GET", _ONE, inventories.show, _P + "resource_providers:inventories:show"),
    PlacementRoute(
        "PUT",
        _ONE,
        inventories.put,
        _P + "resource_providers:inventories:update",
        body=schemas.PUT_INVENTORY,
    ),
    _delete(_ONE, inventories.delete, _P + "resource_providers:inventories:delete"),
    PlacementRoute("GET", _RP + "/usages", usages.of_provider, _P + "resource_providers:usages"),
    PlacementRoute(
        "GET",
        _RP + "/aggregates",
        aggregates.index,
        _P + "resource_providers:aggregates:list",
        "1.1",
    ),
    PlacementRoute(
        "PUT",
        _RP + "/aggregates",
        aggregates.put,
        _P + "resource_providers:aggregates:update",
        "1.1",
        body=schemas.PUT_AGGREGATES,
    ),
    PlacementRoute(
        "GET", _RP + "/traits", traits.of_provider, _P + "resource_providers:traits:list", "1.6"
    ),
    PlacementRoute(
        "PUT",
        _RP + "/traits",
        traits.put,
        _P + "resource_providers:traits:update",
        "1.6",
        body=schemas.PUT_TRAITS,
    ),
    _delete(_RP + "/traits", traits.clear, _P + "resource_providers:traits:delete", "1.6"),
    PlacementRoute(
        "GET",
        _RP + "/allocations",
        allocations.of_provider,
        _P + "resource_providers:allocations:list",
    ),
    PlacementRoute(
        "GET", "/resource_classes", resource_classes.index, _P + "resource_classes:list", "1.2"
    ),
    PlacementRoute(
        "POST",
        "/resource_classes",
        resource_classes.create,
        _P + "resource_classes:create",
        "1.2",
        body=schemas.CLASS,
        success=201,
        cached=False,
    ),
    PlacementRoute(
        "GET",
        "/resource_classes/{name}",
        resource_classes.show,
        _P + "resource_classes:show",
        "1.2",
    ),
    PlacementRoute(
        "PUT",
        "/resource_classes/{name}",
        resource_classes.rename,
        _P + "resource_classes:update",
        "1.2",
        "1.6",
        body=schemas.CLASS,
    ),
    PlacementRoute(
        "PUT",
        "/resource_classes/{name}",
        resource_classes.ensure,
        _P + "resource_classes:update",
        "1.7",
        success=201,
        cached=False,
    ),
    _delete(
        "/resource_classes/{name}", resource_classes.delete, _P + "resource_classes:delete", "1.2"
    ),
    PlacementRoute(
        "GET", "/traits", traits.index, _P + "traits:list", "1.6", query=schemas.LIST_TRAITS
    ),
    PlacementRoute("GET", "/traits/{name}", traits.show, _P + "traits:show", "1.6", success=204),
    PlacementRoute("PUT", "/traits/{name}", traits.create, _P + "traits:update", "1.6"),
    _delete("/traits/{name}", traits.delete, _P + "traits:delete", "1.6"),
    PlacementRoute("GET", "/usages", usages.index, "", "1.9", query=schemas.USAGES),
    PlacementRoute(
        "GET",
        "/allocation_candidates",
        allocation_candidates.index,
        _P + "allocation_candidates:list",
        "1.10",
        query=schemas.CANDIDATES,
    ),
    PlacementRoute(
        "GET", "/allocations/{consumer_uuid}", allocations.show, _P + "allocations:list"
    ),
    _refuse("POST", "/allocations", _P + "allocations:manage", "1.13"),
    _refuse("PUT", "/allocations/{consumer_uuid}", _P + "allocations:update"),
    _refuse("DELETE", "/allocations/{consumer_uuid}", _P + "allocations:delete"),
    _refuse("POST", "/reshaper", _P + "reshaper:reshape", "1.30"),
)


#: Paths where an operation of a later microversion gets 405 instead of 404.
OLD_PATHS = frozenset((_RP + "/inventories",))
