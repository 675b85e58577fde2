# SPDX-License-Identifier: Apache-2.0
"""Prepare the actions of servers: workflow arguments, secrets and new column values from the body.

``action_table`` maps the key of an action to its function. ``actions`` calls the function once the
policy and the state allow the action, even if another action still runs. The functions read the
database, and external services with the caller's token. Only ``create_image`` changes an external
service: for a server that boots from a volume it creates volume snapshots. ``actions.begin`` of the
store commits the result together with the action.
"""

from __future__ import annotations

from common.clients import image_checks
from common.clients.image import OWN_KEYS
from common.domain import errors, ids, states
from common.domain.json_types import JsonObject
from common.domain.text import with_suffix
from common.domain.wire import to_wire
from common.store.rows import ServerRecord
from common.store.servers import volumes
from common.store.servers.servers import loads
from compute_api.compute.request import passwords
from compute_api.compute.request.request import Request
from compute_api.compute.servers import destinations
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.servers.disks import block_devices, volume_snapshots
from compute_api.compute.servers.prepared_action import PreparedAction
from compute_api.http.microversions import Range
from compute_api.http.response import ApiResponse

_API = "os_compute_api:"


def prepare_without_arguments(
    request: Request, server: ServerRecord, body: object
) -> PreparedAction:
    """Prepare an action without arguments. The value in the body is ignored."""
    return PreparedAction()


def lock(request: Request, server: ServerRecord, body: JsonObject | None) -> PreparedAction:
    """Prepare a lock, with a reason from 2.73 on. Before 2.73 the body is ignored."""
    options = body if request.version in Range("2.73") and body else {}
    return PreparedAction({"locked_reason": options.get("locked_reason")})


def unlock(request: Request, server: ServerRecord, body: object) -> PreparedAction:
    """Prepare an unlock.

    Raises:
        Forbidden: The caller is of the server's project and the lock was set from another project,
            or the reverse, and the policy rule ``unlock_override`` does not allow the unlock.
    """
    owner = server.project_id == request.context.project_id
    if not server.locked or server.locked_by == ("owner" if owner else "admin"):
        return PreparedAction()
    request.require(
        _API + "os-lock-server:unlock:unlock_override",
        {"project_id": server.project_id, "user_id": server.user_id},
    )
    return PreparedAction({"override": True})


