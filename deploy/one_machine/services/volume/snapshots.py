# SPDX-License-Identifier: Apache-2.0
"""/v3/snapshots: contents of volumes at one moment, as files of their own (files.py)."""

import falcon
from sqlalchemy import ColumnElement, select

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.resource import Body, BriefCollection, Item, Resource
from deploy.one_machine.services.schemas import BodySchema, mapping, nullable, one_of, text
from deploy.one_machine.services.volume import quotas
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.listing import list_rows, of_pairs
from deploy.one_machine.services.volume.schema import snapshots, volumes
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService, is_read
from deploy.one_machine.services.volume.versions import since
from deploy.one_machine.services.volume.volumes import NAME, PAIRS, check_copied
from deploy.one_machine.services.web import answer, part_of, read_json

NAMES = dict.fromkeys(("name", "display_name", "description", "display_description"), NAME)
CREATE = BodySchema(
    mapping(
        NAMES
        | {
            "volume_id": text(64),
            "force": {"type": "boolean", "format": "boolean", "null_is": False},
            "metadata": nullable(PAIRS),
        },
        "volume_id",
    )
)
FILTERS = {
    **dict.fromkeys(("id", "name", "status", "volume_id", "user_id", "size")),
    "metadata": of_pairs(snapshots.c.metadata),
    "consumes_quota": lambda value: snapshots.c.id.is_not(None),
}
STATUSES = ("available", "creating", "deleting", "error", "error_deleting")
#: The statuses that a host may report for a snapshot, by its present status.
REPORTED = {
    "creating": ("creating", "available", "error"),
    "deleting": ("deleting", "error_deleting"),
}
RESET = BodySchema(mapping({"status": one_of(*STATUSES)}, "status"))
PROGRESS = BodySchema(mapping({"status": text(), "progress": nullable(text(16))}, "status"))


