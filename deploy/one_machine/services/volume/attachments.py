# SPDX-License-Identifier: Apache-2.0
"""/v3/attachments: the attachments of volumes, from microversion 3.27 on.

An attachment is reserved for a server. The attachment gets a connection when the server's host
sends its connector (attaching), and is completed from 3.44 on (attached). The connection ends with
the attachment. A volume has one attachment, or several if it is multiattach or if its server moves.
Each change of status is one transaction with the change of the volume.
"""

import time

import falcon
from sqlalchemy import Connection, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import BodySchema, mapping, nullable, one_of, text
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.listing import list_rows
from deploy.one_machine.services.volume.schema import attachments, jobs, volumes
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService, moment
from deploy.one_machine.services.volume.states import update_status
from deploy.one_machine.services.volume.versions import require, since
from deploy.one_machine.services.web import answer, part_of, read_json

CONNECTOR = {"type": "object", "maxProperties": 64}
NEW = {
    "volume_uuid": text(64),
    "instance_uuid": nullable(text(64)),
    "connector": nullable(CONNECTOR),
}
CREATE = BodySchema(mapping(NEW, "volume_uuid"))
CREATE_WITH_MODE = BodySchema(
    mapping(NEW | {"mode": nullable(one_of("rw", "ro", "null"))}, "volume_uuid")
)
UPDATE = BodySchema(mapping({"connector": CONNECTOR | {"minProperties": 1}}, "connector"))
FILTERS = {
    "volume_id": None,
    "status": None,
    "attach_status": lambda value: attachments.c.status == value,
    "instance_id": lambda value: attachments.c.instance == value,
}
#: Jobs that replace the content of a volume.
FILLING = ("create", "copy", "download", "reimage")
POLL_SECONDS = 0.1


