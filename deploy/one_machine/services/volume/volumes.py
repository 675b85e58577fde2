# SPDX-License-Identifier: Apache-2.0
"""/v3/volumes: the list, one volume, and the creation of a volume.

For actions see volume_actions.py.

creating/downloading --> available <--> reserved, attaching, in-use, detaching (attachments.py)
available or in-use <--> extending, uploading
any but attached --> deleting --> deleted
a failure --> error, error_extending, error_deleting
"""

from collections.abc import Iterable, Mapping

import falcon
from sqlalchemy import ColumnElement, Connection, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.listing import value_of
from deploy.one_machine.services.resource import Body, BriefCollection, Item, Resource
from deploy.one_machine.services.schemas import (
    TRUTHS,
    BodySchema,
    Document,
    integer,
    mapping,
    nullable,
    text,
)
from deploy.one_machine.services.volume import images, quotas
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.listing import list_rows, of_pairs
from deploy.one_machine.services.volume.schema import attachments, snapshots, types, volumes
from deploy.one_machine.services.volume.service import (
    VolumeChange,
    VolumeService,
    count,
    default_type,
    find_connected,
    is_read,
)
from deploy.one_machine.services.volume.versions import links, since
from deploy.one_machine.services.web import answer, part_of, read_json

NAME = nullable(text())
#: Metadata of a volume or snapshot.
PAIRS: Document = {
    "type": "object",
    "maxProperties": 128,
    "propertyNames": {"minLength": 1, "maxLength": 255},
    "additionalProperties": {"type": "string", "maxLength": 255},
}
ID = nullable(text(64))
SIZE = nullable(integer(1, format="integer"))
NEW: Mapping[str, Document] = {
    "name": NAME,
    "display_name": NAME,
    "description": NAME,
    "display_description": NAME,
    "size": SIZE,
    "volume_type": NAME,
    "snapshot_id": ID,
    "source_volid": ID,
    "imageRef": NAME,
    "image_id": NAME,
    "availability_zone": NAME,
    "metadata": nullable(PAIRS),
    "multiattach": nullable({"type": "boolean", "format": "boolean"}),
    "consistencygroup_id": ID,
    "group_id": ID,
    "backup_id": ID,
}
#: Unknown attributes are ignored before 3.53, and refused from then on.
CREATE, CREATE_LENIENT = (BodySchema(mapping(NEW, others=others)) for others in (False, True))
FILTERS = {
    **dict.fromkeys(
        ("id", "name", "status", "bootable", "size", "availability_zone", "multiattach", "user_id")
    ),
    "snapshot_id": None,
    "metadata": of_pairs(volumes.c.metadata),
    "glance_metadata": of_pairs(volumes.c.image_metadata),
    "volume_type_id": lambda value: volumes.c.type_id == value,
}
DELETABLE = ("available", "error", "error_restoring", "error_extending", "error_managing")