def reset_state(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare a reset of the server's vm_state to active or error by an operator."""
    return PreparedAction({"state": body["state"]})


def change_password(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare a password change. The password is stored encrypted until the action ends.

    Raises:
        NotImplementedHere: The cloud has no secret_key.
    """
    if request.services.vault is None:
        raise errors.NotImplementedHere(
            "This cloud has no [DEFAULT] secret_key to encrypt passwords, so it cannot change the "
            "password of a server. Ask the operator to set secret_key."
        )
    return PreparedAction(password=body["adminPass"])


_RESCUES_VOLUMES = Range("2.87")


def refuse_volume_backed(request: Request, server: ServerRecord, text: str) -> None:
    """Raise BadRequest with ``text`` if the server boots from a volume."""
    if server.volumes and request.read(volumes.root_of, server.id) is not None:
        raise errors.BadRequest(text)


def rescue(request: Request, server: ServerRecord, body: JsonObject | None) -> PreparedAction:
    """Prepare a rescue, which boots the server from a rescue image with a new password.

    Without ``rescue_image_ref`` this is the server's own image. A server that boots from a volume
    has no image, so it needs ``rescue_image_ref``, and microversion 2.87. The response contains the
    password.

    Raises:
        BadRequest: The image does not exist for the caller, or cannot be used, or the server boots
            from a volume without the conditions above.
        Forbidden: Kilonova's own user cannot read the image, so hosts could not download it.
        Unavailable: The image service does not answer.
    """
    body = body or {}
    password, image_id, image = (
        body.get("adminPass") or passwords.generate(),
        body.get("rescue_image_ref"),
        None,
    )
    prefix = f"Instance {server.id} cannot be rescued:"
    if request.version not in _RESCUES_VOLUMES:
        refuse_volume_backed(request, server, f"{prefix} Cannot rescue a volume-backed instance")
    if image_id:
        rescue_image = request.image(image_id)
        if rescue_image.ref.properties.get(block_devices.IMAGE_MAPPINGS):
            raise errors.BadRequest(
                f"Requested rescue image '{image_id}' is not supported: it contains no data, only "
                "references to volume snapshots; use another image."
            )
        image_checks.check_disk(rescue_image)
        image = to_wire(rescue_image.ref)
    else:
        refuse_volume_backed(
            request,
            server,
            f"{prefix} it boots from a volume and has no image; give a rescue_image_ref.",
        )
    return PreparedAction(
        {"image": image}, password, answer=lambda: ApiResponse({"adminPass": password}, 200)
    )


# --- images of servers ---
#: Responses contain a link to the image instead of the id.
_BEFORE_IDS = Range(until="2.44")
_COUNTED_METADATA = Range(until="2.38")
#: Properties that snapshots do not inherit, because they describe the data of the server's image.
_NOT_INHERITED = frozenset(("cache_in_nova", "bittorrent"))


def _list_image_properties(
    server: ServerRecord, metadata: dict[str, str], **more: str
) -> dict[str, str]:
    """Return the properties of a new image of this server.

    The properties of the server's own image are included, except its signature and
    ``_NOT_INHERITED``.

    Args:
        server: The row of the server.
        metadata: The caller's metadata, which replaces properties of the server's own image.
        more: Properties that the caller cannot set.
    """
    inherited = {
        key: value
        for key, value in loads(server.image or "{}").get("properties", {}).items()
        if key not in _NOT_INHERITED and not key.startswith("img_signature")
    }
    return {
        **inherited,
        **metadata,
        "instance_uuid": server.id,
        "user_id": server.user_id,
        "base_image_ref": server.image_id or "",
        **more,
    }


def _check_image_metadata(request: Request, body: JsonObject) -> dict[str, str]:
    """Return the caller's metadata for a new image.

    Raises:
        BadRequest: A name is the name of an image field.
        Forbidden: Before 2.39, there are too many items.
    """
    metadata: dict[str, str] = body.get("metadata", {})
    taken = sorted(OWN_KEYS & set(metadata))
    if taken:
        raise errors.BadRequest(
            f"metadata: {taken[0]} is a field of the image and cannot be set as metadata; use another "
            "name."
        )
    if request.version in _COUNTED_METADATA:
        server_fields.check_metadata(metadata, request.limits)
    return metadata


def _answer_image(request: Request, image_id: str, kept: bool = True) -> ApiResponse:
    """Return the response with the image's id, or before 2.45 with a link in the header Location.

    Args:
        request: The request.
        image_id: Id of the new image.
        kept: False leaves out the link, not the id, because a backup with rotation 0 does not keep
            the image.
    """
    if request.version not in _BEFORE_IDS:
        return ApiResponse({"image_id": image_id}, 202)
    return ApiResponse(
        None, 202, {"Location": request.services.images.url(image_id)} if kept else {}
    )


def create_image(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare the creation of an image of the server.

    If the server boots from a volume, create snapshots of the volumes now, with the caller's token.
    ``give_up`` of the result deletes them if the action cannot begin.

    Raises:
        BadRequest: A metadata name is the name of an image field, or a volume does not exist any
            more.
        Forbidden: Before 2.39, the metadata has too many items. Or a quota or the policy of the
            block storage service does not allow the snapshots.
        Conflict: A snapshot failed, or the guest could not be frozen although its image requires
            that.
        Unavailable: The block storage service does not answer or is not in the catalogue, or too
            many requests are waiting.
    """
    image_id, name = ids.new(), body["name"].strip()
    properties = _list_image_properties(
        server, {"image_type": "snapshot", **_check_image_metadata(request, body)}
    )
    args: JsonObject = {"image_id": image_id, "name": name, "properties": properties}
    give_up = None
    if server.volumes and request.read(volumes.root_of, server.id) is not None:
        snapshots = volume_snapshots.make(request, server, name)
        properties |= snapshots.properties
        args["snapshots"] = snapshots.snapshots
        give_up = snapshots.give_up
    return PreparedAction(args, answer=lambda: _answer_image(request, image_id), give_up=give_up)


def create_backup(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare a backup: a new image, after which only the newest ``rotation`` backups remain.

    The rotation counts the backups of this server with the same backup_type.

    Raises:
        BadRequest: The server boots from a volume, or a metadata name is the name of an image
            field.
        Forbidden: Before 2.39, the metadata has too many items.
    """
    refuse_volume_backed(request, server, "Backup is not supported for volume-backed instances.")
    image_id, rotation = ids.new(), int(body["rotation"])
    properties = _list_image_properties(
        server,
        _check_image_metadata(request, body),
        image_type="backup",
        backup_type=body["backup_type"],
    )
    return PreparedAction(
        {
            "image_id": image_id,
            "name": body["name"].strip(),
            "properties": properties,
            "backup_type": body["backup_type"],
            "rotation": rotation,
        },
        answer=lambda: _answer_image(request, image_id, kept=rotation > 0),
    )


def shelve(request: Request, server: ServerRecord, body: object) -> PreparedAction:
    """Prepare a shelve, which stores the root disk in an image unless the disk is a volume."""
    return PreparedAction(
        {
            "image_id": ids.new(),
            # Names of images, like those of servers, have at most 255 characters.
            "name": with_suffix(server.name, "-shelved"),
            "properties": _list_image_properties(server, {}, image_type="snapshot"),
        }
    )


# --- unshelve ---
_TO_A_ZONE = Range("2.77")


def unshelve(request: Request, server: ServerRecord, body: JsonObject | None) -> PreparedAction:
    """Prepare an unshelve.

    From 2.77 on the caller can choose a zone, to which the server is then pinned. A null zone
    removes the pin. From 2.91 on the caller can choose a host. Without a choice the server keeps
    its pinned zone.

    Raises:
        BadRequest: The zone or the host does not exist, or the zone has no enabled host.
        Forbidden: The caller may not choose a host.
        Conflict: The body has a zone or a host, and the server is not offloaded. Or the host is not
            in the chosen zone, or without a choice not in the pinned zone.
    """
    body = body if request.version in _TO_A_ZONE and body else {}
    host, zone = body.get("host"), body.get("availability_zone", server.pinned_availability_zone)
    if host is not None:
        request.require(_API + "os-shelve:unshelve_to_host")
    if body and server.vm_state != states.SHELVED_OFFLOADED:
        raise errors.Conflict(
            f"Instance {server.id} is in vm_state {server.vm_state}; a zone or a host can be given "
            "only while it is in vm_state shelved_offloaded."
        )
    request.read(
        destinations.check_unshelve,
        zone if "availability_zone" in body or host else None,
        host,
        request.services.settings.default_zone,
    )
    pinning = "availability_zone" in body
    return PreparedAction(
        {**destinations.Destination(zone, host).args, "unpin": pinning and zone is None},
        changes={"pinned_availability_zone": zone} if pinning else {},
    )
