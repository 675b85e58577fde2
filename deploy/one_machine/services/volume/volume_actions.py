# SPDX-License-Identifier: Apache-2.0
"""POST /v3/volumes/{key}/action: the actions on volumes.

Each action is a row of ACTIONS with the first version, whether only admins may call the action, the
schema of the body, and a function that runs in one transaction and may add a job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import falcon
from sqlalchemy import select

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.json_types import JsonValue
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import (
    TRUTH,
    BodySchema,
    Document,
    integer,
    mapping,
    nullable,
    one_of,
    text,
)
from deploy.one_machine.services.volume import attachments as uses
from deploy.one_machine.services.volume import images, quotas
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.qemu_img import WRITABLE
from deploy.one_machine.services.volume.schema import attachments, types, volumes
from deploy.one_machine.services.volume.service import (
    VolumeChange,
    VolumeService,
    count,
    find_connected,
    is_read,
)
from deploy.one_machine.services.volume.versions import since
from deploy.one_machine.services.volume.volumes import check_copied
from deploy.one_machine.services.web import answer, read_json

STATUSES = (
    *("creating", "available", "reserved", "attaching", "in-use", "detaching", "deleting"),
    *("error", "error_deleting", "error_extending", "extending", "uploading", "downloading"),
    "maintenance",
)

#: Properties that describe only the old image, or that the image service sets.
NOT_OF_A_COPY = ("image_id", "image_name", "img_signature", "signature_verified", "os_glance")


@dataclass(frozen=True)
class ActionRequest:
    """A request for an action on a volume, within the action's transaction."""

    service: VolumeService
    req: falcon.Request
    caller: VolumeCaller
    change: VolumeChange
    row: DbRow
    body: JsonValue
    #: The image of the action, which was found or created before the transaction.
    image: Body | None = None

    def move(self, before: tuple[str, ...], status: str, **more: JsonValue) -> None:
        """Set the status of the volume, and ``more`` columns.

        Args:
            before: The permitted present statuses.
            status: The new status.
            more: Values of other columns.

        Raises:
            Fault: 400, the present status is not in ``before``.
        """
        values = {"status": status, **more}
        if not self.change.set(volumes, self.row.id, values, volumes.c.status.in_(before)):
            why = (
                f"Volume {self.row.id} status must be {' or '.join(before)}, but current status is"
                f" {self.row.status}."
            )
            raise fault("InvalidVolume", why=why)


def _extend(request: ActionRequest) -> None:
    row, size = request.row, request.body["new_size"]
    if size <= row.size:
        why = (
            "New size for extend must be greater than current size."
            f" (current: {row.size}, extended: {size})."
        )
        raise fault("InvalidInput", why=why)
    is_used = row.status == "in-use" and since(request.req, 42)
    _check_growing(request)
    quotas.check_size(request.change.connection, row.project_id, size)
    quotas.spend(request.change.connection, row.project_id, row.type_id, gigabytes=size - row.size)
    before = ("in-use",) if is_used else ("available",)
    request.move(before, "extending", previous_status=row.status)
    request.change.order("extend", row.id, size=size)


def _check_growing(request: ActionRequest) -> None:
    """Refuse to extend a volume with an NBD connection.

    Why: an NBD client gets the size of the volume only when it connects.

    Raises:
        Fault: 400, the volume has such a connection.
    """
    rows = find_connected(request.change.connection, request.row.id)
    if any(attachment.connection_info["driver_volume_type"] == "nbd" for attachment in rows):
        why = (
            f"volume {request.row.id} is connected over NBD, and an NBD client does not notice a new size; detach"
            " the volume first, or move the server to the host of the volumes."
        )
        raise fault("InvalidVolume", why=why)


def _set_bootable(request: ActionRequest) -> None:
    request.change.set(volumes, request.row.id, {"bootable": request.body["bootable"]})


def _set_readonly(request: ActionRequest) -> None:
    rule = volumes.c.status == "available"
    if not request.change.set(
        volumes, request.row.id, {"readonly": request.body["readonly"]}, rule
    ):
        why = f"Volume {request.row.id} status must be available to update readonly flag."
        raise fault("InvalidVolume", why=why)


def _reset_status(request: ActionRequest) -> None:
    status, attach = request.body.get("status"), request.body.get("attach_status")
    if not status and not attach and "migration_status" not in request.body:
        raise fault("BadRequest", why="os-reset_status needs status or attach_status.")
    if status:
        request.change.set(volumes, request.row.id, {"status": status, "previous_status": None})
    if attach == "detached":
        attachment_count = count(
            request.change.connection, attachments, attachments.c.volume_id == request.row.id
        )
        if attachment_count:
            why = f"Volume {request.row.id} has attachments: delete them with os-force_detach."
            raise fault("InvalidVolume", why=why)


