# SPDX-License-Identifier: Apache-2.0
"""Key pairs of the caller; for admins (since 2.10) also of other users."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import KeypairRow
from common.store.tenants import keypairs, quotas
from compute_api.compute.request.request import Request
from compute_api.compute.resources import key_material
from compute_api.compute.views import keypairs as view

_RULE = "os_compute_api:os-keypairs:"


def _owner(request: Request, operation: str) -> str:
    """Whose keys, if the caller may."""
    assert request.route.query is not None
    knows = "user_id" in request.route.query.at(request.version).document["properties"]
    asked = request.first("user_id") if knows else None
    user_id = asked or request.context.user_id
    request.require(_RULE + operation, {"user_id": user_id})
    return user_id


def index(request: Request) -> JsonObject:
    """GET /os-keypairs, all of them (before 2.35)."""
    return {
        "keypairs": view.many(
            request.read(keypairs.page, _owner(request, "index")), request.version
        )
    }


def page(request: Request) -> JsonObject:
    """GET /os-keypairs, in pages."""
    user_id = _owner(request, "index")
    if request.limit == 0:
        return {"keypairs": []}
    rows = request.read(keypairs.page, user_id, request.first("marker"), request.limit)
    items = view.many(rows, request.version)
    return request.page("keypairs", "os-keypairs", items, rows[-1].name if rows else None)


def show(request: Request, name: str) -> JsonObject:
    """GET /os-keypairs/{name}"""
    return view.one(request.read(keypairs.show, _owner(request, "show"), name), request.version)


def delete(request: Request, name: str) -> None:
    """DELETE /os-keypairs/{name}"""
    request.write(keypairs.delete, _owner(request, "delete"), name)


def create(request: Request) -> JsonObject:
    """POST /os-keypairs: import a public key, or make one."""
    given = request.body["keypair"]
    user_id = given.get("user_id") or request.context.user_id
    request.require(_RULE + "create", {"user_id": user_id})
    kind, public, private = given.get("type", "ssh"), given.get("public_key"), None
    if public is None:
        made = key_material.generate(kind, user_id)
        public, printed, private = made.public, made.fingerprint, made.private
    else:
        printed = key_material.fingerprint(kind, public)

    limits = request.services.quota.source(request.context.project_id)

    def work(tx: Connection) -> KeypairRow:
        quotas.lock(tx, user_id)  # a user's key pairs are counted over all projects
        limit = limits(tx).of("key_pairs")
        if 0 <= limit <= keypairs.count(tx, user_id):
            raise errors.Forbidden("Quota exceeded, too many key pairs.")
        return keypairs.create(
            tx,
            {
                "user_id": user_id,
                "name": given["name"].strip(),
                "type": kind,
                "fingerprint": printed,
                "public_key": public,
            },
            imported=private is None,
        )

    return view.new(request.make(keypairs.is_made, work), request.version, private)
