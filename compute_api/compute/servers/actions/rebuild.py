# SPDX-License-Identifier: Apache-2.0
"""Prepare a rebuild: new columns of the server, a password, and the server as the response.

The image is checked like that of a new server, with the server's flavor. Fields that the body does
not contain stay unchanged. The row changes in the transaction that begins the action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.clients import image_checks
from common.clients.image import Image
from common.domain import device_names, errors, hardware, models, states
from common.domain.json_types import JsonObject
from common.domain.wire import from_wire, to_wire
from common.security.vault import Vault
from common.store.engine import Connection
from common.store.rows import BlockDeviceRow, ServerRecord
from common.store.servers import actions, servers, volumes
from common.store.servers.servers import loads
from common.store.tenants import keypairs
from compute_api.compute.request import passwords
from compute_api.compute.request.request import Request
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.servers.create.checks import check_signature
from compute_api.compute.servers.disks.block_devices import IMAGE_MAPPINGS
from compute_api.compute.servers.prepared_action import Begin, PreparedAction, refuse_changed
from compute_api.compute.servers.servers import show_rebuilt
from compute_api.http.microversions import Range
from compute_api.http.response import ApiResponse
from compute_api.http.validation import is_true

#: Key of the body -> column of the server, and the conversion of the value.
_COLUMNS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", str.strip),
    "metadata": ("meta", dict),
    "description": ("description", lambda value: value),
    "trusted_image_certificates": ("trusted_image_certificates", lambda value: value),
    "hostname": ("hostname", lambda value: value),
    "OS-DCF:diskConfig": ("disk_config", lambda value: value),
    "accessIPv4": ("access_ip_v4", server_fields.parse_access_ip),
    "accessIPv6": ("access_ip_v6", server_fields.parse_access_ip),
}
_WRITES_VOLUMES = Range("2.93")
#: Columns that other requests may change while the rebuild runs.
_UNGUARDED = {
    "name",
    "meta",
    "description",
    "hostname",
    "disk_config",
    "access_ip_v4",
    "access_ip_v6",
}


def prepare(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Check a rebuild, and prepare it with its arguments and new columns of the server.

    The response is the server after the begin, with the new password.

    Raises:
        BadRequest: A field is invalid, or the image cannot be used.
        Forbidden: The caller may not use a field, a limit is exceeded, or hosts could not download
            the image.
        Conflict: Another request has changed the flavor or the image. This is raised when the
            action begins.
        NotFound: Before 2.93, the root volume does not exist for the caller.
        Unavailable: An external service does not answer.
    """
    if "trusted_image_certificates" in body:
        request.require("os_compute_api:servers:rebuild:trusted_certs")
    server_fields.check_metadata(body.get("metadata", {}), request.limits)
    files = server_fields.parse_personality(body, request.limits)
    key = _read_key_columns(request, body)
    image = request.image(body["imageRef"])
    flavor = from_wire(models.Flavor, loads(server.flavor))
    root = request.read(volumes.root_of, server.id) if server.volumes else None
    if root is None:
        image_checks.check_disk(image)
        image_checks.check_flavor(image, flavor)
    reimage = root is not None and _check_reimage(request, root, image)
    image_checks.check_hardware(flavor, image.ref.properties)
    _check_same_place(
        flavor, loads(server.image or "{}").get("properties", {}), image.ref.properties
    )
    old_values = {"trusted_image_certificates": loads(server.trusted_image_certificates or "null")}
    check_signature({**old_values, **body}, image)
    server_fields.choose_disk_config(body, image.ref.id, image.ref.properties)
    changes = {
        column: convert(body[name]) for name, (column, convert) in _COLUMNS.items() if name in body
    }
    changes |= {**_build_image_columns(server, image, root is not None, reimage), **key}
    if "user_data" in body:
        changes["user_data"] = passwords.seal_text(request.services.vault, body["user_data"])
    args: JsonObject = {"preserve_ephemeral": is_true(body.get("preserve_ephemeral", False))}
    if reimage:
        args["reimage"] = image.ref.id
    if files:
        changes["config_drive"] = True
    password = body.get("adminPass") or passwords.generate()

    def answer() -> ApiResponse:
        row = request.read(servers.show, server.id, request.scope)
        links = request.links.of("servers", server.id)
        return ApiResponse(
            show_rebuilt(request, row, password), 202, {"Location": links[0]["href"]}
        )

    return PreparedAction(
        args,
        password,
        changes,
        answer,
        _make_begin(
            server, reimage or changes["image_id"] != server.image_id, request.services.vault
        ),
        files=files,
    )


def _check_same_place(
    flavor: models.Flavor, old: Mapping[str, str], new: Mapping[str, str]
) -> None:
    """Check that the new image needs the same resources of the host as the old image.

    Why: a rebuild keeps the server on its host.

    Raises:
        BadRequest: The images need different resources.
    """
    before = _list_demands(flavor, old)
    for name, demand in _list_demands(flavor, new).items():
        if demand != before[name]:
            raise errors.BadRequest(
                f"imageRef: this image needs other {name} than the server has. A rebuild cannot "
                "change the resources on the host; create a new server from the image."
            )


