# SPDX-License-Identifier: Apache-2.0
"""Handlers of a server's metadata and tags. Changes do not reach the host."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import quote

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.text import is_printable
from common.store.engine import Connection
from common.store.rows import ServerRecord
from common.store.servers import servers
from common.store.servers.servers import loads
from compute_api.compute.request.request import Request
from compute_api.compute.servers import fields as server_fields
from compute_api.http.response import ApiResponse

MAX_TAGS = 50
_TAG = re.compile(r"[^,/]{1,60}\Z")
Metadata = dict[str, str]


def index(request: Request, server: ServerRecord) -> JsonObject:
    """Return the metadata of a server for GET /servers/{id}/metadata."""
    return {"metadata": loads(server.meta)}


def show(request: Request, server: ServerRecord, key: str) -> JsonObject:
    """Return one metadata item for GET /servers/{id}/metadata/{key}.

    Raises:
        NotFound: The server does not have the item.
    """
    return {"meta": {key: _find_item(loads(server.meta), key)}}


def _find_item(metadata: Metadata, key: str) -> str:
    """Return the value of a metadata item, or raise NotFound."""
    if key not in metadata:
        raise errors.NotFound("Metadata item was not found")
    return metadata[key]


def add(request: Request, server: ServerRecord) -> JsonObject:
    """Add or replace metadata items for POST /servers/{id}/metadata, and return all items.

    For the errors see ``_change``.
    """
    return {"metadata": _change(request, server, lambda old: {**old, **request.body["metadata"]})}


def replace(request: Request, server: ServerRecord) -> JsonObject:
    """Replace all metadata items for PUT /servers/{id}/metadata, and return the new items.

    For the errors see ``_change``.
    """
    return {"metadata": _change(request, server, lambda old: request.body["metadata"])}


def put(request: Request, server: ServerRecord, key: str) -> JsonObject:
    """Set one metadata item for PUT /servers/{id}/metadata/{key}, and return the item.

    For further errors see ``_change``.

    Raises:
        BadRequest: The body does not contain the key of the path.
    """
    if key not in request.body["meta"]:
        raise errors.BadRequest("Request body and URI mismatch")
    _change(request, server, lambda old: {**old, **request.body["meta"]})
    return {"meta": request.body["meta"]}


def remove(request: Request, server: ServerRecord, key: str) -> None:
    """Remove one metadata item for DELETE /servers/{id}/metadata/{key}.

    Raises:
        NotFound: The server does not have the item.
        Locked: The server is locked, and the caller is not an administrator.
    """

    def without(old: Metadata) -> Metadata:
        _find_item(old, key)
        return {name: value for name, value in old.items() if name != key}

    _change(request, server, without, adds=False)


def _change(
    request: Request,
    server: ServerRecord,
    change: Callable[[Metadata], Metadata],
    adds: bool = True,
) -> Metadata:
    """Change the metadata in a transaction that locks the server's row, and return all items.

    Args:
        request: The request.
        server: The row of the server.
        change: Returns the new items. The argument is the items in the locked row.
        adds: Whether the change may add items, so that the limit of items is checked.

    Raises:
        Locked: The server is locked, and the caller is not an administrator.
        Forbidden: The change adds items, and the limit of items is exceeded.
        NotFound: The server does not exist any more, or ``change`` raises this error.
    """
    if server.locked and not request.is_admin:
        raise errors.Locked(server.id)
    limits = request.services.quota.source(request.context.project_id) if adds else None

    def work(tx: Connection) -> Metadata:
        def change_and_check(old: Metadata) -> Metadata:
            new = change(old)
            if limits is not None and len(new) > len(old):
                server_fields.check_metadata(new, lambda: limits(tx))
            return new

        changed: Metadata = servers.change_json(tx, server.id, "meta", change_and_check)
        return changed

    return request.write(work)


# --- tags ---
def tags(request: Request, server: ServerRecord) -> JsonObject:
    """Return the tags of a server for GET /servers/{id}/tags."""
    return {"tags": loads(server.tags)}


def has_tag(request: Request, server: ServerRecord, tag: str) -> None:
    """Raise NotFound unless the server has the tag, for GET /servers/{id}/tags/{tag}."""
    if tag not in loads(server.tags):
        raise _make_missing_tag_error(server, tag)


def replace_tags(request: Request, server: ServerRecord) -> JsonObject:
    """Replace all tags of a server for PUT /servers/{id}/tags, and return the new tags."""
    new = sorted(set(request.body["tags"]))
    return {"tags": request.write(servers.change_json, server.id, "tags", lambda old: new)}


def add_tag(request: Request, server: ServerRecord, tag: str) -> ApiResponse:
    """Add a tag for PUT /servers/{id}/tags/{tag}. Answer 201, or 204 if ``server`` has the tag.

    ``server`` was read before, so a tag that a parallel request has just added gives 201.

    Raises:
        BadRequest: The tag is invalid, or the server already has ``MAX_TAGS`` other tags.
        NotFound: The server was deleted meanwhile.
    """
    if not (_TAG.match(tag) and is_printable(tag)):
        raise errors.BadRequest(
            f"Tag '{tag[:80]}' is invalid. It must be a non empty string of printable characters "
            "without '/' and ',' and at most 60 characters long."
        )

    def with_tag(old: list[str]) -> list[str]:
        if tag not in old and len(old) >= MAX_TAGS:
            raise errors.BadRequest(f"The number of tags exceeded the per-server limit {MAX_TAGS}")
        return sorted({*old, tag})

    had_tag = tag in loads(server.tags)
    request.write(servers.change_json, server.id, "tags", with_tag)
    return ApiResponse(
        None,
        204 if had_tag else 201,
        {"Location": f"{request.links.root}servers/{server.id}/tags/{quote(tag)}"}
        if not had_tag
        else {},
    )


def remove_tag(request: Request, server: ServerRecord, tag: str) -> None:
    """Remove a tag for DELETE /servers/{id}/tags/{tag}.

    Raises:
        NotFound: The server does not have the tag.
    """

    def without(old: list[str]) -> list[str]:
        if tag not in old:
            raise _make_missing_tag_error(server, tag)
        return [other for other in old if other != tag]

    request.write(servers.change_json, server.id, "tags", without)


def remove_tags(request: Request, server: ServerRecord) -> None:
    """Remove all tags for DELETE /servers/{id}/tags."""
    request.write(servers.change_json, server.id, "tags", lambda old: [])


def _make_missing_tag_error(server: ServerRecord, tag: str) -> errors.NotFound:
    return errors.NotFound(f"Server {server.id} has no tag '{tag}'")
