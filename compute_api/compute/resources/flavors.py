# SPDX-License-Identifier: Apache-2.0
"""Flavors: list, show, create, update, delete; access; extra specs."""

from __future__ import annotations

from common.domain import errors, ids
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import FlavorRow
from common.store.tenants import flavors
from compute_api.compute.request.request import Request
from compute_api.compute.resources import extra_specs as extra_specs_known
from compute_api.compute.views import flavors as view
from compute_api.http.response import ApiResponse
from compute_api.http.validation import is_true

_ACCESS = "os_compute_api:os-flavor-access:"


def index(request: Request) -> JsonObject:
    """GET /flavors"""
    return _list(request, "flavors", names_only=True)


def detail(request: Request) -> JsonObject:
    """GET /flavors/detail"""
    return _list(request, "flavors/detail", names_only=False)


def _list(request: Request, path: str, names_only: bool) -> JsonObject:
    if request.limit == 0:
        return {"flavors": []}
    rows = request.read(
        flavors.page,
        project_id=request.scope,
        is_public=_is_public(request),
        min_ram=_least(request, "minRam"),
        min_disk=_least(request, "minDisk"),
        name=request.first("name") if "name" in _served(request) else None,
        sort_key=request.first("sort_key") or "flavorid",
        descending=request.first("sort_dir") == "desc",
        marker=request.first("marker"),
        limit=request.limit,
    )
    items = view.many(rows, request.links, request.version, request.allowed(view.RULES), names_only)
    return request.page("flavors", path, items, rows[-1].flavorid if rows else None)


def _served(request: Request) -> JsonObject:
    """The query parameters that exist at this version."""
    assert request.route.query is not None
    known: JsonObject = request.route.query.at(request.version).document["properties"]
    return known


def _is_public(request: Request) -> bool | None:
    """Everybody sees public flavors and those they were given; admins choose, and without a choice
    see public ones."""
    given = request.first("is_public")
    if not request.is_admin:
        return None
    if given is None:
        return True
    if given.lower() == "none":
        return None
    if given.lower() not in (
        "true",
        "false",
        "1",
        "0",
        "t",
        "f",
        "yes",
        "no",
        "y",
        "n",
        "on",
        "off",
    ):
        raise errors.BadRequest(f"Invalid is_public filter [{given[:40]}]")
    return is_true(given)


def _least(request: Request, name: str) -> int:
    text = request.first(name)
    if text is None:
        return 0
    try:
        return max(0, min(int(text), 2**31 - 1))
    except ValueError as problem:
        raise errors.BadRequest(f"Invalid {name} filter [{text[:40]}]") from problem


def show(request: Request, flavor_id: str) -> JsonObject:
    """GET /flavors/{id}"""
    return _body(request, request.read(flavors.show, flavor_id, request.scope))


def _body(request: Request, row: FlavorRow) -> JsonObject:
    return view.one(row, request.links, request.version, request.allowed(view.RULES))


def create(request: Request) -> JsonObject:
    """POST /flavors"""
    given = request.body["flavor"]
    ident = given.get("id")
    row = request.make(
        flavors.is_made,
        flavors.create,
        {
            "flavorid": ids.new() if ident in (None, "auto") else str(ident).strip(),
            "name": given["name"].strip(),
            "vcpus": int(given["vcpus"]),
            "memory_mb": int(given["ram"]),
            "root_gb": int(given["disk"]),
            "ephemeral_gb": int(given.get("OS-FLV-EXT-DATA:ephemeral", 0)),
            "swap_mb": int(given.get("swap", 0)),
            "rxtx_factor": float(given.get("rxtx_factor", 1.0)),
            "description": given.get("description"),
            "is_public": is_true(given.get("os-flavor-access:is_public", True)),
        },
    )
    return _body(request, row)


def update(request: Request, flavor_id: str) -> JsonObject:
    """PUT /flavors/{id}: the description."""
    return _body(
        request, request.write(flavors.describe, flavor_id, request.body["flavor"]["description"])
    )


def delete(request: Request, flavor_id: str) -> None:
    """DELETE /flavors/{id}"""
    request.write(flavors.delete, flavor_id)


# --- access ---
def access(request: Request, flavor_id: str) -> JsonObject:
    """GET /flavors/{id}/os-flavor-access"""

    def work(tx: Connection) -> JsonObject:
        row = flavors.show(tx, flavor_id)
        if row.is_public:
            raise errors.NotFound("Access list not available for public flavors.")
        return view.access(row, flavors.access(tx, row.id))

    return request.read(work)


def change_access(request: Request, flavor_id: str) -> JsonObject:
    """POST /flavors/{id}/action, before 2.7: access to a public flavor means nothing and is no
    error."""
    return _change_access(request, flavor_id, public=True)


def change_access_strictly(request: Request, flavor_id: str) -> JsonObject:
    """POST /flavors/{id}/action: a public flavor needs no access given."""
    return _change_access(request, flavor_id, public=False)


def _change_access(request: Request, flavor_id: str, public: bool) -> JsonObject:
    [(action, given)] = request.body.items()
    adds = action == "addTenantAccess"
    request.require(_ACCESS + ("add_tenant_access" if adds else "remove_tenant_access"))

    def work(tx: Connection) -> JsonObject:
        row = flavors.show(tx, flavor_id)
        if adds and row.is_public and not public:
            raise errors.Conflict("Can not add access to a public flavor.")
        (flavors.grant if adds else flavors.revoke)(tx, row, given["tenant"])
        return view.access(row, flavors.access(tx, row.id))

    return request.write(work)


# --- extra specs ---
def extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """GET /flavors/{id}/os-extra_specs"""
    return {"extra_specs": request.read(flavors.show, flavor_id, request.scope).extra_specs}


def add_extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """POST /flavors/{id}/os-extra_specs, before 2.86"""
    extra_specs_known.check_names(request.body["extra_specs"])
    given = {key: str(value) for key, value in request.body["extra_specs"].items()}
    request.write(flavors.set_extra_specs, flavor_id, given)
    return {"extra_specs": given}


def add_known_extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """POST /flavors/{id}/os-extra_specs: names and values are checked."""
    extra_specs_known.check(request.body["extra_specs"])
    return add_extra_specs(request, flavor_id)


def extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """GET /flavors/{id}/os-extra_specs/{key}"""
    specs = request.read(flavors.show, flavor_id, request.scope).extra_specs
    if key not in specs:
        raise flavors.no_extra_spec(flavor_id, key)
    return {key: specs[key]}


def put_extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """PUT /flavors/{id}/os-extra_specs/{key}, before 2.86"""
    if key not in request.body:
        raise errors.BadRequest("Request body and URI mismatch")
    extra_specs_known.check_names(request.body)
    specs = request.write(flavors.set_extra_specs, flavor_id, {key: str(request.body[key])})
    return {key: specs[key]}


def put_known_extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """PUT /flavors/{id}/os-extra_specs/{key}: name and value are checked."""
    extra_specs_known.check(request.body)
    return put_extra_spec(request, flavor_id, key)


def remove_extra_spec(request: Request, flavor_id: str, key: str) -> ApiResponse:
    """DELETE /flavors/{id}/os-extra_specs/{key}"""
    request.write(flavors.set_extra_specs, flavor_id, {}, remove=key)
    return ApiResponse()