def _upload(request: ActionRequest) -> Body:
    row, image, body = request.row, request.image or {}, request.body
    before = ("available", "in-use") if body.get("force") else ("available",)
    check_copied(request.change.connection, request.service, row)
    request.move(before, "uploading", previous_status=row.status)
    request.change.order(
        "upload",
        row.id,
        row.id,
        image_id=image["id"],
        disk_format=image["disk_format"],
        clone=request.service.files.shares_blocks,
    )
    type_name = select(types.c.name).where(types.c.id == row.type_id)
    return {
        "os-volume_upload_image": {
            "id": row.id,
            "updated_at": row.updated_at,
            "status": "uploading",
            "display_description": row.description,
            "size": row.size,
            "volume_type": {
                "id": row.type_id,
                "name": request.change.connection.execute(type_name).scalar(),
            },
            "image_id": image["id"],
            "container_format": image["container_format"],
            "disk_format": image["disk_format"],
            "image_name": image.get("name"),
            "protected": image.get("protected"),
            "visibility": image.get("visibility"),
        }
    }


def _reimage(request: ActionRequest) -> None:
    row, image = request.row, request.image or {}
    if count(request.change.connection, attachments, attachments.c.volume_id == row.id) > 1:
        why = "Cannot re-image a volume which is attached to more than one server."
        raise fault("Conflict", why=why)
    _check_still(request)
    images.check_size(image, row.size)
    before: tuple[str, ...] = ("available", "error")
    if request.body.get("reimage_reserved"):
        before += ("reserved",)
    request.move(before, "downloading", previous_status=row.status)
    request.change.order(
        "reimage",
        row.id,
        image_id=image["id"],
        disk_format=image["disk_format"],
        image_metadata=images.metadata(image),
    )


def _check_still(request: ActionRequest) -> None:
    """Refuse to replace the content of a volume that a host or a job uses.

    Raises:
        Fault: 409, a host is connected to the volume, or a job reads it.
    """
    connection, key = request.change.connection, request.row.id
    if find_connected(connection, key) or is_read(connection, key):
        raise fault(
            "Conflict",
            why=f"volume {key} is connected to a host, or a job copies it: detach the volume, or wait for the job",
        )


@dataclass(frozen=True)
class VolumeAction:
    """The definition of an action.

    Attributes:
        run: The function of the action. It returns the body of the response, or None without one.
        form: The schema of the action's body, or None if the body is ignored.
        minor: The first minor version with the action.
        is_admins: True if only admins may call the action.
        status: The status of the response.
    """

    run: Callable[[ActionRequest], Body | None]
    form: Document | None = None
    minor: int = 0
    is_admins: bool = False
    status: str = falcon.HTTP_202

    def validate(self, name: str, body: object) -> JsonValue:
        """Return the action's body in its canonical form, or None for an action without a form.

        Raises:
            HTTPBadRequest: The body does not match the schema.
        """
        return BodySchema(self.form).validate(body, name) if self.form else None


UPLOAD = mapping(
    {
        "image_name": text(minLength=1),
        "force": TRUTH,
        "disk_format": nullable(one_of(*WRITABLE)),
        "container_format": nullable(one_of("bare")),
        "visibility": nullable(one_of("public", "private", "shared", "community")),
        "protected": nullable(TRUTH),
    },
    "image_name",
)
STATUS_WORD = nullable(one_of(*STATUSES))
ACTIONS: Mapping[str, VolumeAction] = {
    "os-extend": VolumeAction(
        _extend, mapping({"new_size": integer(1, format="integer")}, "new_size")
    ),
    "os-set_bootable": VolumeAction(
        _set_bootable, mapping({"bootable": TRUTH}, "bootable"), status=falcon.HTTP_200
    ),
    "os-update_readonly_flag": VolumeAction(
        _set_readonly, mapping({"readonly": TRUTH}, "readonly")
    ),
    "os-reset_status": VolumeAction(
        _reset_status,
        mapping(
            {
                "status": STATUS_WORD,
                "attach_status": nullable(one_of("attached", "detached")),
                "migration_status": nullable(text()),
            }
        ),
        is_admins=True,
    ),
    "os-volume_upload_image": VolumeAction(_upload, UPLOAD),
    "os-reimage": VolumeAction(
        _reimage,
        mapping({"image_id": text(64), "reimage_reserved": TRUTH}, "image_id"),
        minor=68,
    ),
}
#: Actions of older clients that end attachments.
ENDING = ("os-detach", "os-force_detach", "os-terminate_connection")
DETACH = BodySchema(mapping({"attachment_id": nullable(text(64)), "connector": {}}, others=False))