class VolumeAttachments:
    """GET and POST /v3/attachments, GET .../detail, and one attachment.

    An attachment has GET, PUT and DELETE .../{key}, and POST .../{key}/action.
    """

    minor = 27

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        rows, extras = list_rows(self._service, req, attachments, FILTERS, "attachments")
        answer(resp, {"attachments": [summary(row) for row in rows]} | extras)

    def on_get_detail(self, req: falcon.Request, resp: falcon.Response) -> None:
        rows, extras = list_rows(self._service, req, attachments, FILTERS, "attachments")
        answer(resp, {"attachments": [detail(row) for row in rows]} | extras)

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        with self._service.database.read() as connection:
            answer(resp, {"attachment": detail(_find(connection, req.context.caller, key))})

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: VolumeCaller = req.context.caller
        form = CREATE_WITH_MODE if since(req, 54) else CREATE
        body: Body = form.validate(part_of(read_json(req), "attachment"), "attachment")
        mode = body.get("mode")
        with self._service.change() as change:
            volume = find_volume(change.connection, caller, body["volume_uuid"])
            caller.require_member("volume:attachment_create")
            key = _reserve(change, volume, body.get("instance_uuid"), mode)
        if body.get("connector"):
            try:
                self._connect(caller, key, body["connector"])
            except falcon.HTTPError:
                self._delete(key, volume.id)
                raise
        self._answer(req, resp, key)

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body: Body = UPDATE.validate(part_of(read_json(req), "attachment"), "attachment")
        self._connect(req.context.caller, key, body["connector"])
        self._answer(req, resp, key)

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: VolumeCaller = req.context.caller
        with self._service.database.read() as connection:
            row = _find(connection, caller, key)
        caller.require_member("volume:attachment_delete")
        check_deletable(self._service, caller, row)
        self._delete(key, row.volume_id)
        with self._service.database.read() as connection:
            rows = connection.execute(
                select(attachments).where(attachments.c.volume_id == row.volume_id)
            ).all()
        answer(resp, {"attachments": [summary(one) for one in rows]})

    def on_post_action(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req, 44)
        part_of(read_json(req), "os-complete")
        caller: VolumeCaller = req.context.caller
        with self._service.change() as change:
            row = _find(change.connection, caller, key)
            caller.require_member("volume:attachment_complete")
            values = {"status": "attached", "attached_at": row.attached_at or moment()}
            change.set(attachments, key, values)
            update_status(change, row.volume_id)
        resp.status = falcon.HTTP_204

    def _answer(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        with self._service.database.read() as connection:
            answer(resp, {"attachment": detail(_find(connection, req.context.caller, key))})

    def _connect(self, caller: VolumeCaller, key: str, connector: Body) -> None:
        """Wait until no job copies or fills the volume, then give the attachment a connection.

        Raises:
            Fault: 403, the caller may not do this. 404, the attachment is unknown. 400 or 409, as
                in the function `_connect`. 409, a job still uses the volume after `wait_seconds`.
                503, the volume cannot be exported, and the attachment is reserved again.
        """
        until = time.monotonic() + self._service.settings.wait_seconds
        while True:
            with self._service.change() as change:
                row = _find(change.connection, caller, key)
                caller.require_member("volume:attachment_update")
                volume = find_volume(change.connection, caller, row.volume_id)
                if not _is_busy(change.connection, self._service, volume.id):
                    _connect(change, self._service, volume, row, connector)
                    break
            if time.monotonic() > until:
                why = f"a job copies or fills volume {volume.id}; try again later"
                raise fault("Conflict", why=why)
            time.sleep(POLL_SECONDS)
        try:
            self._service.open_export(key)
        except falcon.HTTPError:
            with self._service.change() as change:
                update_status(change, volume.id)
            raise

    def _delete(self, key: str, volume_id: str) -> None:
        delete(self._service, key, volume_id)


def delete(service: VolumeService, key: str, volume_id: str) -> None:
    """End the connection of an attachment, delete the attachment and update the volume's status.

    Args:
        service: The service.
        key: The id of the attachment.
        volume_id: The id of the volume.
    """
    with service.exports.lock:
        service.exports.end(key)
        with service.change() as change:
            change.remove(attachments, key)
            update_status(change, volume_id)


def check_deletable(service: VolumeService, caller: VolumeCaller, row: DbRow) -> None:
    """Refuse a user's request to delete an attachment through which a server uses the volume.

    Services may delete it. Why: the server's device would stay, and might belong to another volume
    later (CVE-2023-2088). Without a compute service every attachment may be deleted.

    Args:
        service: The service.
        caller: The caller.
        row: The attachment's row.

    Raises:
        Fault: 409, the server uses the volume. 503, the compute service does not answer.
    """
    if caller.is_service or not (row.instance and row.connection_info):
        return
    if service.compute.attachment_of(row.instance, row.volume_id) in ("", row.id):
        raise fault("InUseByServer", server=row.instance)


def find_volume(connection: Connection, caller: VolumeCaller, key: str) -> DbRow:
    """Return a volume that the caller may see.

    Raises:
        Fault: 404, there is no such volume, or the volume is invisible to the caller.
    """
    row = connection.execute(
        select(volumes).where(volumes.c.id == key, caller.sees(volumes))
    ).first()
    if row is None:
        raise fault("VolumeNotFound", id=key)
    return row


def _find(connection: Connection, caller: VolumeCaller, key: str) -> DbRow:
    row = connection.execute(
        select(attachments).where(attachments.c.id == key, caller.sees(attachments))
    ).first()
    if row is None:
        raise fault("AttachmentNotFound", id=key)
    return row


def _reserve(change: VolumeChange, volume: DbRow, instance: str | None, mode: str | None) -> str:
    """Create an attachment without a connection, and return its id.

    The volume becomes reserved. If the same server already has an attachment of the volume, as in a
    move, the status may stay.

    Args:
        change: The transaction.
        volume: The volume's row.
        instance: The id of the server, or None.
        mode: "rw", "ro", or "null" or None for the connector's mode. Ignored for a read-only
            volume, whose attachments are "ro".

    Raises:
        Fault: 400, the volume's status or another attachment does not allow this.
    """
    other = change.connection.execute(
        select(attachments.c.id).where(
            attachments.c.volume_id == volume.id,
            attachments.c.instance.is_distinct_from(instance) | attachments.c.instance.is_(None),
        )
    ).first()
    # An admin may have reset the status while a server writes to the volume.
    if other is not None and not volume.multiattach:
        why = f"volume {volume.id} is attached: its status is {volume.status}"
        raise fault("InvalidVolume", why=why)
    expected = ("available", "in-use") if volume.multiattach else ("available",)
    if not change.set(volumes, volume.id, {"status": "reserved"}, volumes.c.status.in_(expected)):
        # A moving server has the volume on two hosts.
        own_query = select(attachments.c.id).where(
            attachments.c.volume_id == volume.id, attachments.c.instance == instance
        )
        is_own = instance and change.connection.execute(own_query).first() is not None
        if not (is_own and volume.status in ("in-use", "reserved", "attaching", "detaching")):
            why = (
                f"Volume {volume.id} status must be {' or '.join(expected)} to reserve, but the"
                f" current status is {volume.status}."
            )
            raise fault("InvalidVolume", why=why)
    return change.add(
        attachments,
        {
            "volume_id": volume.id,
            "project_id": volume.project_id,
            "instance": instance,
            "status": "reserved",
            "mode": "ro" if volume.readonly else (None if mode == "null" else mode),
        },
    )


def _is_busy(connection: Connection, service: VolumeService, volume_id: str) -> bool:
    rules = (jobs.c.target_id == volume_id) & jobs.c.kind.in_(FILLING)
    if not service.files.shares_blocks:
        rules |= jobs.c.source_id == volume_id
    return connection.execute(select(jobs.c.id).where(rules).limit(1)).first() is not None


def _connect(
    change: VolumeChange, service: VolumeService, volume: DbRow, row: DbRow, connector: Body
) -> None:
    """Store the connection of an attachment. The caller then opens the export.

    The attachment becomes attaching. So does a volume that is available, reserved or in-use.

    Args:
        change: The transaction.
        service: The service.
        volume: The volume's row.
        row: The attachment's row.
        connector: The properties of the server's host: host, mode, mountpoint and others.

    Raises:
        Fault: 409, the volume has an error, no file, or without multiattach another connection to
            the same host. 400, the mode is invalid, or the volume is not exported to other hosts.
            503, no port is free.
    """
    if "error" in volume.status:
        why = f"the status of volume {volume.id} is {volume.status}"
        raise fault("Conflict", why=why)
    host = str(connector.get("host") or "")
    others = change.connection.execute(
        select(attachments).where(attachments.c.volume_id == volume.id, attachments.c.id != row.id)
    ).all()
    if not volume.multiattach and any(
        attachment.connection_info and attachment.host == host for attachment in others
    ):
        why = f"volume {volume.id} already has a connection to host {host[:64]}"
        raise fault("Conflict", why=why)
    mode = "ro" if volume.readonly else row.mode or connector.get("mode") or "rw"
    if mode not in ("rw", "ro"):
        raise fault("InvalidInput", why="The mode of an attachment must be rw or ro.")
    info = service.connection_info(change, volume, row, host, mode)
    values = {
        "status": "attaching",
        "connector": connector,
        "connection_info": info,
        "mode": mode,
        "host": host,
        "mountpoint": str(connector.get("mountpoint") or "na")[:255],
    }
    change.set(attachments, row.id, values)
    change.set(
        volumes,
        volume.id,
        {"status": "attaching"},
        volumes.c.status.in_(("reserved", "in-use", "attaching", "available")),
    )


def summary(row: DbRow) -> Body:
    """Return the short form of an attachment, for lists."""
    return {
        "id": row.id,
        "status": row.status,
        "instance": row.instance,
        "volume_id": row.volume_id,
    }


def detail(row: DbRow) -> Body:
    """Return the long form of an attachment, with its connection."""
    info: DbValues = row.connection_info or {}
    return summary(row) | {
        "attached_at": row.attached_at or "",
        "detached_at": "",
        "attach_mode": row.mode or "null",
        "connection_info": dict(info),
    }
