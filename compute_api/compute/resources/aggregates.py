# SPDX-License-Identifier: Apache-2.0
"""Aggregates of hosts, and the images that their hosts cache.

The store checks the rules for zones. As in Nova the error is 409 for adding and removing hosts, and
400 for other changes.
"""

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
    """Return all aggregates for GET /os-aggregates."""
    return view.many(*request.read(aggregates.list_all), request.version)


def show(request: Request, aggregate_id: str) -> JsonObject:
    """Return one aggregate for GET /os-aggregates/{id}.

    Raises:
        NotFound: The aggregate does not exist.
        BadRequest: The id is not a number.
    """
    return _build_body(request, request.read(aggregates.show, _parse_number(aggregate_id)))


def _parse_number(text: str) -> int:
    number = ids.number(text)
    if number is None and ids.number(text.removeprefix("-")) is not None:
        raise errors.NotFound(f"Aggregate {text} could not be found.")
    if number is None:
        raise errors.BadRequest(f"Invalid aggregate id {text[:40]}: it must be a number.")
    return number


def _build_body(request: Request, aggregate: tuple[AggregateRow, list[str]]) -> JsonObject:
    return view.one(*aggregate, request.version)


def create(request: Request) -> JsonObject:
    """Create an aggregate for POST /os-aggregates.

    Raises:
        Conflict: The name is in use.
        BadRequest: The name of the zone is invalid.
    """
    body = request.body["aggregate"]
    row = request.make(
        aggregates.is_made, aggregates.create, body["name"].strip(), body.get("availability_zone")
    )
    return view.one(row, [], request.version, view.NEW)


def update(request: Request, aggregate_id: str) -> JsonObject:
    """Change the name or the zone of an aggregate for PUT /os-aggregates/{id}.

    Raises:
        NotFound: The aggregate does not exist.
        BadRequest: The id is not a number, or the aggregate or its hosts cannot have the zone.
        Conflict: The name is in use, or the aggregate's metadata is damaged.
    """
    body, number = request.body["aggregate"], _parse_number(aggregate_id)
    name = body["name"].strip() if "name" in body else None
    meta = {aggregates.ZONE: body[aggregates.ZONE]} if aggregates.ZONE in body else None
    return _change_and_show(
        request,
        number,
        lambda tx: aggregates.update(tx, number, _default_zone(request), name=name, meta=meta),
    )


def _default_zone(request: Request) -> str:
    return request.services.settings.default_zone


def _change_and_show(
    request: Request, number: int, work: Callable[[Connection], None]
) -> JsonObject:
    """Change the aggregate with this number by ``work``, and return its new state as response.

    The new state is read in the same transaction.
    """

    def change(tx: Connection) -> tuple[AggregateRow, list[str]]:
        work(tx)
        return aggregates.show(tx, number)

    return _build_body(request, request.write(change))


def delete(request: Request, aggregate_id: str) -> None:
    """Delete an aggregate for DELETE /os-aggregates/{id}.

    Raises:
        NotFound: The aggregate does not exist.
        BadRequest: The aggregate has hosts, or the id is not a number.
    """
    request.write(aggregates.delete, _parse_number(aggregate_id))


def act(request: Request, aggregate_id: str) -> JsonObject:
    """Add or remove a host, or set metadata, for POST /os-aggregates/{id}/action.

    Raises:
        BadRequest: The action does not exist, the body or the id is invalid, or the metadata
            contains a zone that the aggregate or its hosts cannot have.
        Forbidden: The policy does not allow the action.
        NotFound: The aggregate or the host does not exist, or the host to be removed is not in the
            aggregate.
        Conflict: The host cannot be added or removed, or the aggregate's metadata is damaged.
    """
    if len(request.body) != 1:
        raise errors.BadRequest("Malformed request body: it must contain exactly one action.")
    [key] = request.body
    if key not in schemas.BY_KEY:
        raise errors.BadRequest(f"There is no such action: {key[:80]}")
    request.require(_RULE + key)
    schema = schemas.BY_KEY[key].at(request.version)
    if request.links.legacy:
        request.body = schema.prune(request.body)
    schema.check(request.body)
    content, number, zone = request.body[key], _parse_number(aggregate_id), _default_zone(request)

    def work(tx: Connection) -> None:
        if key == "set_metadata":
            aggregates.update(
                tx, number, zone, meta=content["metadata"], what="metadata of aggregate"
            )
        else:
            (aggregates.add_host if key == "add_host" else aggregates.remove_host)(
                tx, number, content["host"], zone
            )

    return _change_and_show(request, number, work)


def cache_images(request: Request, aggregate_id: str) -> ApiResponse:
    """Request that the hosts of an aggregate download images in advance (since 2.81).

    The response does not wait for the downloads.

    Raises:
        BadRequest: An image is repeated, does not exist for the caller, or is not active, or the id
            of the aggregate is not a number.
        Forbidden: Kilonova's own user cannot read an image, so hosts could not download it.
        NotFound: The aggregate does not exist.
    """
    image_ids = [image["id"] for image in request.body["cache"]]
    if len(set(image_ids)) < len(image_ids):
        raise errors.BadRequest("Duplicate images in request")
    number = _parse_number(aggregate_id)
    # Check the aggregate before requests to the image service.
    request.read(aggregates.show, number)
    images = [request.image(image_id) for image_id in image_ids]
    for image in images:
        if not image.is_active:
            raise errors.BadRequest(f"Image {image.ref.id} is not active: it is {image.status}.")

    def work(tx: Connection) -> None:
        cached_images.ask(tx, *aggregates.show(tx, number), [image.ref for image in images])

    request.write(work)
    return ApiResponse()
