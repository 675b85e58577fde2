# SPDX-License-Identifier: Apache-2.0
"""What an action makes of its body before it begins: arguments of its workflow, a secret, new
columns.

One small function for each action whose body matters; ``server_action_table`` lists them, and
``server_actions`` calls them once the action is allowed. They read the store, and the image service
with the caller's token, and write nothing:
``actions.begin`` commits the result together with the action."""

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


def nothing(request: Request, server: ServerRecord, given: object) -> PreparedAction:
    """An action that its name says all of."""
    return PreparedAction()


def lock(request: Request, server: ServerRecord, given: JsonObject | None) -> PreparedAction:
    """The reason, from 2.73 on; before, the body is passed over."""
    known = given if request.version in Range("2.73") and given else {}
    return PreparedAction({"locked_reason": known.get("locked_reason")})


def unlock(request: Request, server: ServerRecord, given: object) -> PreparedAction:
    """Another's lock is undone by those only whom a rule of its own allows that."""
    owner = server.project_id == request.context.project_id
    if not server.locked or server.locked_by == ("owner" if owner else "admin"):
        return PreparedAction()
    request.require(
        _API + "os-lock-server:unlock:unlock_override",
        {"project_id": server.project_id, "user_id": server.user_id},
    )
    return PreparedAction({"override": True})


