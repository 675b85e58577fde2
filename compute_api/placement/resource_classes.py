# SPDX-License-Identifier: Apache-2.0
"""/resource_classes: the standard resource classes and custom classes."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.placement import resource_classes
from compute_api.http.response import ApiResponse
from compute_api.placement.request import PlacementRequest
from compute_api.placement.schemas import CUSTOM_CLASS


def _view(request: PlacementRequest, name: str) -> JsonObject:
    return {
        "name": name,
        "links": [{"rel": "self", "href": f"{request.prefix}/resource_classes/{name}"}],
    }


def _build_headers(request: PlacementRequest, name: str) -> dict[str, str]:
    return {"Location": f"{request.base}/resource_classes/{name}"}


def index(request: PlacementRequest) -> ApiResponse:
    """Return all resource classes, with one SQL statement."""
    rows = request.read(resource_classes.list_all)
    return ApiResponse({"resource_classes": [_view(request, name) for name, _ in rows]})


def show(request: PlacementRequest, name: str) -> ApiResponse:
    """Return a resource class, with at most one SQL statement.

    Raises:
        NotFound: The class does not exist.
    """
    return ApiResponse(_view(request, name), modified=request.read(resource_classes.show, name))


def create(request: PlacementRequest) -> ApiResponse:
    """Create a custom resource class (POST).

    Raises:
        Conflict: The class exists.
    """
    name = request.body["name"]
    if not request.write(resource_classes.create, name):
        raise errors.Conflict(f"Conflicting resource class already exists: {name}")
    return ApiResponse(status=201, headers=_build_headers(request, name))


def rename(request: PlacementRequest, name: str) -> ApiResponse:
    """Rename an unused custom resource class, and return the class (PUT until 1.6).

    Raises:
        NotFound: The class does not exist.
        BadRequest: The class is a standard class.
        Conflict: A provider has an inventory of the class, or the new name exists.
    """
    request.write(resource_classes.rename, name, request.body["name"])
    return ApiResponse(_view(request, request.body["name"]))


def ensure(request: PlacementRequest, name: str) -> ApiResponse:
    """Create a custom resource class unless the class exists (PUT since 1.7).

    The status is 201, or 204 if the class exists.

    Raises:
        BadRequest: The name is not that of a custom class.
    """
    CUSTOM_CLASS.check_body(request.version, name)
    is_new = request.write(resource_classes.create, name)
    return ApiResponse(status=201 if is_new else 204, headers=_build_headers(request, name))


def delete(request: PlacementRequest, name: str) -> None:
    """Delete an unused custom resource class.

    Raises:
        NotFound: The class does not exist.
        BadRequest: The class is a standard class.
        Conflict: A provider has an inventory of the class.
    """
    request.write(resource_classes.delete, name)
