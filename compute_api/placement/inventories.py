# SPDX-License-Identifier: Apache-2.0
"""/resource_providers/UUID/inventories: the inventories of a provider.

Operators can override only ``reserved`` and ``allocation_ratio`` of an inventory that a host
reports. A request without these fields removes the override, and the host's value applies again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from common.store.engine import Connection
from common.store.placement import allocations, inventories, providers, resource_classes
from common.store.rows import InventoryRow, ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.request import PlacementRequest
from compute_api.placement.resource_providers import path

FIELDS = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")
ALL_RESERVED = 26


def view(row: InventoryRow) -> JsonObject:
    """Return the fields of an inventory by name, for a response body."""
    return {name: getattr(row, name) for name in FIELDS}


def _read(tx: Connection, provider_uuid: str) -> tuple[ProviderRow, dict[str, InventoryRow]]:
    provider = providers.show(tx, provider_uuid)
    return provider, inventories.of(tx, [provider.id])[provider.id]


def _view_all(provider: ProviderRow, rows: Mapping[str, InventoryRow]) -> ApiResponse:
    return ApiResponse(
        {
            "resource_provider_generation": provider.generation,
            "inventories": {name: view(row) for name, row in rows.items()},
        },
        modified=provider.changed_at,
    )


def _view_one(provider: ProviderRow, row: InventoryRow) -> ApiResponse:
    return ApiResponse(
        {**view(row), "resource_provider_generation": provider.generation},
        modified=provider.changed_at,
    )


def index(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Return all inventories of a provider, with two SQL statements.

    Raises:
        NotFound: The provider does not exist.
    """
    return _view_all(*request.read(_read, provider_uuid))


def show(request: PlacementRequest, provider_uuid: str, resource_class: str) -> ApiResponse:
    """Return one inventory of a provider, with two SQL statements.

    Raises:
        NotFound: The provider does not exist, or has no inventory of this class.
    """
    provider, rows = request.read(_read, provider_uuid)
    if resource_class not in rows:
        raise errors.NotFound(f"No inventory of class {resource_class} for {provider_uuid}")
    return _view_one(provider, rows[resource_class])


