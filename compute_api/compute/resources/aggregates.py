# SPDX-License-Identifier: Apache-2.0
"""Aggregates of hosts, and the images that their hosts cache.

The store has the rules about zones. As in Nova a refusal is 409 for adding and removing hosts, and
400 for other changes."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.hosts import aggregates, cached_images
from common.store.rows import AggregateRow
from compute_api.compute.request.request import Request
from compute_api.compute.schemas import aggregates as schemas
from compute_api.compute.views import aggregates as view
from compute_api.http.response import ApiResponse

_RULE = "os_compute_api:os-aggregates:"


def index(request: Request) -> JsonObject:
    """GET /os-aggregates"""
    return view.many(*request.read(aggregates.list_all), request.version)


def show(request: Request, aggregate_id: str) -> JsonObject:
    """GET /os-aggregates/{id}"""
    return _body(request, request.read(aggregates.show, _number(aggregate_id)))


def _number(text: str) -> int:
    number = ids.number(text)
    if number is None and ids.number(text.removeprefix("-")) is not None:
        raise errors.NotFound(f"Aggregate {text} could not be found.")
    if number is None:
        raise errors.BadRequest(f"Invalid aggregate id {text[:40]}: give its number.")
    return number


def _body(request: Request, found: tuple[AggregateRow, list[str]]) -> JsonObject:
    return view.one(*found, request.version)


def create(request: Request) -> JsonObject:
    """POST /os-aggregates"""
    given = request.body["aggregate"]
    row = request.make(
        aggregates.is_made, aggregates.create, given["name"].strip(), given.get("availability_zone")
    )
    return view.one(row, [], request.version, view.NEW)


def update(request: Request, aggregate_id: str) -> JsonObject:
    """PUT /os-aggregates/{id}: its name, its zone."""
    given, number = request.body["aggregate"], _number(aggregate_id)
    name = given["name"].strip() if "name" in given else None
    meta = {aggregates.ZONE: given[aggregates.ZONE]} if aggregates.ZONE in given else None
    return _changed(
        request,
        number,
        lambda tx: aggregates.update(tx, number, _default_zone(request), name=name, meta=meta),
    )


def _default_zone(request: Request) -> str:
    return request.services.settings.default_zone


def _changed(request: Request, number: int, work: Callable[[Connection], None]) -> JsonObject:
    """Make a change, and show what it made in the same transaction."""

    def change(tx: Connection) -> tuple[AggregateRow, list[str]]:
        work(tx)
        return aggregates.show(tx, number)

    return _body(request, request.write(change))


def delete(request: Request, aggregate_id: str) -> None:
    """DELETE /os-aggregates/{id}"""
    request.write(aggregates.delete, _number(aggregate_id))


def act(request: Request, aggregate_id: str) -> JsonObject:
    """POST /os-aggregates/{id}/action: add_host, remove_host, set_metadata."""
    if len(request.body) != 1:
        raise errors.BadRequest("Malformed request body: give one action.")
    [key] = request.body
    if key not in schemas.BY_KEY:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    request.require(_RULE + key)
    schema = schemas.BY_KEY[key].at(request.version)
    if request.links.legacy:
        request.body = schema.prune(request.body)
    schema.check(request.body)
    given, number, zone = request.body[key], _number(aggregate_id), _default_zone(request)

    def work(tx: Connection) -> None:
        if key == "set_metadata":
            aggregates.update(
                tx, number, zone, meta=given["metadata"], what="metadata of aggregate"
            )
        else:
            (aggregates.add_host if key == "add_host" else aggregates.remove_host)(
                tx, number, given["host"], zone
            )

    return _changed(request, number, work)


def cache_images(request: Request, aggregate_id: str) -> ApiResponse:
    """POST /os-aggregates/{id}/images (since 2.81): its hosts shall fetch these ahead."""
    wanted = [image["id"] for image in request.body["cache"]]
    if len(set(wanted)) < len(wanted):
        raise errors.BadRequest("Duplicate images in request")
    number = _number(aggregate_id)
    request.read(aggregates.show, number)  # before the image service is asked
    images = [request.image(image_id) for image_id in wanted]
    for image in images:
        if not image.is_active:
            raise errors.BadRequest(f"Image {image.ref.id} is not active: it is {image.status}.")

    def work(tx: Connection) -> None:
        cached_images.ask(tx, *aggregates.show(tx, number), [image.ref for image in images])

    request.write(work)
    return ApiResponse()
