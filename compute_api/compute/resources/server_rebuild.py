# SPDX-License-Identifier: Apache-2.0
"""What a rebuild makes of its body: new columns of the server, a password, and the server as the
answer.

The image is checked as for a new server, with the server's flavor. What the body does not name
stays as it is. The row changes in the transaction that begins the action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common import errors, models, states
from common.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import ServerRecord
from common.store.servers import actions, servers
from common.store.servers.servers import loads
from common.store.tenants import keypairs
from common.vault import Vault
from common.wire import from_wire, to_wire
from compute_api.compute import passwords
from compute_api.compute.request import Request
from compute_api.compute.resources import server_parts as parts
from compute_api.compute.resources.server_preparers import (
    Begin,
    PreparedAction,
    refuse_changed,
    refuse_volume_backed,
)
from compute_api.compute.resources.servers import rebuilt
from compute_api.edge.response import ApiResponse
from compute_api.edge.validation import is_true

#: Key of the body -> column of the server and what stands there for the value.
_COLUMNS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", str.strip),
    "metadata": ("meta", dict),
    "description": ("description", lambda value: value),
    "trusted_image_certificates": ("trusted_image_certificates", lambda value: value),
    "hostname": ("hostname", lambda value: value),
    "OS-DCF:diskConfig": ("disk_config", lambda value: value),
    "accessIPv4": ("access_ip_v4", parts.access_ip),
    "accessIPv6": ("access_ip_v6", parts.access_ip),
}
#: Columns that no action guards, whatever is being done to the server.
_UNGUARDED = {
    "name",
    "meta",
    "description",
    "hostname",
    "disk_config",
    "access_ip_v4",
    "access_ip_v6",
}


def prepare(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """Everything that can be wrong with a rebuild is found here."""
    if "trusted_image_certificates" in given:
        request.require("os_compute_api:servers:rebuild:trusted_certs")
    refuse_volume_backed(
        request,
        server,
        f"Instance {server.id} boots from a volume, which this cloud does not write anew; make a new "
        "server.",
    )
    parts.check_metadata(given.get("metadata", {}), request.limits)
    files = parts.personality(given, request.limits)
    key = _key(request, given)
    image = request.services.images.show(given["imageRef"], request.context.token)
    flavor = from_wire(models.Flavor, loads(server.flavor))
    parts.check_image(image, flavor)
    parts.check_hardware(flavor, image.ref.properties)
    parts.check_same_place(
        flavor, loads(server.image or "{}").get("properties", {}), image.ref.properties
    )
    kept = {"trusted_image_certificates": loads(server.trusted_image_certificates or "null")}
    parts.check_signature({**kept, **given}, image)
    changes = {
        column: made(given[name]) for name, (column, made) in _COLUMNS.items() if name in given
    }
    changes |= {"image_id": image.ref.id, "image": to_wire(image.ref), **key}
    if "user_data" in given:
        changes["user_data"] = passwords.sealed_text(request.services.vault, given["user_data"])
    args: JsonObject = {"preserve_ephemeral": is_true(given.get("preserve_ephemeral", False))}
    if files:
        changes["config_drive"] = True
    password = given.get("adminPass") or passwords.generate()

    def answer() -> ApiResponse:
        row = request.read(servers.show, server.id, request.scope)
        links = request.links.of("servers", server.id)
        return ApiResponse(rebuilt(request, row, password), 202, {"Location": links[0]["href"]})

    return PreparedAction(
        args,
        password,
        changes,
        answer,
        _begins(server, image.ref.id, request.services.vault),
        files=files,
    )


def _begins(server: ServerRecord, image_id: str, vault: Vault | None) -> Begin:
    """With another image the action keeps what the row says, for when its host may not have it; and
    what it writes of what can be changed meanwhile. User data is kept encrypted."""

    def begin(
        tx: Connection,
        rows: Sequence[states.Action],
        server_id: str,
        *,
        args: JsonObject,
        changes: JsonObject,
        project_id: str | None,
        **more: Any,
    ) -> str:
        actions.take_lock(tx, server_id, project_id)
        row = servers.show(tx, server_id)
        refuse_changed(row, server)  # the image service was asked since it was read
        if image_id != row.image_id:
            before = servers.written(row, changes)
            if vault is not None and before.get("user_data"):
                kept = vault.open(more["secrets"]) if more["secrets"] else {}
                more["secrets"] = vault.seal(
                    {**kept, "before": {"user_data": before.pop("user_data")}}
                )
            args = {
                **args,
                "before": before,
                "wrote": {name: value for name, value in changes.items() if name in _UNGUARDED},
            }
        return actions.begin(
            tx, rows, server_id, args=args, changes=changes, project_id=project_id, **more
        )

    return begin


def _key(request: Request, given: JsonObject) -> JsonObject:
    """The columns of the key pair that the caller, not the server's maker, has under this name."""
    if "key_name" not in given:
        return {}
    if given["key_name"] is None:
        return {"key_name": None, "key_data": None}
    try:
        key = request.read(keypairs.show, request.context.user_id, given["key_name"])
    except errors.NotFound as problem:
        raise errors.BadRequest("Invalid key_name provided.") from problem
    return {"key_name": key.name, "key_data": key.public_key}
