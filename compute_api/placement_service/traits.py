# SPDX-License-Identifier: Apache-2.0
"""/traits and /resource_providers/UUID/traits: what providers are and can."""
from __future__ import annotations

from typing import Any

from common import errors
from common.store import allocations, providers, traits
from common.store.engine import Connection, Row
from compute_api.placement_service.request import Answer, BadQuery, Request
from compute_api.placement_service.schemas import CUSTOM_TRAIT


def index(request: Request) -> Answer:
    """Two statements; name=in:A,B or startswith:PREFIX, associated=true or false."""
    associated = (request.first("associated") or "").lower()
    if associated not in ("", "true", "false") or "associated" in request.query and not associated:
        raise BadQuery('The query parameter "associated" only accepts "true" or "false"')
    keep = _filter(request.first("name"))
    found = request.read(traits.list_all, None if not associated else associated == "true")
    return Answer({"traits": [name for name in found if keep(name)]})


def _filter(text: str | None) -> Any:
    if text is None:
        return lambda name: True
    how, colon, what = text.partition(":")
    if not colon or how not in ("in", "startswith"):
        raise BadQuery("Badly formatted name parameter. Expected name query string parameter in form: "
                       f'?name=[in|startswith]:[name1,name2|prefix]. Got: "{text[:300]}"')
    names = set(what.split(","))
    return names.__contains__ if how == "in" else lambda name: name.startswith(what)


def show(request: Request, name: str) -> Answer:
    """At most three statements."""
    return Answer(modified=request.read(traits.show, name))


def create(request: Request, name: str) -> Answer:
    """201: made; 204: it was there."""
    try:
        CUSTOM_TRAIT.check_body(request.version, name)
    except errors.BadRequest as problem:
        raise errors.BadRequest('The trait is invalid. A valid trait must be no longer than 255 characters, start with '
                                'the prefix "CUSTOM_" and use following characters: "A"-"Z", "0"-"9" and "_"'
                                ) from problem
    made = request.write(traits.create, name)
    return Answer(status=201 if made else 204, headers={"Location": f"{request.base}/traits/{name}"})


def delete(request: Request, name: str) -> None:
    """Only one that nobody has."""
    request.write(traits.delete, name)


def of_provider(request: Request, provider_uuid: str) -> Answer:
    """Two statements."""
    def work(tx: Connection) -> tuple[Row[Any], list[str]]:
        provider = providers.show(tx, provider_uuid)
        return provider, traits.of(tx, [provider.id])[provider.id]
    return _view(*request.read(work))


def put(request: Request, provider_uuid: str) -> Answer:
    """These by hand; what a host reports stays."""
    def work(tx: Connection) -> tuple[Row[Any], list[str]]:
        provider = providers.lock(tx, provider_uuid, request.body["resource_provider_generation"])
        found = traits.put(tx, provider, request.body["traits"])
        allocations.touch(tx, [provider.id])
        return providers.show(tx, provider_uuid), found
    return _view(*request.write(work))


def clear(request: Request, provider_uuid: str) -> None:
    """None by hand."""
    def work(tx: Connection) -> None:
        provider = providers.lock(tx, provider_uuid)
        traits.put(tx, provider, ())
        allocations.touch(tx, [provider.id])
    request.write(work)


def _view(provider: Row[Any], found: list[str]) -> Answer:
    return Answer({"resource_provider_generation": provider.generation, "traits": found}, modified=provider.changed_at)
