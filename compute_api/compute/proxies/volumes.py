# SPDX-License-Identifier: Apache-2.0
"""/os-volumes and /os-snapshots, until 2.35: the project's volumes and snapshots in the block
storage service.

Everything is done there with the caller's token. In a cloud without such a service lists are
empty, nothing is found and nothing can be made."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject, JsonValue
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.request import Request
from compute_api.compute.views.proxies import volumes as view
from compute_api.http.validation import is_true

VOLUMES, SNAPSHOTS = "volumes", "snapshots"
_WITHOUT = "This cloud has no block storage service, and so no volumes or snapshots."


def index(request: Request) -> JsonObject:
    """GET /os-volumes, GET /os-volumes/detail"""
    return {VOLUMES: _page(request, VOLUMES, view.volume)}


def show(request: Request, volume_id: str) -> JsonObject:
    """GET /os-volumes/{id}"""
    found = _required(request).record(request.context.token, VOLUMES, volume_id)
    return {"volume": view.volume(found)}


def create(request: Request) -> JsonObject:
    """POST /os-volumes"""
    given = request.body["volume"]
    more = ("volume_type", "snapshot_id", "availability_zone", "metadata")
    values = {name: given[name] for name in more if given.get(name)}
    made = _made(request, VOLUMES, given, size=int(given["size"]), **values)
    return {"volume": view.volume(made)}


def delete(request: Request, volume_id: str) -> None:
    """DELETE /os-volumes/{id}"""
    _required(request).remove(request.context.token, VOLUMES, volume_id)


def snapshot_index(request: Request) -> JsonObject:
    """GET /os-snapshots, GET /os-snapshots/detail"""
    return {SNAPSHOTS: _page(request, SNAPSHOTS, view.snapshot)}


def snapshot_show(request: Request, snapshot_id: str) -> JsonObject:
    """GET /os-snapshots/{id}"""
    found = _required(request).record(request.context.token, SNAPSHOTS, snapshot_id)
    return {"snapshot": view.snapshot(found)}


def snapshot_create(request: Request) -> JsonObject:
    """POST /os-snapshots"""
    given = request.body["snapshot"]
    force = is_true(given.get("force", False))
    made = _made(request, SNAPSHOTS, given, volume_id=given["volume_id"], force=force)
    return {"snapshot": view.snapshot(made)}


def snapshot_delete(request: Request, snapshot_id: str) -> None:
    """DELETE /os-snapshots/{id}"""
    _required(request).remove(request.context.token, SNAPSHOTS, snapshot_id)


def _required(request: Request) -> TenantVolumes:
    service = request.volumes
    if service is None:
        raise errors.NotFound(_WITHOUT)
    return service


def _page(
    request: Request, resource: str, shown: Callable[[JsonMapping], JsonObject]
) -> list[JsonObject]:
    service = request.volumes
    found = [] if service is None else service.records(request.context.token, resource)
    offset = int(request.first("offset") or 0)
    return [shown(one) for one in found[offset : offset + request.limit]]


def _made(request: Request, resource: str, given: JsonMapping, **values: JsonValue) -> JsonObject:
    """With the name and the description that are ``given``, and these values."""
    service = request.volumes
    if service is None:
        raise errors.NotImplementedHere(_WITHOUT)
    words: JsonObject = {name: given.get(f"display_{name}") for name in ("name", "description")}
    try:
        return service.make(request.context.token, resource, values | words)
    except errors.TooLarge as problem:
        raise errors.Forbidden(problem.text) from problem