class SnapshotsApi(Resource):
    """Snapshots of volumes."""

    name, plural, table, bulk = "snapshot", "snapshots", snapshots, False

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def visible(self, caller: VolumeCaller) -> ColumnElement[bool]:
        return caller.sees(snapshots)

    def admit(self, caller: VolumeCaller, action: str, key: str = "") -> None:
        if action == "create":
            caller.require_member("volume:create_snapshot")

    def admit_to(self, caller: VolumeCaller, action: str, row: DbRow) -> None:
        caller.require_member(f"volume:{action}_snapshot")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault("SnapshotNotFound", id=key)

    def validate(self, caller: VolumeCaller, body: object, *, new: bool) -> Body:
        values: Body = CREATE.validate(body, "snapshot")
        for name in ("name", "description"):
            if f"display_{name}" in values:
                values.setdefault(name, values.pop(f"display_{name}"))
        return values

    def page(self, service: VolumeService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        return list_rows(service, req, snapshots, FILTERS, "snapshots")

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return self.changed(req, row) | {
            "os-extended-snapshot-attributes:progress": row["progress"],
            "os-extended-snapshot-attributes:project_id": row["project_id"],
        }

    def brief(self, req: falcon.Request, row: DbValues) -> Body:
        names = "id created_at updated_at name description volume_id status size metadata"
        return {name: row[name] for name in names.split()}

    def changed(self, req: falcon.Request, row: DbValues) -> Body:
        """Return the snapshot in the response to a create request.

        As in Cinder, the progress and the project are only in the response to GET (`show`).
        """
        version_fields = (
            (14, {"group_snapshot_id": None}),
            (41, {"user_id": row["user_id"]}),
            (65, {"consumes_quota": True}),
        )
        fields = self.brief(req, row)
        for minor, new_fields in version_fields:
            fields |= new_fields if since(req, minor) else {}
        return fields

    def create(self, change: VolumeChange, caller: VolumeCaller, body: Body) -> str:
        connection = change.connection
        volume = connection.execute(
            select(volumes).where(volumes.c.id == body["volume_id"], caller.sees(volumes))
        ).first()
        if volume is None:
            raise fault("VolumeNotFound", id=body["volume_id"])
        valid = ("available", "in-use") if body.get("force") else ("available",)
        if volume.status not in valid:
            why = (
                f"Volume {volume.id} status must be {', '.join(valid)}, but current status is:"
                f" {volume.status}."
            )
            raise fault("InvalidVolume", why=why)
        check_copied(connection, self._service, volume)
        quotas.spend(
            connection, caller.project_id, volume.type_id, snapshots=1, gigabytes=volume.size
        )
        key = change.add(
            snapshots,
            {
                "volume_id": volume.id,
                "project_id": caller.project_id,
                "user_id": caller.user_id,
                "name": body.get("name"),
                "description": body.get("description"),
                "status": "creating",
                "size": volume.size,
                "type_id": volume.type_id,
                "metadata": body.get("metadata") or {},
                "image_metadata": volume.image_metadata,
            },
        )
        change.order("snapshot", key, volume.id, read="volume")
        return key

    def delete(self, change: VolumeChange, caller: VolumeCaller, row: DbRow) -> None:
        if is_read(change.connection, row.id):
            raise fault("InvalidSnapshot", why=f"a job copies snapshot {row.id}; try again later")
        if row.status not in ("available", "error"):
            why = "Snapshot status must be available or error and must not be part of a group."
            raise fault("InvalidSnapshot", why=why)
        change.set(snapshots, row.id, {"status": "deleting"})
        change.order("delete-snapshot", row.id)


class SnapshotCollection(BriefCollection):
    """GET and POST /v3/snapshots, and GET .../detail."""

    def __init__(self, service: VolumeService, api: SnapshotsApi) -> None:
        super().__init__(service, api)
        self._snapshots, self._api = service, api

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: VolumeCaller = req.context.caller
        self._api.admit(caller, "create")
        body = self._api.validate(caller, part_of(read_json(req), "snapshot"), new=True)
        if since(req, 66):
            if body.get("force") is False and "force" in body:
                why = "Since microversion 3.66 the 'force' option is invalid: leave it out."
                raise fault("BadRequest", why=why)
            # Since 3.66 every request is allowed as with force.
            body["force"] = True
        with self._snapshots.change() as change:
            key = self._api.create(change, caller, body)
        with self._snapshots.database.read() as connection:
            row = self._api.find(connection, caller, key)
        resp.status = falcon.HTTP_202
        answer(resp, {"snapshot": self._api.changed(req, row._mapping)})


class SnapshotItem(Item):
    """GET and DELETE /v3/snapshots/{key}, and POST .../action."""

    def __init__(self, service: VolumeService, api: SnapshotsApi) -> None:
        super().__init__(service, api)
        self._snapshots, self._api = service, api

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        super().on_delete(req, resp, key)
        resp.status = falcon.HTTP_202

    def on_post_action(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        body, caller = read_json(req), req.context.caller
        if not isinstance(body, dict) or len(body) != 1:
            raise fault("BadRequest", why="The body must be an object with one action.")
        [(name, arguments)] = body.items()
        with self._snapshots.change() as change:
            row = self._api.find(change.connection, caller, key)
            if name in ("os-reset_status", "os-update_snapshot_status"):
                caller.require_admin(f"volume_extension:snapshot_admin_actions:{name}")
                form = RESET if name == "os-reset_status" else PROGRESS
                values = form.validate(arguments, name)
                if values["status"] not in STATUSES:
                    raise fault(
                        "BadRequest", why=f"The status must be one of {', '.join(STATUSES)}."
                    )
                if form is PROGRESS and values["status"] not in REPORTED.get(row.status, ()):
                    why = (
                        f"Snapshot {row.id} has the status {row.status}, which cannot become"
                        f" {values['status']}."
                    )
                    raise fault("BadRequest", why=why)
                change.set(
                    snapshots, row.id, {name: value for name, value in values.items() if value}
                )
            else:
                raise fault("BadRequest", why=f"There is no such action: {name[:64]}")
        resp.status = falcon.HTTP_202