def put_all(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Replace all inventories of a provider, and return the new inventories.

    For a host's provider the body must contain every class that the host reports. Only
    ``reserved`` and ``allocation_ratio`` of these classes can differ from the report.

    Raises:
        NotFound: The provider does not exist.
        BadRequest: A class does not exist, or a value is invalid.
        Conflict: The provider has another generation, a missing class has allocations or is
            reported by the host, or a value that cannot be overridden differs from the report.
    """
    new_inventories = {
        name: _parse(request, provider_uuid, name, values, "update")
        for name, values in request.body["inventories"].items()
    }
    generation = request.body["resource_provider_generation"]

    def work(tx: Connection) -> tuple[ProviderRow, dict[str, InventoryRow]]:
        _check_classes(
            tx,
            new_inventories,
            "Unknown resource class in inventory for resource provider "
            f"{provider_uuid}: No such resource class",
        )
        provider = _lock(tx, provider_uuid, generation)
        inventories.put(tx, provider, new_inventories)
        return _read(tx, provider_uuid)

    return _view_all(*request.write(work))


def add(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Create and return an inventory of a class that the provider does not have yet.

    Raises:
        NotFound: The provider does not exist.
        BadRequest: The class does not exist, or a value is invalid.
        Conflict: The provider has this class already, or another generation.
    """
    name = request.body["resource_class"]
    new_inventories = {name: _parse(request, provider_uuid, name, request.body, "create")}

    def work(tx: Connection) -> tuple[ProviderRow, dict[str, InventoryRow]]:
        _check_classes(
            tx,
            new_inventories,
            f"Unable to create inventory for resource provider {provider_uuid}: "
            "No such resource class",
        )
        provider = _lock(tx, provider_uuid, request.body.get("resource_provider_generation"))
        if name in inventories.of(tx, [provider.id])[provider.id]:
            raise errors.Conflict(
                f"Update conflict: {name} exists on resource provider {provider_uuid}; use PUT to "
                "change this inventory."
            )
        inventories.put(tx, provider, new_inventories, whole=False)
        return _read(tx, provider_uuid)

    provider, rows = request.write(work)
    place = path(request, provider_uuid).removeprefix(request.prefix)
    return replace(
        _view_one(provider, rows[name]),
        status=201,
        headers={"Location": f"{request.base}{place}/inventories/{name}"},
    )


def put(request: PlacementRequest, provider_uuid: str, resource_class: str) -> ApiResponse:
    """Replace and return an inventory, or the overrides of a class that the host reports.

    Raises:
        NotFound: The provider does not exist.
        BadRequest: The provider has no inventory of this class, or a value is invalid.
        Conflict: The provider has another generation, or a value that cannot be overridden differs
            from the host's report.
    """
    new_inventories = {
        resource_class: _parse(request, provider_uuid, resource_class, request.body, "update")
    }

    def work(tx: Connection) -> tuple[ProviderRow, dict[str, InventoryRow]]:
        provider = _lock(tx, provider_uuid, request.body["resource_provider_generation"])
        if resource_class not in inventories.of(tx, [provider.id])[provider.id]:
            raise errors.BadRequest(
                f"Unable to update inventory for resource provider {provider_uuid}: No inventory "
                f"record with resource class {resource_class}"
            )
        inventories.put(tx, provider, new_inventories, whole=False)
        return _read(tx, provider_uuid)

    provider, rows = request.write(work)
    return _view_one(provider, rows[resource_class])


def delete(request: PlacementRequest, provider_uuid: str, resource_class: str) -> None:
    """Delete an inventory that an operator created.

    Raises:
        NotFound: The provider does not exist, or has no inventory of this class.
        Conflict: The host reports the class, or the class has allocations.
    """

    def work(tx: Connection) -> None:
        provider = _lock(tx, provider_uuid)
        if resource_class not in inventories.of(tx, [provider.id])[provider.id]:
            raise errors.NotFound(f"No inventory of class {resource_class} found for delete")
        inventories.remove(tx, provider, [resource_class])

    request.write(work)


def delete_all(request: PlacementRequest, provider_uuid: str) -> None:
    """Delete all inventories of a provider, unless the host reports one of them.

    Raises:
        NotFound: The provider does not exist.
        Conflict: The host reports an inventory, or an inventory has allocations. Then no inventory
            is deleted.
    """
    request.write(lambda tx: inventories.put(tx, _lock(tx, provider_uuid), {}))


def _lock(tx: Connection, provider_uuid: str, generation: int | None = None) -> ProviderRow:
    """Lock the provider until the end of the transaction, and raise its generation.

    The returned row has the generation before.

    Raises:
        NotFound: The provider does not exist.
        Conflict: The provider has another generation than ``generation``.
    """
    provider = providers.lock(tx, provider_uuid, generation)
    allocations.touch(tx, [provider.id])
    return provider


def _parse(
    request: PlacementRequest, provider_uuid: str, name: str, body: JsonMapping, verb: str
) -> JsonObject:
    """Return the inventory's fields that a request body contains.

    Args:
        request: The request, for its microversion.
        provider_uuid: The provider, for errors.
        name: The resource class, for errors.
        body: The fields of the inventory.
        verb: "update" or "create", for errors.

    Raises:
        BadRequest: The reserved amount exceeds the total, or equals the total before 1.26, or the
            ratio is not positive.
    """
    values = {field: body[field] for field in FIELDS if field in body}
    reserved, total = values.get("reserved", 0), values["total"]
    if reserved > total or (reserved == total and request.version < ALL_RESERVED):
        comparison = (
            "greater than" if request.version >= ALL_RESERVED else "greater than or equal to"
        )
        raise errors.BadRequest(
            f"Unable to {verb} inventory for resource provider {provider_uuid}: Invalid inventory "
            f"for '{name}': reserved {reserved} is {comparison} total {total}."
        )
    if values.get("allocation_ratio", 1.0) <= 0:
        raise errors.BadRequest(
            f"Unable to {verb} inventory for resource provider {provider_uuid}: Invalid inventory "
            f"for '{name}': allocation_ratio must be above 0."
        )
    return values


def _check_classes(tx: Connection, new_inventories: JsonMapping, text: str) -> None:
    missing = resource_classes.unknown(tx, new_inventories, lock=True)
    if missing:
        raise errors.BadRequest(f"{text} {', '.join(missing)}")