def reset_state(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """The state, as it was given."""
    return PreparedAction({"state": given["state"]})


def change_password(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """The password, kept encrypted until the guest has it."""
    if request.services.vault is None:
        raise errors.NotImplementedHere(
            "This cloud cannot keep passwords until they are set; its operator can give it "
            "a [DEFAULT] secret_key."
        )
    return PreparedAction(password=given["adminPass"])


_RESCUES_VOLUMES = Range("2.87")


def refuse_volume_backed(request: Request, server: ServerRecord, text: str) -> None:
    """Raises BadRequest with this text: the server boots from a volume."""
    if server.volumes and request.read(volumes.root_of, server.id) is not None:
        raise errors.BadRequest(text)


def rescue(request: Request, server: ServerRecord, given: JsonObject | None) -> PreparedAction:
    """The image to boot from, which the caller must be allowed to see; none: the server's own,
    which one that boots from a volume has not."""
    given = given or {}
    password, image_id, image = (
        given.get("adminPass") or passwords.generate(),
        given.get("rescue_image_ref"),
        None,
    )
    refused = f"Instance {server.id} cannot be rescued:"
    if request.version not in _RESCUES_VOLUMES:
        refuse_volume_backed(request, server, f"{refused} Cannot rescue a volume-backed instance")
    if image_id:
        found = request.image(image_id)
        if found.ref.properties.get(block_devices.IMAGE_MAPPINGS):
            raise errors.BadRequest(
                f"Requested rescue image '{image_id}' is not supported: it has no bytes, but names "
                "snapshots of volumes; use another one."
            )
        image_checks.check_disk(found)
        image = to_wire(found.ref)
    else:
        refuse_volume_backed(
            request,
            server,
            f"{refused} it boots from a volume and has no image; give a rescue_image_ref.",
        )
    return PreparedAction(
        {"image": image}, password, answer=lambda: ApiResponse({"adminPass": password}, 200)
    )


# --- images of servers ---
_BEFORE_IDS = Range(until="2.44")  # answers name the image by a link, not by its id
_COUNTED_METADATA = Range(until="2.38")
#: Properties of a server's image that its snapshots do not inherit: they are true of those bytes
#: only.
_NOT_INHERITED = frozenset(("cache_in_nova", "bittorrent"))


def _list_image_properties(
    server: ServerRecord, given: dict[str, str], **more: str
) -> dict[str, str]:
    """Return the properties of a new image of this server.

    Args:
        given: The caller's metadata, which replaces properties of the server's own image.
        more: Properties that the caller cannot set.
    """
    inherited = {
        key: value
        for key, value in loads(server.image or "{}").get("properties", {}).items()
        if key not in _NOT_INHERITED and not key.startswith("img_signature")
    }
    return {
        **inherited,
        **given,
        "instance_uuid": server.id,
        "user_id": server.user_id,
        "base_image_ref": server.image_id or "",
        **more,
    }


def _check_image_metadata(request: Request, given: JsonObject) -> dict[str, str]:
    """Return the caller's metadata for a new image.

    Raises:
        BadRequest: A name is the name of an image field.
        Forbidden: There are too many items.
    """
    metadata: dict[str, str] = given.get("metadata", {})
    taken = sorted(OWN_KEYS & set(metadata))
    if taken:
        raise errors.BadRequest(
            f"metadata: an image has a field of the name {taken[0]}, which cannot be set so."
        )
    if request.version in _COUNTED_METADATA:
        server_fields.check_metadata(metadata, request.limits)
    return metadata


def _answer_image(request: Request, image_id: str, kept: bool = True) -> ApiResponse:
    if request.version not in _BEFORE_IDS:
        return ApiResponse({"image_id": image_id}, 202)
    return ApiResponse(
        None, 202, {"Location": request.services.images.url(image_id)} if kept else {}
    )


def create_image(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """A new image, and what is said of it."""
    image_id, name = ids.new(), given["name"].strip()
    properties = _list_image_properties(
        server, {"image_type": "snapshot", **_check_image_metadata(request, given)}
    )
    args: JsonObject = {"image_id": image_id, "name": name, "properties": properties}
    give_up = None
    if server.volumes and request.read(volumes.root_of, server.id) is not None:
        made = volume_snapshots.make(request, server, name)
        properties |= made.properties
        args["snapshots"] = made.snapshots
        give_up = made.give_up
    return PreparedAction(args, answer=lambda: _answer_image(request, image_id), give_up=give_up)


def create_backup(request: Request, server: ServerRecord, given: JsonObject) -> PreparedAction:
    """A new image beside older ones, of which the newest stay."""
    refuse_volume_backed(request, server, "Backup is not supported for volume-backed instances.")
    image_id, rotation = ids.new(), int(given["rotation"])
    properties = _list_image_properties(
        server,
        _check_image_metadata(request, given),
        image_type="backup",
        backup_type=given["backup_type"],
    )
    return PreparedAction(
        {
            "image_id": image_id,
            "name": given["name"].strip(),
            "properties": properties,
            "backup_type": given["backup_type"],
            "rotation": rotation,
        },
        answer=lambda: _answer_image(request, image_id, kept=rotation > 0),
    )


def shelve(request: Request, server: ServerRecord, given: object) -> PreparedAction:
    """The image that keeps the server's disk."""
    return PreparedAction(
        {
            "image_id": ids.new(),
            "name": with_suffix(server.name, "-shelved"),  # images have 255 characters, too
            "properties": _list_image_properties(server, {}, image_type="snapshot"),
        }
    )


# --- unshelving somewhere ---
_TO_A_ZONE = Range("2.77")


def unshelve(request: Request, server: ServerRecord, given: JsonObject | None) -> PreparedAction:
    """Where to: as before, or from 2.77 on in a zone that the server is then pinned to, from 2.91
    on on a host."""
    given = given if request.version in _TO_A_ZONE and given else {}
    host, zone = given.get("host"), given.get("availability_zone", server.pinned_availability_zone)
    if host is not None:
        request.require(_API + "os-shelve:unshelve_to_host")
    if given and server.vm_state != states.SHELVED_OFFLOADED:
        raise errors.Conflict(
            f"Instance {server.id} is in vm_state {server.vm_state}; a zone or a host can be given "
            "only while it is in vm_state shelved_offloaded."
        )
    request.read(
        destinations.check_unshelve,
        zone if "availability_zone" in given or host else None,
        host,
        request.services.settings.default_zone,
    )
    pinning = "availability_zone" in given
    return PreparedAction(
        {**destinations.Destination(zone, host).args, "unpin": pinning and zone is None},
        changes={"pinned_availability_zone": zone} if pinning else {},
    )