class VolumeActions:
    """POST /v3/volumes/{key}/action: the actions of volumes."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body, caller = read_json(req), req.context.caller
        if not isinstance(body, dict) or len(body) != 1:
            raise fault("BadRequest", why="The body must be an object with one action.")
        [(name, action_body)] = body.items()
        if name in ENDING:
            self._end(req, resp, key, name, action_body)
            return
        action = ACTIONS.get(name)
        if action is None or not since(req, action.minor):
            raise fault("BadRequest", why=f"There is no such action: {name[:64]}")
        arguments = action.validate(name, action_body)
        with self._service.database.read() as connection:
            row = uses.find_volume(connection, caller, key)
        if action.is_admins:
            caller.require_admin(f"volume_extension:volume_admin_actions:{name}")
        caller.require_member(f"volume_extension:volume_actions:{name}")
        image = self._image(caller, row, name, arguments)
        with self._service.change() as change:
            row = uses.find_volume(change.connection, caller, key)
            response_body = action.run(
                ActionRequest(self._service, req, caller, change, row, arguments, image)
            )
        resp.status = action.status
        if response_body is not None:
            answer(resp, response_body)

    def _image(self, caller: VolumeCaller, row: DbRow, name: str, arguments: Body) -> Body | None:
        """Return the image of os-reimage or os-volume_upload_image, or None for other actions.

        For os-volume_upload_image a new image is created at the image service.

        Raises:
            Fault: 400, the image cannot be used, or the volume cannot be copied now. 400 or 403,
                the image service refuses the new image. 503, the image service cannot answer now.
        """
        if name == "os-reimage":
            return images.find_image(self._service, caller, arguments["image_id"])
        if name != "os-volume_upload_image":
            return None
        # These checks of the transaction come first, so that no image is created in vain.
        if row.status not in (
            ("available", "in-use") if arguments.get("force") else ("available",)
        ):
            why = f"Volume {row.id} status must be available, but current status is {row.status}."
            raise fault("InvalidVolume", why=why)
        with self._service.database.read() as connection:
            check_copied(connection, self._service, row)
        body: Body = {
            "name": arguments["image_name"],
            "disk_format": arguments.get("disk_format") or "raw",
            "container_format": arguments.get("container_format") or "bare",
            "min_disk": row.size,
            **{
                key: arguments[key]
                for key in ("visibility", "protected")
                if arguments.get(key) is not None
            },
        }
        kept_properties = {
            name: value
            for name, value in row.image_metadata.items()
            if name not in images.OWN and not name.startswith(NOT_OF_A_COPY)
        }
        return self._service.images.create(kept_properties | body, caller.token)

    def _end(
        self, req: falcon.Request, resp: falcon.Response, key: str, name: str, action_body: object
    ) -> None:
        """Delete the attachments of a volume, or only the requested attachment, and answer 202.

        Raises:
            HTTPBadRequest: The body does not match the schema.
            Fault: 400, there is no such attachment, or the action is os-terminate_connection. 403,
                the caller may not do this. 404, the volume is unknown. 409, a server uses the
                volume. 503, the compute service cannot answer now.
        """
        attachment_id = DETACH.validate(action_body, name).get("attachment_id")
        caller: VolumeCaller = req.context.caller
        with self._service.database.read() as connection:
            row = uses.find_volume(connection, caller, key)
            caller.require_member(f"volume_extension:volume_actions:{name}")
            if name == "os-force_detach":
                caller.require_admin("volume_extension:volume_admin_actions:force_detach")
            rows = connection.execute(
                select(attachments).where(attachments.c.volume_id == row.id)
            ).all()
        chosen_rows = [attachment for attachment in rows if attachment_id in (None, attachment.id)]
        for attachment in chosen_rows:
            uses.check_deletable(self._service, caller, attachment)
        if name == "os-terminate_connection":
            raise fault(
                "BadRequest", why="os-terminate_connection is not supported: delete the attachment."
            )
        if not chosen_rows:
            raise fault("InvalidVolume", why=f"Volume {row.id} has no such attachment.")
        for attachment in chosen_rows:
            uses.delete(self._service, attachment.id, row.id)
        resp.status = falcon.HTTP_202
