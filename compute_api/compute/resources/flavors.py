# SPDX-License-Identifier: Apache-2.0
"""Handlers of flavors, of access to flavors, and of extra specs."""

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
    """Return one page of flavors with a few fields, such as id and name, for GET /flavors."""
    return _list(request, "flavors", names_only=True)


def detail(request: Request) -> JsonObject:
    """Return one page of flavors with all fields for GET /flavors/detail."""
    return _list(request, "flavors/detail", names_only=False)


def _list(request: Request, path: str, names_only: bool) -> JsonObject:
    if request.limit == 0:
        return {"flavors": []}
    rows = request.read(
        flavors.page,
        project_id=request.scope,
        is_public=_parse_public_filter(request),
        min_ram=_parse_minimum(request, "minRam"),
        min_disk=_parse_minimum(request, "minDisk"),
        name=request.query_value("name") if "name" in _list_parameters(request) else None,
        sort_key=request.query_value("sort_key") or "flavorid",
        descending=request.query_value("sort_dir") == "desc",
        marker=request.query_value("marker"),
        limit=request.limit,
    )
    items = view.many(rows, request.links, request.version, request.allowed(view.RULES), names_only)
    return request.page("flavors", path, items, rows[-1].flavorid if rows else None)


def _list_parameters(request: Request) -> JsonObject:
    """Return the schemas of the query parameters at this version, by name."""
    assert request.route.query is not None
    parameters: JsonObject = request.route.query.at(request.version).document["properties"]
    return parameters