class VolumesApi(Resource):
    """The API of volumes, /v3/volumes."""

    name, plural, table, bulk = "volume", "volumes", volumes, False

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def visible(self, caller: VolumeCaller) -> ColumnElement[bool]:
        return caller.sees(volumes)

    def admit_to(self, caller: VolumeCaller, action: str, row: DbRow) -> None:
        caller.require_member(f"volume:{action}")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault("VolumeNotFound", id=key)

    def validate(self, caller: VolumeCaller, body: object, *, new: bool) -> Body:
        values: Body = CREATE.validate(body, "volume")
        for name in ("name", "description"):
            if f"display_{name}" in values:
                values.setdefault(name, values.pop(f"display_{name}"))
            if isinstance(values.get(name), str):
                values[name] = values[name].strip()
        return values

    def page(self, service: VolumeService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        return list_rows(service, req, volumes, FILTERS, "volumes")

    def brief(self, req: falcon.Request, row: DbValues) -> Body:
        self_links = links(req, "volumes", row["id"])
        return {"id": row["id"], "name": row["name"], "links": self_links}

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        key = row["id"]
        with self._service.database.read() as connection:
            rows = connection.execute(
                select(attachments).where(
                    attachments.c.volume_id == key, attachments.c.status == "attached"
                )
            ).all()
            type_name = connection.execute(
                select(types.c.name).where(types.c.id == row["type_id"])
            ).scalar()
        return _view(req, self._service, row, rows, type_name or "")


def _view(
    req: falcon.Request,
    service: VolumeService,
    row: DbValues,
    attached_rows: Iterable[DbRow],
    type_name: str,
) -> Body:
    caller: VolumeCaller = req.context.caller
    names = (
        "id status size availability_zone created_at updated_at name description snapshot_id"
        " source_volid user_id multiattach"
    )
    fields = {name: row[name] for name in names.split()} | {
        "metadata": dict(row["metadata"])
        | ({} if row["readonly"] is None else {"readonly": str(row["readonly"])}),
        "volume_type": type_name,
        "bootable": str(row["bootable"]).lower(),
        "encrypted": False,
        "replication_status": None,
        "consistencygroup_id": None,
        "links": links(req, "volumes", row["id"]),
        "attachments": [
            {
                "id": row["id"],
                "attachment_id": attachment.id,
                "volume_id": row["id"],
                "server_id": attachment.instance,
                "host_name": attachment.host if caller.is_admin or caller.is_service else None,
                "device": attachment.mountpoint,
                "attached_at": attachment.attached_at,
            }
            for attachment in attached_rows
        ],
    }
    admin_fields: Body = {
        "os-vol-host-attr:host": service.backend,
        "os-vol-mig-status-attr:migstat": None,
        "os-vol-mig-status-attr:name_id": None,
    }
    version_fields: tuple[tuple[int, bool, Body], ...] = (
        (13, False, {"group_id": None}),
        (21, True, {"provider_id": None}),
        # Clients need no locks against each other, because each has a separate connection.
        (48, False, {"shared_targets": False, "service_uuid": None}),
        (61, True, {"cluster_name": None}),
        (63, False, {"volume_type_id": row["type_id"]}),
        (65, False, {"consumes_quota": True}),
    )
    if caller.is_admin:
        fields["migration_status"] = None
    # Cinder's extensions only extend the response to GET.
    if req.method == "GET":
        fields["os-vol-tenant-attr:tenant_id"] = row["project_id"]
        fields |= admin_fields if caller.is_admin else {}
        if row["image_metadata"]:
            fields["volume_image_metadata"] = row["image_metadata"]
    for minor, is_admins, new_fields in version_fields:
        if since(req, minor) and (caller.is_admin or not is_admins):
            fields |= new_fields
    return fields


class VolumeCollection(BriefCollection):
    """GET and POST /v3/volumes, and GET .../detail."""

    def __init__(self, service: VolumeService, api: VolumesApi) -> None:
        super().__init__(service, api)
        self._volumes, self._api = service, api

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: VolumeCaller = req.context.caller
        caller.require_member("volume:create")
        attributes = part_of(read_json(req), "volume")
        form = CREATE if since(req, 53) else CREATE_LENIENT
        form.validate(attributes, "volume")
        if isinstance(attributes, dict):
            attributes = {name: value for name, value in attributes.items() if name in NEW}
        body = self._api.validate(caller, attributes, new=True)
        reference = body.pop("imageRef", None) or body.pop("image_id", None)
        body.pop("image_id", None)
        image = images.find_image(self._volumes, caller, reference) if reference else None
        snapshot = images.root_snapshot(image) if image else None
        if image and snapshot and not body.get("snapshot_id"):
            if not since(req, 46):
                why = "its disk is a volume snapshot; use microversion 3.46 or later"
                raise fault("ImageUnacceptable", id=image["id"], why=why)
            body, image = {**body, "snapshot_id": snapshot}, None
        with self._volumes.change() as change:
            key = _make(change, self._volumes, caller, body, image)
        with self._volumes.database.read() as connection:
            row = self._api.find(connection, caller, key)
        resp.status = falcon.HTTP_202
        answer(resp, {"volume": self._api.show(req, row._mapping)})


def _make(
    change: VolumeChange,
    service: VolumeService,
    caller: VolumeCaller,
    body: Body,
    image: Body | None,
) -> str:
    """Insert a volume and the job that fills the volume, and return the id.

    Args:
        change: The transaction.
        service: The service.
        caller: The caller.
        body: The validated request.
        image: The image from which the volume is filled, or None.

    Raises:
        Fault: 400, the request is invalid, or the source cannot be copied now. 404, an object of
            the request is unknown. 413, a limit would be exceeded.
    """
    _check_new(service, body)
    sources = [name for name in ("snapshot_id", "source_volid") if body.get(name)]
    if len(sources) + (image is not None) > 1:
        why = "Give only one of imageRef, snapshot_id and source_volid."
        raise fault("InvalidInput", why=why)
    source = _source(change.connection, caller, body, sources[0]) if sources else None
    size = body.get("size") or (source.size if source is not None else None)
    if size is None:
        why = "Volume size must be specified when creating a volume from an image or blank."
        raise fault("InvalidInput", why=why)
    if source is not None and size < source.size:
        raise fault(
            "InvalidInput",
            why=f"The size must be at least {source.size} GB, the size of the source.",
        )
    if image is not None:
        images.check_size(image, size)
    kind = _type(change.connection, caller, body.get("volume_type"), source)
    quotas.check_size(change.connection, caller.project_id, size)
    quotas.spend(change.connection, caller.project_id, kind.id, volumes=1, gigabytes=size)
    image_metadata = images.metadata(image) if image else getattr(source, "image_metadata", {})
    origin = getattr(source, "volume_id", getattr(source, "id", ""))
    bootable = select(volumes.c.bootable).where(volumes.c.id == origin)
    key = change.add(
        volumes,
        {
            "project_id": caller.project_id,
            "user_id": caller.user_id,
            "name": body.get("name"),
            "description": body.get("description"),
            "status": "downloading" if image else "creating",
            "size": size,
            "availability_zone": service.settings.zone,
            "type_id": kind.id,
            "multiattach": is_multiattach(kind.extra_specs),
            "bootable": image is not None or bool(change.connection.execute(bootable).scalar()),
            "snapshot_id": body.get("snapshot_id"),
            "source_volid": body.get("source_volid"),
            "metadata": body.get("metadata") or {},
            "image_metadata": image_metadata,
        },
    )
    if image is not None:
        change.order("download", key, image_id=image["id"], disk_format=image["disk_format"])
    elif source is None:
        change.order("create", key)
    elif sources == ["snapshot_id"]:
        change.order("copy", key, source.id, read="snapshot")
    else:
        check_copied(change.connection, service, source)
        change.order("copy", key, source.id, read="volume")
    return key


def _check_new(service: VolumeService, body: Body) -> None:
    zone = body.get("availability_zone")
    if zone not in (None, "", service.settings.zone):
        raise fault("InvalidAvailabilityZone", id=zone)
    if body.get("multiattach"):
        why = "multiattach parameter has been removed: use a volume type with multiattach."
        raise fault("BadRequest", why=why)
    if body.get("backup_id"):
        raise fault("BackupNotFound", id=body["backup_id"])
    for name in ("consistencygroup_id", "group_id"):
        if body.get(name):
            raise fault("BadRequest", why=f"Groups of volumes are not supported: leave {name} out.")


def _source(connection: Connection, caller: VolumeCaller, body: Body, name: str) -> DbRow:
    """Return the snapshot or volume from which a new volume is copied.

    Args:
        connection: The connection of the transaction.
        caller: The caller.
        body: The validated request.
        name: The field with the source's id: "snapshot_id" or "source_volid".

    Raises:
        Fault: 404, the source is unknown. 400, its status does not allow a copy.
    """
    table = snapshots if name == "snapshot_id" else volumes
    row = connection.execute(
        select(table).where(table.c.id == body[name], caller.sees(table))
    ).first()
    if row is None:
        missing = "SnapshotNotFound" if table is snapshots else "VolumeNotFound"
        raise fault(missing, id=body[name])
    if row.status not in (("available",) if table is snapshots else ("available", "in-use")):
        kind = "InvalidSnapshot" if table is snapshots else "InvalidVolume"
        why = f"Originating {table.name[:-1]} status must be available, but it is {row.status}."
        raise fault(kind, why=why)
    return row


def check_copied(connection: Connection, service: VolumeService, row: DbRow) -> None:
    """Check that a copy of the volume would be consistent.

    Raises:
        Fault: 400, an attachment has a connection, through which a host may write to the volume,
            and the file system cannot share blocks.
    """
    if not service.files.shares_blocks and find_connected(connection, row.id):
        why = (
            f"volume {row.id} is in use, and the folder of the volumes is on a file system that"
            " cannot share blocks (XFS and Btrfs can): a copy would be inconsistent."
            " Detach the volume first."
        )
        raise fault("InvalidVolume", why=why)


def _type(
    connection: Connection, caller: VolumeCaller, requested_type: str | None, source: DbRow | None
) -> DbRow:
    """Return the type of a new volume: the requested type, that of the source, or the default.

    Raises:
        Fault: 404, the requested type is unknown.
    """
    if requested_type:
        return find_type(connection, caller, requested_type)
    key = source.type_id if source is not None else default_type(connection)
    return connection.execute(select(types).where(types.c.id == key)).one()


def find_type(connection: Connection, caller: VolumeCaller, reference: str) -> DbRow:
    """Return a type by id or name that the caller may use.

    Raises:
        Fault: 404, there is no such type, or the type is invisible to the caller.
    """
    rules = [] if caller.is_admin else [types.c.is_public.is_(True)]
    row = connection.execute(
        select(types).where((types.c.id == reference) | (types.c.name == reference), *rules)
    ).first()
    if row is None:
        raise fault("TypeNotFound", id=reference)
    return row


def is_multiattach(extra_specs: Mapping[str, str]) -> bool:
    """Return True if volumes of this type can be attached to several servers."""
    word = extra_specs.get("multiattach", "").replace("<is>", "").strip().lower()
    return bool(TRUTHS.get(word))


class VolumeItem(Item):
    """GET and DELETE /v3/volumes/{key}."""

    def __init__(self, service: VolumeService, api: VolumesApi) -> None:
        super().__init__(service, api)
        self._volumes, self._api = service, api

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: VolumeCaller = req.context.caller
        cascade = bool(TRUTHS.get(value_of(req.params, "cascade").lower()))
        force = since(req, 23) and bool(TRUTHS.get(value_of(req.params, "force").lower()))
        with self._volumes.change() as change:
            row = self._api.find(change.connection, caller, key)
            self._api.admit_to(caller, "delete", row)
            if force:
                caller.require_admin("volume:force_delete")
            remove(change, row, force=force, cascade=cascade)
        resp.status = falcon.HTTP_202


def remove(change: VolumeChange, row: DbRow, *, force: bool, cascade: bool = False) -> None:
    """Set a volume to the status deleting, and add the job that deletes the volume.

    Args:
        change: The transaction.
        row: The volume.
        force: Ignore the statuses of the volume and its snapshots.
        cascade: Delete the snapshots too.

    Raises:
        Fault: 400, the volume has attachments, a job copies the volume or a snapshot, there are
            snapshots without ``cascade``, or a status does not allow this.
    """
    connection = change.connection
    has_attachments = count(connection, attachments, attachments.c.volume_id == row.id)
    own_snapshots = connection.execute(
        select(snapshots).where(snapshots.c.volume_id == row.id)
    ).all()
    is_copied = is_read(connection, row.id) or any(
        is_read(connection, snapshot.id) for snapshot in own_snapshots
    )
    stuck = [
        snapshot
        for snapshot in own_snapshots
        if snapshot.status not in ("available", "error", "deleting", "error_deleting")
    ]
    if (
        is_copied
        or has_attachments
        or (own_snapshots and not cascade)
        or (stuck and not force)
        or (not force and row.status not in DELETABLE)
    ):
        why = (
            f"Volume status must be {' or '.join(DELETABLE)} and must not be migrating, attached,"
            " belong to a group, have snapshots, awaiting a transfer, or be disassociated from"
            " snapshots after volume transfer, and no job may copy the volume."
        )
        raise fault("InvalidVolume", why=why)
    change.set(volumes, row.id, {"status": "deleting"})
    for snapshot in own_snapshots:
        change.set(snapshots, snapshot.id, {"status": "deleting"})
    change.order("delete", row.id, snapshots=[snapshot.id for snapshot in own_snapshots])
