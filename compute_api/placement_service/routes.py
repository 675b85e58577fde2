# SPDX-License-Identifier: Apache-2.0
"""The routes: one row an operation, with the microversions that have it, who may, and what it takes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compute_api.placement_service import (
    aggregates,
    allocation_candidates,
    allocations,
    inventories,
    resource_classes,
    resource_providers,
    schemas,
    traits,
    usages,
    versions,
)
from compute_api.placement_service.request import Body, Request


def _versions(request: Request) -> Body:
    """What is served."""
    return {"versions": [{"id": "v1.0", "min_version": versions.text(versions.MIN), "status": "CURRENT",
                          "max_version": versions.text(versions.MAX), "links": [{"rel": "self", "href": ""}]}]}


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. since and until are numbers of microversions, both included; cached: its answers say when what
    they show changed; without a rule the handler decides, or anybody may."""

    method: str
    path: str
    handler: Callable[..., Any]
    rule: str
    since: int = 0
    until: int = versions.MAX
    body: schemas.Versioned | None = None
    query: schemas.Versioned = schemas.NOTHING
    success: int = 200
    cached: bool = True

    @property
    def versions(self) -> range:
        """Those that have it."""
        return range(self.since, self.until + 1)


_P, _RP = "placement:", "/resource_providers/{provider_uuid}"
_ONE = _RP + "/inventories/{resource_class}"


def _delete(path: str, handler: Callable[..., Any], rule: str, since: int = 0) -> Route:
    return Route("DELETE", path, handler, rule, since, success=204, cached=False)


def _refused(method: str, path: str, rule: str, since: int = 0) -> Route:
    return Route(method, path, allocations.refuse, rule, since, body=None if method == "DELETE" else schemas.ANYTHING,
                 query=schemas.ANYTHING, cached=False)


ROUTES: tuple[Route, ...] = (
    Route("GET", "/", _versions, "", query=schemas.ANYTHING),
    Route("GET", "/resource_providers", resource_providers.index, _P + "resource_providers:list",
          query=schemas.LIST_PROVIDERS),
    Route("POST", "/resource_providers", resource_providers.create, _P + "resource_providers:create",
          body=schemas.CREATE_PROVIDER),
    Route("GET", _RP, resource_providers.show, _P + "resource_providers:show"),
    Route("PUT", _RP, resource_providers.update, _P + "resource_providers:update", body=schemas.UPDATE_PROVIDER),
    _delete(_RP, resource_providers.delete, _P + "resource_providers:delete"),
    Route("GET", _RP + "/inventories", inventories.index, _P + "resource_providers:inventories:list"),
    Route("POST", _RP + "/inventories", inventories.add, _P + "resource_providers:inventories:create",
          body=schemas.ADD_INVENTORY),
    Route("PUT", _RP + "/inventories", inventories.put_all, _P + "resource_providers:inventories:update",
          body=schemas.PUT_INVENTORIES),
    _delete(_RP + "/inventories", inventories.delete_all, _P + "resource_providers:inventories:delete", 5),
    Route("GET", _ONE, inventories.show, _P + "resource_providers:inventories:show"),
    Route("PUT", _ONE, inventories.put, _P + "resource_providers:inventories:update", body=schemas.PUT_INVENTORY),
    _delete(_ONE, inventories.delete, _P + "resource_providers:inventories:delete"),
    Route("GET", _RP + "/usages", usages.of_provider, _P + "resource_providers:usages"),
    Route("GET", _RP + "/aggregates", aggregates.index, _P + "resource_providers:aggregates:list", 1),
    Route("PUT", _RP + "/aggregates", aggregates.put, _P + "resource_providers:aggregates:update", 1,
          body=schemas.PUT_AGGREGATES),
    Route("GET", _RP + "/traits", traits.of_provider, _P + "resource_providers:traits:list", 6),
    Route("PUT", _RP + "/traits", traits.put, _P + "resource_providers:traits:update", 6, body=schemas.PUT_TRAITS),
    _delete(_RP + "/traits", traits.clear, _P + "resource_providers:traits:delete", 6),
    Route("GET", _RP + "/allocations", allocations.of_provider, _P + "resource_providers:allocations:list"),
    Route("GET", "/resource_classes", resource_classes.index, _P + "resource_classes:list", 2),
    Route("POST", "/resource_classes", resource_classes.create, _P + "resource_classes:create", 2,
          body=schemas.CLASS, success=201, cached=False),
    Route("GET", "/resource_classes/{name}", resource_classes.show, _P + "resource_classes:show", 2),
    Route("PUT", "/resource_classes/{name}", resource_classes.rename, _P + "resource_classes:update", 2, 6,
          body=schemas.CLASS),
    Route("PUT", "/resource_classes/{name}", resource_classes.ensure, _P + "resource_classes:update", 7, success=201,
          cached=False),
    _delete("/resource_classes/{name}", resource_classes.delete, _P + "resource_classes:delete", 2),
    Route("GET", "/traits", traits.index, _P + "traits:list", 6, query=schemas.LIST_TRAITS),
    Route("GET", "/traits/{name}", traits.show, _P + "traits:show", 6, success=204),
    Route("PUT", "/traits/{name}", traits.create, _P + "traits:update", 6),
    _delete("/traits/{name}", traits.delete, _P + "traits:delete", 6),
    Route("GET", "/usages", usages.index, "", 9, query=schemas.USAGES),
    Route("GET", "/allocation_candidates", allocation_candidates.index, _P + "allocation_candidates:list", 10,
          query=schemas.CANDIDATES),
    Route("GET", "/allocations/{consumer_uuid}", allocations.show, _P + "allocations:list"),
    _refused("POST", "/allocations", _P + "allocations:manage", 13),
    _refused("PUT", "/allocations/{consumer_uuid}", _P + "allocations:update"),
    _refused("DELETE", "/allocations/{consumer_uuid}", _P + "allocations:delete"),
    _refused("POST", "/reshaper", _P + "reshaper:reshape", 30),
)


#: Where an operation that came later is a method that is not allowed, not a path that is not there.
OLD_PATHS = frozenset((_RP + "/inventories",))


def by_path() -> dict[str, list[Route]]:
    """The rows of each path."""
    found: dict[str, list[Route]] = {}
    for route in ROUTES:
        found.setdefault(route.path, []).append(route)
    return found
