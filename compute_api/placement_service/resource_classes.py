# SPDX-License-Identifier: Apache-2.0
"""/resource_classes: what can be counted: the standard classes and the operator's own."""
from __future__ import annotations

from common import errors
from common.store import resource_classes
from compute_api.placement_service.request import Answer, Body, Request
from compute_api.placement_service.schemas import CUSTOM_CLASS


def _view(request: Request, name: str) -> Body:
    return {"name": name, "links": [{"rel": "self", "href": f"{request.prefix}/resource_classes/{name}"}]}


def _place(request: Request, name: str) -> dict[str, str]:
    return {"Location": f"{request.base}/resource_classes/{name}"}


def index(request: Request) -> Answer:
    """One statement."""
    return Answer({"resource_classes": [_view(request, name) for name, _ in request.read(resource_classes.list_all)]})


def show(request: Request, name: str) -> Answer:
    """At most one statement."""
    return Answer(_view(request, name), modified=request.read(resource_classes.show, name))


def create(request: Request) -> Answer:
    """A new one."""
    name = request.body["name"]
    if not request.write(resource_classes.create, name):
        raise errors.Conflict(f"Conflicting resource class already exists: {name}")
    return Answer(status=201, headers=_place(request, name))


def rename(request: Request, name: str) -> Answer:
    """Until 1.6, PUT gives a class another name."""
    request.write(resource_classes.rename, name, request.body["name"])
    return Answer(_view(request, request.body["name"]))


def ensure(request: Request, name: str) -> Answer:
    """Since 1.7, PUT makes it; 204: it was there."""
    CUSTOM_CLASS.check_body(request.version, name)
    made = request.write(resource_classes.create, name)
    return Answer(status=201 if made else 204, headers=_place(request, name))


def delete(request: Request, name: str) -> None:
    """Only one that nothing uses."""
    request.write(resource_classes.delete, name)
