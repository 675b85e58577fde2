# SPDX-License-Identifier: Apache-2.0
"""The proxy to the image service: images until 2.35, their metadata until 2.38.

All requests carry the caller's token, so the image service checks the caller's permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.clients.image import OWN_KEYS
from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from compute_api.compute.request.request import Request
from compute_api.http.validation import is_true

#: Query parameter -> name in the image service.
_FILTERS = {
    "name": "name",
    "status": "status",
    "changes-since": "updated_at",
    "server": "instance_uuid",
    "type": "image_type",
    "minRam": "min_ram",
    "minDisk": "min_disk",
}
_PROPERTY = "property-"
_STATUS = {
    "active": "ACTIVE",
    "queued": "SAVING",
    "importing": "SAVING",
    "saving": "SAVING",
    "deleted": "DELETED",
    "pending_delete": "DELETED",
    "killed": "ERROR",
}
_PROGRESS = {"queued": 25, "saving": 50, "active": 100}


def index(request: Request) -> JsonObject:
    """Return one page of images for GET /images, with id, name and links only."""
    return _list(
        request,
        "images",
        lambda record: {
            "id": record["id"],
            "name": record.get("name"),
            "links": _build_links(request, record),
        },
    )


def detail(request: Request) -> JsonObject:
    """Return one page of images with all fields for GET /images/detail."""
    return _list(request, "images/detail", lambda record: _build_image(request, record))


def _list(request: Request, path: str, view: Callable[[JsonObject], JsonObject]) -> JsonObject:
    filters = {"limit": str(request.limit)}
    for name in request.query:
        value = request.query_value(name) or ""
        if name == "marker":
            filters["marker"] = value
        elif name.startswith(_PROPERTY):
            filters[name.removeprefix(_PROPERTY)] = value
        elif name in _FILTERS:
            filters[_FILTERS[name]] = _convert_value(name, value)
    records = request.services.images.page(filters, request.context.token)
    return request.page(
        "images", path, [view(record) for record in records], records[-1]["id"] if records else None
    )


def _convert_value(name: str, value: str) -> str:
    if name == "changes-since":
        return f"gte:{value}"
    return (
        value.lower()
        if name == "status"
        else value.rsplit("/", 1)[-1]
        if name == "server"
        else value
    )


def show(request: Request, image_id: str) -> JsonObject:
    """Return one image for GET /images/{id}."""
    return {"image": _build_image(request, _read_record(request, image_id))}


def delete(request: Request, image_id: str) -> None:
    """Delete an image for DELETE /images/{id}."""
    _read_record(request, image_id)
    request.services.images.delete(image_id, request.context.token)


def _read_record(request: Request, image_id: str) -> JsonObject:
    try:
        return request.services.images.record(image_id, request.context.token)
    except errors.Forbidden as problem:
        raise errors.Forbidden(f"Not authorized for image {image_id[:80]}.") from problem


def _list_properties(record: JsonMapping) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in record.items()
        if key not in OWN_KEYS and value is not None
    }


def _build_links(request: Request, record: JsonObject) -> list[dict[str, str]]:
    return [
        *request.links.of("images", record["id"]),
        {
            "rel": "alternate",
            "type": "application/vnd.openstack.image",
            "href": request.services.images.url(record["id"]),
        },
    ]


def _build_image(request: Request, record: JsonObject) -> JsonObject:
    properties, status = _list_properties(record), record.get("status", "")
    image = {
        "id": record["id"],
        "name": record.get("name"),
        "minRam": record.get("min_ram") or 0,
        "minDisk": record.get("min_disk") or 0,
        "metadata": properties,
        "created": record["created_at"],
        "updated": record.get("updated_at"),
        "status": _STATUS.get(status, "UNKNOWN"),
        "progress": _PROGRESS.get(status, 0),
        "links": _build_links(request, record),
        "OS-EXT-IMG-SIZE:size": record.get("size") or 0,
    }
    if server := properties.get("instance_uuid"):
        image["server"] = {"id": server, "links": request.links.of("servers", server)}
    if (auto := properties.get("auto_disk_config")) is not None:
        image["OS-DCF:diskConfig"] = "AUTO" if is_true(auto) else "MANUAL"
    return image


# --- metadata ---
def metadata(request: Request, image_id: str) -> JsonObject:
    """Return the properties of an image for GET /images/{id}/metadata."""
    return {"metadata": _list_properties(_read_record(request, image_id))}


def item(request: Request, image_id: str, key: str) -> JsonObject:
    """Return one property for GET /images/{id}/metadata/{key}.

    Raises:
        NotFound: The image does not exist, or has no such property.
    """
    return {"meta": {key: _get_property(_list_properties(_read_record(request, image_id)), key)}}


def _get_property(properties: Mapping[str, str], key: str) -> str:
    if key not in properties:
        raise errors.NotFound("Metadata item was not found")
    return properties[key]


def add(request: Request, image_id: str) -> JsonObject:
    """Add or overwrite properties of an image for POST /images/{id}/metadata.

    The response contains all properties.
    """
    old = _list_properties(_read_record(request, image_id))
    return {
        "metadata": _change_properties(request, image_id, old, {**old, **request.body["metadata"]})
    }


def replace(request: Request, image_id: str) -> JsonObject:
    """Replace all properties of an image for PUT /images/{id}/metadata, and return them."""
    return {
        "metadata": _change_properties(
            request,
            image_id,
            _list_properties(_read_record(request, image_id)),
            request.body["metadata"],
        )
    }


def put(request: Request, image_id: str, key: str) -> JsonObject:
    """Set one property for PUT /images/{id}/metadata/{key}.

    Raises:
        BadRequest: The body does not contain the key of the path.
        NotFound: The image does not exist.
        Forbidden: The quota does not allow another property, or the caller may not see the image.
    """
    body = request.body["meta"]
    if key not in body:
        raise errors.BadRequest("Request body and URI mismatch")
    old = _list_properties(_read_record(request, image_id))
    _change_properties(request, image_id, old, {**old, **body})
    return {"meta": body}


def remove(request: Request, image_id: str, key: str) -> None:
    """Remove one property for DELETE /images/{id}/metadata/{key}.

    Raises:
        NotFound: The image does not exist, or has no such property.
    """
    old = _list_properties(_read_record(request, image_id))
    _get_property(old, key)
    _change_properties(
        request, image_id, old, {name: value for name, value in old.items() if name != key}
    )


def _change_properties(
    request: Request, image_id: str, old: Mapping[str, str], new: dict[str, str]
) -> dict[str, str]:
    """Replace the properties of an image in the image service, and return the new properties.

    Args:
        request: The request.
        image_id: Id of the image.
        old: The present properties. Unchanged properties are not sent.
        new: All new properties. Properties that are only in ``old`` are removed.

    Raises:
        Forbidden: The quota does not allow so many properties, or the image service refuses.
        Problem: As for the image client's ``change``.
    """
    most = request.limits().of("metadata_items")
    if 0 <= most < len(new):
        raise errors.Forbidden(f"Maximum number of metadata items exceeds {most}")
    request.services.images.change(
        image_id,
        {
            **{key: value for key, value in new.items() if old.get(key) != value},
            **dict.fromkeys(old.keys() - new.keys()),
        },
        request.context.token,
    )
    return new
