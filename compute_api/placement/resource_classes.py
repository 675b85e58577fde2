# SPDX-License-Identifier: Apache-2.0
"""/resource_classes: the standard classes and the operator's own."""

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


def _place(request: PlacementRequest, name: str) -> dict[str, str]:
    return {"Location": f"{request.base}/resource_classes/{name}"}


def index(request: PlacementRequest) -> ApiResponse:
    """One statement."""
    rows = request.read(resource_classes.list_all)
    return ApiResponse({"resource_classes": [_view(request, name) for name, _ in rows]})


def show(request: PlacementRequest, name: str) -> ApiResponse:
    """At most one statement."""
    return ApiResponse(_view(request, name), modified=request.read(resource_classes.show, name))


def create(request: PlacementRequest) -> ApiResponse:
    """A new one."""
    name = request.body["name"]
    if not request.write(resource_classes.create, name):
        raise errors.Conflict(f"Conflicting resource class already exists: {name}")
    return ApiResponse(status=201, headers=_place(request, name))


def rename(request: PlacementRequest, name: str) -> ApiResponse:
    """Until 1.6, PUT gives a class another name."""
    request.write(resource_classes.rename, name, request.body["name"])
    return ApiResponse(_view(request, request.body["name"]))


def ensure(request: PlacementRequest, name: str) -> ApiResponse:
    """Since 1.7, PUT makes it; 204: it was there."""
    CUSTOM_CLASS.check_body(request.version, name)
    made = request.write(resource_classes.create, name)
    return ApiResponse(status=201 if made else 204, headers=_place(request, name))


def delete(request: PlacementRequest, name: str) -> None:
    """Only one that nothing uses."""
    request.write(resource_classes.delete, name)
