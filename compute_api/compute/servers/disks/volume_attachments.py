# SPDX-License-Identifier: Apache-2.0
"""Handlers of /servers/{id}/os-volume_attachments: list, show, attach, update and detach volumes.

A volume is first read with the caller's token from the block storage service. Attaching and
detaching are actions. A second action waits until the first has ended. Before 2.101 the response to
an attach waits until the service has reserved the volume for the server, or until a timeout. If too
many requests are waiting, the response does not wait.
"""

from __future__ import annotations

from functools import partial

from common.clients.volumes import AVAILABLE, IN_USE, MIGRATING, Volume
from common.domain import errors, states
from common.domain.json_types import JsonObject
from common.domain.statuses import BlockDeviceStatus
from common.store.engine import Connection
from common.store.rows import BlockDeviceRow, ServerRecord
from common.store.servers import volumes
from common.store.servers.volumes import WantedVolume
from compute_api.compute.request import action_waits
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.request import Request
from compute_api.compute.views.servers import volume_attachments as view
from compute_api.http.microversions import Range
from compute_api.http.response import ApiResponse
from compute_api.http.validation import is_true

_API = "os_compute_api:os-volumes-attachments:"
ATTACH, DETACH = states.row("attach_volume"), states.row("detach_volume")
SWAP = states.row("swap_volume")
_SHELVED = (states.SHELVED, states.SHELVED_OFFLOADED)
_OF_SHELVED, _MULTIATTACH = Range("2.20"), Range("2.60")
_CHANGES, _AT_ONCE = Range("2.85"), Range("2.101")


def index(request: Request, server: ServerRecord) -> JsonObject:
    """Return one page of a server's attachments for GET /servers/{id}/os-volume_attachments.

    Since 2.89 volumes that the block storage service has not reserved yet are left out.
    """
    rows = [
        row
        for row in request.read(volumes.list_of, server.id)
        if row.volume_id and view.is_shown(row, request.version)
    ]
    offset = int(request.query_value("offset") or 0)
    return {
        "volumeAttachments": [
            view.of(row, request.version) for row in rows[offset : offset + request.limit]
        ]
    }


def show(request: Request, server: ServerRecord, volume_id: str) -> JsonObject:
    """Return an attachment for GET /servers/{id}/os-volume_attachments/{volume_id}.

    Raises:
        NotFound: The server does not have the volume. Or, since 2.89, the block storage service has
            not reserved the volume yet.
    """
    row = request.read(volumes.show, server.id, volume_id)
    if not view.is_shown(row, request.version):
        raise errors.NotFound(f"Instance {server.id} is not attached to volume {volume_id}")
    return {"volumeAttachment": view.of(row, request.version)}


def attach(request: Request, server: ServerRecord) -> ApiResponse:
    """Begin to attach a volume for POST /servers/{id}/os-volume_attachments.

    Before 2.101 the response is the attachment, after a wait for the reservation of the volume.
    Since 2.101 the response is 202 without a body.

    Raises:
        NotFound: The volume does not exist for the caller.
        BadRequest: The server cannot have the volume or has it already, or before 2.101 the volume
            could not be reserved.
        Forbidden: No device name is free. Or, before 2.101, the policy or quota of the service does
            not allow the reservation.
        Conflict: The server's state does not allow the action.
        NotImplementedHere: The cloud has no block storage service.
    """
    body = request.body["volumeAttachment"]
    _refuse_shelved(request, server, ATTACH)
    service = service_of(request)
    request.check(ATTACH, server, waits=True)
    volume = _read_volume(service, request, body["volumeId"])
    new_volume = _check_volume(request, server, volume, body)
    begin = partial(request.begin, volumes.attach, ATTACH, server.id, volume=new_volume)
    settings = request.services.settings
    with action_waits.slot(request.services) as is_free:
        timeout = settings.answer_timeout_seconds if is_free else 0
        action = action_waits.in_turn(request.services, server.id, begin, waits=is_free)
        request.services.wakeup.wake()
        row = request.read(volumes.show, server.id, volume.id)
        if request.version in _AT_ONCE:
            return ApiResponse(None, 202)
        assert ATTACH.answer_after is not None
        if timeout:
            action_waits.for_step(
                request.services.store,
                action,
                ATTACH.answer_after,
                failure=errors.BadRequest,
                timeout_seconds=timeout,
            )
    return ApiResponse({"volumeAttachment": view.of(row, request.version, new=True)})


