# SPDX-License-Identifier: Apache-2.0
"""What a rebuild makes of its body: the server's new columns, a password, and the server as the answer.

The image is judged as for a new server, with the flavor that the server has. Whatever is not named stays as it is.
Called by ``server_preparing``; the row is changed by the transaction that begins the action.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common import errors, models, states
from common.store import actions, keypairs, servers
from common.store.servers import loads
from common.vault import Vault
from common.wire import from_wire, to_wire
from compute_api import passwords
from compute_api.request import Answer, Request
from compute_api.resources import server_parts as parts
from compute_api.resources.server_preparing import Begin, Prepared, refuse_changed
from compute_api.resources.servers import rebuilt
from compute_api.validation import truth

#: Key of the body -> column of the server and what stands there for the value.
_COLUMNS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", str.strip),
    "metadata": ("meta", dict),
    "description": ("description", lambda value: value),
    "user_data": ("user_data", lambda value: value or None),
    "trusted_image_certificates": ("trusted_image_certificates", lambda value: value),
    "hostname": ("hostname", lambda value: value),
    "OS-DCF:diskConfig": ("disk_config", lambda value: value),
    "accessIPv4": ("access_ip_v4", parts.access_ip),
    "accessIPv6": ("access_ip_v6", parts.access_ip),
}
#: Columns that no action guards, whatever is being done to the server.
_UNGUARDED = {"name", "meta", "description", "hostname", "disk_config", "access_ip_v4", "access_ip_v6"}


def prepare(request: Request, server: Any, given: dict[str, Any]) -> Prepared:
    """Everything that can be wrong with a rebuild is found here."""
    if "trusted_image_certificates" in given:
        request.require("os_compute_api:servers:rebuild:trusted_certs")
    parts.check_metadata(given.get("metadata", {}), request.limits)
    files = parts.personality(given, request.limits)
    key = _key(request, given)
    image = request.services.images.show(given["imageRef"], request.context.token)
    flavor = from_wire(models.Flavor, loads(server.flavor))
    parts.check_image(image, flavor)
    parts.check_hardware(flavor, image.ref.properties)
    parts.check_same_place(flavor, loads(server.image or "{}").get("properties", {}), image.ref.properties)
    kept = {"trusted_image_certificates": loads(server.trusted_image_certificates or "null")}
    parts.check_signature({**kept, **given}, image)
    changes = {column: made(given[name]) for name, (column, made) in _COLUMNS.items() if name in given}
    changes |= {"image_id": image.ref.id, "image": to_wire(image.ref), **key}
    args: dict[str, Any] = {"preserve_ephemeral": truth(given.get("preserve_ephemeral", False))}
    if files:
        changes["config_drive"] = True
    password = given.get("adminPass") or passwords.new()

    def answer() -> Answer:
        row = request.read(servers.show, server.id, request.scope)
        links = request.links.of("servers", server.id)
        return Answer(rebuilt(request, row, password), 202, {"Location": links[0]["href"]})
    return Prepared(args, password, changes, answer, _begins(server, image.ref.id, request.services.vault), files=files)


def _begins(server: Any, image_id: str, vault: Vault | None) -> Begin:
    """With another image the action keeps what the row says, for when its host may not have it; and what it writes of
    what can be changed meanwhile. User data is kept sealed."""
    def begin(tx: Any, rows: Sequence[states.Action], server_id: str, *, args: dict[str, Any], changes: dict[str, Any],
              project_id: str | None, **more: Any) -> str:
        actions.take_lock(tx, server_id, project_id)
        row = servers.show(tx, server_id)
        refuse_changed(row, server)                 # the image service was asked since it was read
        if image_id != row.image_id:
            before = servers.written(row, changes)
            if vault is not None and before.get("user_data"):
                kept = vault.open(more["secrets"]) if more["secrets"] else {}
                more["secrets"] = vault.seal({**kept, "before": {"user_data": before.pop("user_data")}})
            args = {**args, "before": before,
                    "wrote": {name: value for name, value in changes.items() if name in _UNGUARDED}}
        return actions.begin(tx, rows, server_id, args=args, changes=changes, project_id=project_id, **more)
    return begin


def _key(request: Request, given: dict[str, Any]) -> dict[str, Any]:
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