def _parse_public_filter(request: Request) -> bool | None:
    """Return the filter on public flavors. None means all flavors that the caller may use.

    Only administrators can choose the filter. Their default is public flavors. For other callers
    the result is None.

    Raises:
        BadRequest: An administrator's is_public is neither a boolean nor "none".
    """
    text = request.query_value("is_public")
    if not request.is_admin:
        return None
    if text is None:
        return True
    if text.lower() == "none":
        return None
    if text.lower() not in (
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
        raise errors.BadRequest(f"Invalid is_public filter [{text[:40]}]")
    return is_true(text)


def _parse_minimum(request: Request, name: str) -> int:
    text = request.query_value(name)
    if text is None:
        return 0
    try:
        return max(0, min(int(text), 2**31 - 1))
    except ValueError as problem:
        raise errors.BadRequest(f"Invalid {name} filter [{text[:40]}]") from problem


def show(request: Request, flavor_id: str) -> JsonObject:
    """Return one flavor for GET /flavors/{id}.

    Raises:
        NotFound: The flavor does not exist for the caller.
    """
    return _build_body(request, request.read(flavors.show, flavor_id, request.scope))


def _build_body(request: Request, row: FlavorRow) -> JsonObject:
    return view.one(row, request.links, request.version, request.allowed(view.RULES))


def create(request: Request) -> JsonObject:
    """Create a flavor for POST /flavors.

    Raises:
        Conflict: A flavor has the id or the name.
    """
    body = request.body["flavor"]
    ident = body.get("id")
    row = request.make(
        flavors.is_made,
        flavors.create,
        {
            "flavorid": ids.new() if ident in (None, "auto") else str(ident).strip(),
            "name": body["name"].strip(),
            "vcpus": int(body["vcpus"]),
            "memory_mb": int(body["ram"]),
            "root_gb": int(body["disk"]),
            "ephemeral_gb": int(body.get("OS-FLV-EXT-DATA:ephemeral", 0)),
            "swap_mb": int(body.get("swap", 0)),
            "rxtx_factor": float(body.get("rxtx_factor", 1.0)),
            "description": body.get("description"),
            "is_public": is_true(body.get("os-flavor-access:is_public", True)),
        },
    )
    return _build_body(request, row)


def update(request: Request, flavor_id: str) -> JsonObject:
    """Change the description of a flavor for PUT /flavors/{id}.

    Raises:
        NotFound: The flavor does not exist.
    """
    return _build_body(
        request, request.write(flavors.describe, flavor_id, request.body["flavor"]["description"])
    )


def delete(request: Request, flavor_id: str) -> None:
    """Delete a flavor for DELETE /flavors/{id}. Servers keep a copy of the flavor.

    Raises:
        NotFound: The flavor does not exist.
    """
    request.write(flavors.delete, flavor_id)


# --- access ---
def access(request: Request, flavor_id: str) -> JsonObject:
    """Return the projects with access to a private flavor, for GET /flavors/{id}/os-flavor-access.

    Raises:
        NotFound: The flavor does not exist, or is public.
    """

    def work(tx: Connection) -> JsonObject:
        row = flavors.show(tx, flavor_id)
        if row.is_public:
            raise errors.NotFound("Access list not available for public flavors.")
        return view.access(row, flavors.access(tx, row.id))

    return request.read(work)


def change_access(request: Request, flavor_id: str) -> JsonObject:
    """Grant or revoke a project's access to a flavor before 2.7, also for public flavors.

    The response contains the projects with access.

    Raises:
        Forbidden: The policy does not allow the change.
        Conflict: The project to be added has access already.
        NotFound: The flavor does not exist, or the project to be removed has no access.
    """
    return _change_access(request, flavor_id, public=True)


def change_access_strictly(request: Request, flavor_id: str) -> JsonObject:
    """Grant or revoke a project's access to a flavor since 2.7.

    The response contains the projects with access.

    Raises:
        Forbidden: The policy does not allow the change.
        Conflict: The project to be added has access already, because of a grant or because the
            flavor is public.
        NotFound: The flavor does not exist, or the project to be removed has no access.
    """
    return _change_access(request, flavor_id, public=False)


def _change_access(request: Request, flavor_id: str, public: bool) -> JsonObject:
    [(action, arguments)] = request.body.items()
    adds = action == "addTenantAccess"
    request.require(_ACCESS + ("add_tenant_access" if adds else "remove_tenant_access"))

    def work(tx: Connection) -> JsonObject:
        row = flavors.show(tx, flavor_id)
        if adds and row.is_public and not public:
            raise errors.Conflict("Can not add access to a public flavor.")
        (flavors.grant if adds else flavors.revoke)(tx, row, arguments["tenant"])
        return view.access(row, flavors.access(tx, row.id))

    return request.write(work)


# --- extra specs ---
def extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """Return all extra specs of a flavor for GET /flavors/{id}/os-extra_specs."""
    return {"extra_specs": request.read(flavors.show, flavor_id, request.scope).extra_specs}


def add_extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """Add or overwrite extra specs for POST /flavors/{id}/os-extra_specs.

    This refuses only reserved names. Since 2.86 ``add_known_extra_specs`` validates all names and
    values first. The response contains the extra specs of the request.

    Raises:
        BadRequest: A name is reserved for Kilonova.
        NotFound: The flavor does not exist.
    """
    extra_specs_known.check_names(request.body["extra_specs"])
    specs = {key: str(value) for key, value in request.body["extra_specs"].items()}
    request.write(flavors.set_extra_specs, flavor_id, specs)
    return {"extra_specs": specs}


def add_known_extra_specs(request: Request, flavor_id: str) -> JsonObject:
    """Add or overwrite extra specs after validation of names and values, since 2.86."""
    extra_specs_known.check(request.body["extra_specs"])
    return add_extra_specs(request, flavor_id)


def extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """Return one extra spec for GET /flavors/{id}/os-extra_specs/{key}.

    Raises:
        NotFound: The flavor does not exist for the caller, or has no such extra spec.
    """
    specs = request.read(flavors.show, flavor_id, request.scope).extra_specs
    if key not in specs:
        raise flavors.no_extra_spec(flavor_id, key)
    return {key: specs[key]}


def put_extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """Set one extra spec for PUT /flavors/{id}/os-extra_specs/{key}.

    Since 2.86 ``put_known_extra_spec`` validates the name and the value first. Before 2.86 they are
    not validated.

    Raises:
        BadRequest: The name is reserved for Kilonova, or the body does not contain the key of the
            path.
        NotFound: The flavor does not exist.
    """
    if key not in request.body:
        raise errors.BadRequest("Request body and URI mismatch")
    extra_specs_known.check_names(request.body)
    specs = request.write(flavors.set_extra_specs, flavor_id, {key: str(request.body[key])})
    return {key: specs[key]}


def put_known_extra_spec(request: Request, flavor_id: str, key: str) -> JsonObject:
    """Set one extra spec after validation of the name and the value, since 2.86."""
    extra_specs_known.check(request.body)
    return put_extra_spec(request, flavor_id, key)


def remove_extra_spec(request: Request, flavor_id: str, key: str) -> ApiResponse:
    """Remove one extra spec for DELETE /flavors/{id}/os-extra_specs/{key}.

    Raises:
        NotFound: The flavor does not exist, or has no such extra spec.
    """
    request.write(flavors.set_extra_specs, flavor_id, {}, remove=key)
    return ApiResponse()