def _list_demands(flavor: models.Flavor, properties: Mapping[str, str]) -> JsonObject:
    """Return the resources that a guest needs from its host, by their names in error messages."""
    guest = hardware.hardware(flavor, properties)
    return {
        "resources": hardware.resources(flavor, properties),
        "NUMA nodes": guest.numa_nodes,
        "dedicated CPUs": (guest.dedicated, guest.threads),
        "memory pages": guest.page_kb,
        "PCI devices": (guest.devices, guest.options.get("pci_policy")),
    }


def _check_reimage(request: Request, root: BlockDeviceRow, image: Image) -> bool:
    """Return whether the rebuild overwrites the root volume, which it does from 2.93 on.

    Raises:
        BadRequest: Since 2.93, the image cannot be used or does not fit the root volume. Before
            2.93, the image is not that of the root volume.
        NotFound: Before 2.93, the root volume does not exist for the caller.
        Unavailable: Before 2.93, the block storage service does not answer or is not in the
            catalogue.
    """
    if request.version in _WRITES_VOLUMES:
        image_checks.check_volume(image, root.size_gb or 0)
        if image.ref.properties.get(IMAGE_MAPPINGS):
            raise errors.BadRequest(
                f"Image {image.ref.id} contains no data, only references to volume snapshots; create a "
                "new server from the image."
            )
        return True
    service = request.volumes
    if service is None:
        raise errors.Unavailable(
            "The service catalogue has no block storage service now, and the server boots from a "
            "volume; try again."
        )
    volume = service.volume(request.context.token, str(root.volume_id))
    if volume.image_metadata.get("image_id") != image.ref.id:
        raise errors.BadRequest(
            f"Image {image.ref.id} is unacceptable: Unable to rebuild with a different image for a "
            "volume-backed server."
        )
    return False


def _build_image_columns(
    server: ServerRecord, image: Image, boots_from_volume: bool, reimage: bool
) -> JsonObject:
    """Return the new values of the server's columns about the image.

    A server that boots from a volume has no image id. Without ``reimage`` such a server keeps its
    columns.
    """
    if not boots_from_volume:
        return {
            "image_id": image.ref.id,
            "image": to_wire(image.ref),
            "root_device_name": device_names.root_name(image.ref.properties.get("hw_disk_bus")),
        }
    if not reimage:
        return {"image_id": server.image_id}
    frozen = {**to_wire(replace(image.ref, id="")), hardware.ON_VOLUME: True}
    return {"image_id": None, "image": frozen}


def _make_begin(server: ServerRecord, has_new_image: bool, vault: Vault | None) -> Begin:
    """Return a function that begins the rebuild.

    With a new image the action also stores the old values of the changed columns, in case the host
    refuses the image, and the new values of ``_UNGUARDED`` columns, which other requests may change
    during the rebuild. The function raises Conflict if another request has changed the flavor or
    the image since the check.

    Args:
        server: The row of the server, as checked before.
        has_new_image: Whether the image changes or the root volume is overwritten.
        vault: Encrypts the stored old user data. None means that the cloud has no key.
    """

    def begin(
        tx: Connection,
        rows: Sequence[states.Action],
        server_id: str,
        *,
        args: JsonObject,
        changes: JsonObject,
        project_id: str | None,
        **arguments: Any,  # noqa: ANN401 - passed on unchanged
    ) -> str:
        actions.take_lock(tx, server_id, project_id)
        row = servers.show(tx, server_id)
        # The requests to external services were made without the lock.
        refuse_changed(row, server)
        if has_new_image:
            old_values = servers.writable_columns(row, changes)
            if vault is not None and old_values.get("user_data"):
                secrets = vault.open(arguments["secrets"]) if arguments["secrets"] else {}
                arguments["secrets"] = vault.seal(
                    {**secrets, "before": {"user_data": old_values.pop("user_data")}}
                )
            args = {
                **args,
                "before": old_values,
                "wrote": {name: value for name, value in changes.items() if name in _UNGUARDED},
            }
        return actions.begin(
            tx, rows, server_id, args=args, changes=changes, project_id=project_id, **arguments
        )

    return begin


def _read_key_columns(request: Request, body: JsonObject) -> JsonObject:
    """Return the columns of the caller's key pair with the name in the body.

    The result is empty without key_name. A null key_name removes the key pair.

    Raises:
        BadRequest: The key pair does not exist.
    """
    if "key_name" not in body:
        return {}
    if body["key_name"] is None:
        return {"key_name": None, "key_data": None}
    try:
        key = request.read(keypairs.show, request.context.user_id, body["key_name"])
    except errors.NotFound as problem:
        raise errors.BadRequest("Invalid key_name provided.") from problem
    return {"key_name": key.name, "key_data": key.public_key}
