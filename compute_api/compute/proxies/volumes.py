# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-volumes and /os-snapshots (until 2.35), a proxy to the block storage service.

All requests carry the caller's token. In a cloud without a block storage service lists are empty,
records do not exist, and creation is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject, JsonValue
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.request import Request
from compute_api.compute.views.proxies import volumes as view
from compute_api.http.validation import is_true

VOLUMES, SNAPSHOTS = "volumes", "snapshots"
_WITHOUT = "This cloud has no block storage service, so there are no volumes or snapshots."


def index(request: Request) -> JsonObject:
    """Return one page of volumes for GET /os-volumes and GET /os-volumes/detail."""
    return {VOLUMES: _list_page(request, VOLUMES, view.volume)}


def show(request: Request, volume_id: str) -> JsonObject:
    """Return one volume for GET /os-volumes/{id}."""
    record = _require_service(request).record(request.context.token, VOLUMES, volume_id)
    return {"volume": view.volume(record)}


def create(request: Request) -> JsonObject:
    """Create a volume in the block storage service (POST /os-volumes)."""
    body = request.body["volume"]
    names = ("volume_type", "snapshot_id", "availability_zone", "metadata")
    values = {name: body[name] for name in names if body.get(name)}
    record = _create_record(request, VOLUMES, body, size=int(body["size"]), **values)
    return {"volume": view.volume(record)}


def delete(request: Request, volume_id: str) -> None:
    """Delete a volume for DELETE /os-volumes/{id}."""
    _require_service(request).remove(request.context.token, VOLUMES, volume_id)


def snapshot_index(request: Request) -> JsonObject:
    """Return one page of snapshots for GET /os-snapshots and GET /os-snapshots/detail."""
    return {SNAPSHOTS: _list_page(request, SNAPSHOTS, view.snapshot)}


def snapshot_show(request: Request, snapshot_id: str) -> JsonObject:
    """Return one snapshot for GET /os-snapshots/{id}."""
    record = _require_service(request).record(request.context.token, SNAPSHOTS, snapshot_id)
    return {"snapshot": view.snapshot(record)}


def snapshot_create(request: Request) -> JsonObject:
    """Create a snapshot of a volume for POST /os-snapshots."""
    body = request.body["snapshot"]
    force = is_true(body.get("force", False))
    record = _create_record(request, SNAPSHOTS, body, volume_id=body["volume_id"], force=force)
    return {"snapshot": view.snapshot(record)}


def snapshot_delete(request: Request, snapshot_id: str) -> None:
    """Delete a snapshot for DELETE /os-snapshots/{id}."""
    _require_service(request).remove(request.context.token, SNAPSHOTS, snapshot_id)


def _require_service(request: Request) -> TenantVolumes:
    service = request.volumes
    if service is None:
        raise errors.NotFound(_WITHOUT)
    return service


def _list_page(
    request: Request, resource: str, show_record: Callable[[JsonMapping], JsonObject]
) -> list[JsonObject]:
    service = request.volumes
    records = [] if service is None else service.records(request.context.token, resource)
    offset = int(request.query_value("offset") or 0)
    return [show_record(record) for record in records[offset : offset + request.limit]]


def _create_record(
    request: Request, resource: str, body: JsonMapping, **values: JsonValue
) -> JsonObject:
    """Create a volume or snapshot in the block storage service, and return the new record.

    The record has ``values``, and the display_name and display_description of the body as name and
    description.

    Args:
        request: The request.
        resource: ``VOLUMES`` or ``SNAPSHOTS``.
        body: The object ``volume`` or ``snapshot`` in the request's body.
        values: Further fields of the record.

    Raises:
        Forbidden: A quota of the block storage service does not allow the record.
        NotImplementedHere: The cloud has no block storage service.
    """
    service = request.volumes
    if service is None:
        raise errors.NotImplementedHere(_WITHOUT)
    texts: JsonObject = {name: body.get(f"display_{name}") for name in ("name", "description")}
    try:
        return service.make(request.context.token, resource, values | texts)
    except errors.TooLarge as problem:
        raise errors.Forbidden(problem.text) from problem
