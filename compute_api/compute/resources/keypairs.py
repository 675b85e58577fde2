# SPDX-License-Identifier: Apache-2.0
"""Handlers of key pairs. Since 2.10 administrators have access to the key pairs of all users."""

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


def _find_owner(request: Request, operation: str) -> str:
    """Return the user in the query (since 2.10), or else the caller, after a check of the policy.

    ``operation`` is the last part of the policy rule, for example show.

    Raises:
        Forbidden: The caller may not access the key pairs of this user.
    """
    assert request.route.query is not None
    has_parameter = "user_id" in request.route.query.at(request.version).document["properties"]
    requested_id = request.query_value("user_id") if has_parameter else None
    user_id = requested_id or request.context.user_id
    request.require(_RULE + operation, {"user_id": user_id})
    return user_id


def index(request: Request) -> JsonObject:
    """Return all key pairs of a user for GET /os-keypairs before 2.35."""
    return {
        "keypairs": view.many(
            request.read(keypairs.page, _find_owner(request, "index")), request.version
        )
    }


def page(request: Request) -> JsonObject:
    """Return one page of a user's key pairs for GET /os-keypairs since 2.35.

    Raises:
        BadRequest: The marker is not the name of a key pair of the user.
        Forbidden: The caller may not access the key pairs of this user.
    """
    user_id = _find_owner(request, "index")
    if request.limit == 0:
        return {"keypairs": []}
    rows = request.read(keypairs.page, user_id, request.query_value("marker"), request.limit)
    items = view.many(rows, request.version)
    return request.page("keypairs", "os-keypairs", items, rows[-1].name if rows else None)


def show(request: Request, name: str) -> JsonObject:
    """Return one key pair for GET /os-keypairs/{name}.

    Raises:
        NotFound: The user has no such key pair.
        Forbidden: The caller may not access the key pairs of this user.
    """
    return view.one(
        request.read(keypairs.show, _find_owner(request, "show"), name), request.version
    )


def delete(request: Request, name: str) -> None:
    """Delete a key pair for DELETE /os-keypairs/{name}.

    Raises:
        NotFound: The user has no such key pair.
        Forbidden: The caller may not access the key pairs of this user.
    """
    request.write(keypairs.delete, _find_owner(request, "delete"), name)


def create(request: Request) -> JsonObject:
    """Import a public key, or (before 2.92) generate a key pair, for POST /os-keypairs.

    Only the public key is stored. The response contains the private key of a generated pair.

    Raises:
        BadRequest: The public key is invalid.
        Forbidden: The quota is exhausted, or the caller may not create key pairs of this user.
        Conflict: The user has a key pair with this name.
    """
    body = request.body["keypair"]
    user_id = body.get("user_id") or request.context.user_id
    request.require(_RULE + "create", {"user_id": user_id})
    kind, public, private = body.get("type", "ssh"), body.get("public_key"), None
    if public is None:
        new_key = key_material.generate(kind, user_id)
        public, fingerprint, private = new_key.public, new_key.fingerprint, new_key.private
    else:
        fingerprint = key_material.fingerprint(kind, public)

    limits = request.services.quota.source(request.context.project_id)

    def work(tx: Connection) -> KeypairRow:
        # The limit counts the key pairs of the user in all projects.
        quotas.lock(tx, user_id)
        limit = limits(tx).of("key_pairs")
        if 0 <= limit <= keypairs.count(tx, user_id):
            raise errors.Forbidden("Quota exceeded, too many key pairs.")
        return keypairs.create(
            tx,
            {
                "user_id": user_id,
                "name": body["name"].strip(),
                "type": kind,
                "fingerprint": fingerprint,
                "public_key": public,
            },
            imported=private is None,
        )

    return view.new(request.make(keypairs.is_made, work), request.version, private)