def service_of(request: Request) -> TenantVolumes:
    """Return the block storage service.

    Raises:
        NotImplementedHere: The cloud has no block storage service.
        Unavailable: The service catalogue cannot be read.
    """
    service = request.volumes
    if service is None:
        raise errors.NotImplementedHere(
            "This cloud has no block storage service, so servers cannot have volumes."
        )
    return service


def _refuse_shelved(request: Request, server: ServerRecord, row: states.Action) -> None:
    """Raise WrongState if the server is shelved or offloaded, before 2.20."""
    if server.vm_state in _SHELVED and request.version not in _OF_SHELVED:
        raise errors.WrongState(row.name, server.id, "vm_state", server.vm_state)


def _read_volume(service: TenantVolumes, request: Request, volume_id: str) -> Volume:
    """Return the volume as the caller sees it.

    Raises:
        NotFound: The volume does not exist for the caller.
    """
    try:
        return service.volume(request.context.token, volume_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise errors.NotFound(f"Volume {volume_id} could not be found.") from problem


def _check_volume(
    request: Request, server: ServerRecord, volume: Volume, body: JsonObject
) -> WantedVolume:
    """Check that the server can have the volume, and return the record to store.

    Raises:
        BadRequest: The volume cannot be attached to this server.
    """
    tag = body.get("tag")
    if server.vm_state == states.SHELVED_OFFLOADED:
        if tag:
            raise errors.BadRequest(
                "Tagged volume attachment is not supported for shelved-offloaded instances."
            )
        if volume.multiattach:
            raise errors.BadRequest(
                "Attaching multiattach volumes is not supported for shelved-offloaded instances."
            )
    if not request.read(_has_volume, server.id, volume.id):
        check_usable(request, volume)
    check_zone(request, volume, server.availability_zone, server.id)
    return WantedVolume(
        volume_id=volume.id,
        size_gb=volume.size_gb,
        tag=tag,
        delete_on_termination=is_true(body.get("delete_on_termination", False)),
        read_only=volume.read_only,
        multiattach=volume.multiattach,
    )


def _has_volume(tx: Connection, server_id: str, volume_id: str) -> bool:
    """Return whether the server has the volume already.

    The begin of the action refuses such a volume later, under the server's lock. So
    ``_check_volume`` does not check the volume's status, which would give another error.
    """
    return any(row.volume_id == volume_id for row in volumes.list_of(tx, server_id))


def check_usable(request: Request, volume: Volume) -> None:
    """Raise BadRequest unless a server can use the volume.

    The volume must be available, or if it is multiattach, available or in use. Encrypted volumes
    are refused, and before 2.60 multiattach volumes.
    """
    if volume.multiattach and request.version not in _MULTIATTACH:
        raise errors.BadRequest(
            "Multiattach volumes are only supported starting with compute API version 2.60."
        )
    allowed = (AVAILABLE, IN_USE) if volume.multiattach else (AVAILABLE,)
    if volume.status not in allowed:
        raise errors.BadRequest(
            f"Invalid volume: volume '{volume.id}' status must be '{' or '.join(allowed)}'. "
            f"Currently in '{volume.status}'"
        )
    refuse_encrypted(volume)


def refuse_encrypted(volume: Volume) -> None:
    """Raise BadRequest if the volume is encrypted, because hosts have no access to the key."""
    if volume.encrypted:
        raise errors.BadRequest(
            f"Invalid volume: volume '{volume.id}' is encrypted, and hosts of this cloud cannot open "
            "encrypted volumes. Retype the detached volume to a type without encryption, or use "
            "another volume."
        )


def check_zone(request: Request, volume: Volume, zone: str | None, server_id: str) -> None:
    """Raise BadRequest if the cloud does not attach volumes across zones, and the zones differ."""
    if request.services.settings.cross_az_attach or volume.availability_zone == zone:
        return
    raise errors.BadRequest(
        f"Invalid volume: Instance {server_id} and volume {volume.id} are not in the same "
        f"availability_zone. Instance is in {zone}. Volume is in {volume.availability_zone}"
    )


def update(request: Request, server: ServerRecord, volume_id: str) -> None:
    """Begin a swap or change delete_on_termination, for PUT …/os-volume_attachments/{volume_id}.

    Before 2.85 every request is a swap. Since 2.85 one request can do both, in one transaction. A
    request whose swap is refused changes nothing.

    Raises:
        NotFound: Since 2.85, the server does not have the volume. For a swap, the volume does not
            exist for the caller.
        Forbidden: The policy does not allow the caller a swap.
        BadRequest: A field cannot be changed, or the new volume cannot replace the old volume.
        Conflict: For a swap, the block storage service is not migrating the volume, the volume is
            not attached, or the server's state does not allow the swap.
        NotImplementedHere: For a swap, the cloud has no block storage service.
    """
    body = request.body["volumeAttachment"]
    changes = request.version in _CHANGES
    if swaps := not changes or body["volumeId"] != volume_id:
        request.require(_API + "swap", {"project_id": server.project_id, "user_id": server.user_id})
    delete_on_termination = None
    if changes:
        _refuse_changed(body, request.read(volumes.show, server.id, volume_id))
        if "delete_on_termination" in body:
            delete_on_termination = is_true(body["delete_on_termination"])
    if swaps:
        _swap(request, server, volume_id, body["volumeId"], delete_on_termination)
    elif delete_on_termination is not None:
        request.write(
            volumes.set_delete_on_termination, server.id, volume_id, delete_on_termination
        )


def _swap(
    request: Request,
    server: ServerRecord,
    volume_id: str,
    new_volume_id: str,
    delete_on_termination: bool | None,
) -> None:
    """Begin to replace a volume by the target of the block storage service's migration.

    ``delete_on_termination`` is stored when the action begins. None: it is unchanged.

    Raises:
        NotFound: The old volume does not exist for the caller.
        BadRequest: The new volume does not exist for the caller, or cannot replace the old volume.
        Conflict: The service is not migrating the old volume, the old volume is not attached, or
            the server's state does not allow the action.
        NotImplementedHere: The cloud has no block storage service.
    """
    service = service_of(request)
    old = _read_volume(service, request, volume_id)
    if old.migration != MIGRATING:
        raise errors.Conflict(
            f"volume {volume_id} is not migrating; this API should only be called by Cinder. To move the "
            "volume, migrate or retype it in the block storage service."
        )
    try:
        new = _read_volume(service, request, new_volume_id)
    except errors.NotFound as problem:
        raise errors.BadRequest(problem.text) from problem
    request.check(SWAP, server, waits=True)
    _refuse_swap(request, server, old, new)
    swap = partial(
        volumes.swap,
        volume_id=volume_id,
        new_volume_id=new.id,
        new_size_gb=new.size_gb,
        delete_on_termination=delete_on_termination,
    )
    action_waits.begin_in_turn(
        request.services, server.id, partial(request.begin, swap, SWAP, server.id)
    )
    request.services.wakeup.wake()


def _refuse_swap(request: Request, server: ServerRecord, old: Volume, new: Volume) -> None:
    """Raise BadRequest if the new volume cannot replace the old volume at this server.

    For example, the server does not have the old volume, or the new volume is smaller.
    """
    if server.id not in old.servers:
        raise errors.BadRequest("Invalid volume: Old volume is attached to a different instance.")
    if new.servers:
        raise errors.BadRequest("Invalid volume: New volume must be detached in order to swap.")
    if new.size_gb < old.size_gb:
        raise errors.BadRequest("Invalid volume: New volume must be the same size or larger.")
    check_zone(request, new, server.availability_zone, server.id)
    if len(old.servers) > 1:
        raise errors.BadRequest(
            "Swapping multi-attach volumes with more than one read/write attachment is not supported."
        )
    if new.migration != f"target:{old.id}":
        raise errors.BadRequest(
            f"Invalid volume: volume {new.id} is not the target of the migration of volume {old.id}."
        )
    refuse_encrypted(old)
    refuse_encrypted(new)


def _refuse_changed(body: JsonObject, row: BlockDeviceRow) -> None:
    """Raise BadRequest if the body has another value for a field that cannot be changed."""
    fixed_values = {
        "device": row.device_name,
        "tag": row.tag,
        "serverId": row.server_id,
        "id": row.volume_id,
    }
    for name, value in fixed_values.items():
        if name in body and body[name] != value:
            raise errors.BadRequest(f"The {name} property is not mutable.")


def detach(request: Request, server: ServerRecord, volume_id: str) -> None:
    """Begin to detach a volume for DELETE /servers/{id}/os-volume_attachments/{volume_id}.

    If the volume is already being detached, no action begins, and the request succeeds.

    Raises:
        NotFound: The server does not have the volume.
        Forbidden: The server boots from the volume.
        Conflict: The server's state does not allow the action.
    """
    _refuse_shelved(request, server, DETACH)
    row = request.read(volumes.show, server.id, volume_id)
    volumes.refuse_root(row)
    request.check(DETACH, server, waits=True)
    if row.status == BlockDeviceStatus.DETACHING:
        return
    begin = partial(request.begin, volumes.detach, DETACH, server.id, volume_id=volume_id)
    action_waits.begin_in_turn(request.services, server.id, begin)
    request.services.wakeup.wake()
