# SPDX-License-Identifier: Apache-2.0
"""/v3/os-quota-sets and /v3/limits: the limits of projects.

Usage is counted in the transaction that adds an object, so the result is always correct. There is a
limit for each project, and one for each type (`volumes_NAME`). -1 means unlimited. Snapshots also
count as gigabytes.
"""

import falcon
from sqlalchemy import Connection, func, select

from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.listing import value_of
from deploy.one_machine.services.schemas import TRUTHS, BodySchema, integer, mapping
from deploy.one_machine.services.volume import schema
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.service import VolumeService
from deploy.one_machine.services.volume.versions import since
from deploy.one_machine.services.web import answer, read_object

DEFAULTS = {
    "volumes": 10,
    "snapshots": 10,
    "gigabytes": 1000,
    "per_volume_gigabytes": -1,
    "backups": 10,
    "backup_gigabytes": 1000,
    "groups": 10,
}
OF_TYPES = ("volumes", "snapshots", "gigabytes")
NOT_LIMITS = ("id", "tenant_id", "project_id", "force", "skip_validation")
LIMIT = integer(-1, 2**31 - 1, format="integer")


def limits(connection: Connection, project_id: str) -> dict[str, int]:
    """Return name -> limit of a project: the project's own limit, or else the default.

    The names include those of each volume type, for example ``volumes_NAME``. -1 means unlimited.
    """
    names = connection.execute(select(schema.types.c.name).order_by(schema.types.c.name)).scalars()
    defaults = DEFAULTS | {f"{kind}_{name}": -1 for name in names for kind in OF_TYPES}
    return schema.quotas.of(connection, project_id, defaults)


def usage(connection: Connection, project_id: str) -> dict[str, int]:
    """Return name -> usage of a project, for all names of `limits`.

    Volumes and snapshots are counted. Gigabytes are the GiB of both together. Each exists in total
    and for each volume type. The usage of other names, for example backups, is 0.
    """
    used = dict.fromkeys(limits(connection, project_id), 0)
    for table, kind in ((schema.volumes, "volumes"), (schema.snapshots, "snapshots")):
        rows = connection.execute(
            select(schema.types.c.name, func.count(), func.coalesce(func.sum(table.c.size), 0))
            .join(schema.types, schema.types.c.id == table.c.type_id)
            .where(table.c.project_id == project_id)
            .group_by(schema.types.c.name)
        )
        for name, number, size in rows:
            for suffix in ("", f"_{name}"):
                used[kind + suffix] += number
                used["gigabytes" + suffix] += size
    return used


def spend(
    connection: Connection,
    project_id: str,
    type_id: str,
    *,
    volumes: int = 0,
    snapshots: int = 0,
    gigabytes: int = 0,
) -> None:
    """Check that the project may have these additional objects. The caller then inserts them.

    Args:
        connection: The connection of the transaction.
        project_id: The project.
        type_id: The volume type, which has limits of its own.
        volumes: The number of new volumes.
        snapshots: The number of new snapshots.
        gigabytes: The additional size in GiB.

    Raises:
        Fault: 413, a limit would be exceeded.
    """
    name = connection.execute(
        select(schema.types.c.name).where(schema.types.c.id == type_id)
    ).scalar_one()
    allowed, used = limits(connection, project_id), usage(connection, project_id)
    requested = {"volumes": volumes, "snapshots": snapshots, "gigabytes": gigabytes}
    for kind, more in requested.items():
        for key in (kind, f"{kind}_{name}"):
            if more <= 0 or not 0 <= allowed[key] < used[key] + more:
                continue
            if kind == "gigabytes":
                raise fault(
                    "GigabytesExceeded",
                    name=key,
                    requested=more,
                    allowed=allowed[key],
                    used=used[key],
                )
            kind_of_fault = "VolumeLimitExceeded" if kind == "volumes" else "SnapshotLimitExceeded"
            raise fault(kind_of_fault, allowed=allowed[key], name=key)


def check_size(connection: Connection, project_id: str, gigabytes: int) -> None:
    """Check the size in GiB of a new or extended volume against `per_volume_gigabytes`.

    Raises:
        Fault: 413, the volume would be too large.
    """
    allowed = limits(connection, project_id)["per_volume_gigabytes"]
    if 0 <= allowed < gigabytes:
        raise fault("SizeExceedsLimit", size=gigabytes, allowed=allowed)


class VolumeQuotas:
    """GET, PUT and DELETE /v3/os-quota-sets/{project_id}, and GET .../defaults."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _require_own(req.context.caller, project_id)
        with self._service.database.read() as connection:
            quota_set: Body = dict(limits(connection, project_id))
            if TRUTHS.get(value_of(req.params, "usage").lower()):
                used = usage(connection, project_id)
                quota_set = {
                    name: {"limit": limit, "in_use": used[name], "reserved": 0}
                    for name, limit in quota_set.items()
                }
        answer(resp, {"quota_set": quota_set | {"id": project_id}})

    def on_put(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        req.context.caller.require_admin("volume_extension:quotas:update")
        body = read_object(req, "quota_set")
        with self._service.change() as change:
            present_limits = limits(change.connection, project_id)
            used = usage(change.connection, project_id)
            new_limits = _validate(body, present_limits)
            for name, limit in new_limits.items():
                if name != "per_volume_gigabytes" and 0 <= limit < used[name]:
                    why = (
                        f"Quota {name} limit must be equal or greater than existing resources."
                        f" Current usage is {used[name]} and the requested limit is {limit}."
                    )
                    raise fault("BadRequest", why=why)
            schema.quotas.change(change.connection, project_id, new_limits)
            quota_set = limits(change.connection, project_id)
        answer(resp, {"quota_set": quota_set})

    def on_delete(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        req.context.caller.require_admin("volume_extension:quotas:delete")
        with self._service.change() as change:
            schema.quotas.forget(change.connection, project_id)
        resp.status = falcon.HTTP_200

    def on_get_defaults(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _require_own(req.context.caller, project_id)
        with self._service.database.read() as connection:
            defaults = limits(connection, "")
        answer(resp, {"quota_set": defaults | {"id": project_id}})


def _validate(body: object, known: dict[str, int]) -> dict[str, int]:
    if not isinstance(body, dict) or not body:
        raise fault(
            "BadRequest", why="Invalid input for 'quota_set': the object must contain a limit."
        )
    new_limits = {name: value for name, value in body.items() if name not in NOT_LIMITS}
    form = BodySchema(mapping(dict.fromkeys(known, LIMIT)))
    validated: dict[str, int] = form.validate(new_limits, "quota_set")
    return validated


class VolumeLimits:
    """GET /v3/limits: the quotas of the caller's project and their use.

    Admins may name another project from microversion 3.39 on.
    """

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: VolumeCaller = req.context.caller
        project = caller.project_id
        if caller.is_admin and since(req, 39):
            project = value_of(req.params, "project_id", value_of(req.params, "tenant_id", project))
        with self._service.database.read() as connection:
            allowed, used = limits(connection, project), usage(connection, project)
        absolute = {
            "maxTotalVolumes": allowed["volumes"],
            "maxTotalSnapshots": allowed["snapshots"],
            "maxTotalVolumeGigabytes": allowed["gigabytes"],
            "maxTotalBackups": allowed["backups"],
            "maxTotalBackupGigabytes": allowed["backup_gigabytes"],
            "totalVolumesUsed": used["volumes"],
            "totalSnapshotsUsed": used["snapshots"],
            "totalGigabytesUsed": used["gigabytes"],
            "totalBackupsUsed": 0,
            "totalBackupGigabytesUsed": 0,
        }
        answer(resp, {"limits": {"rate": [], "absolute": absolute}})


def _require_own(caller: VolumeCaller, project_id: str) -> None:
    if not caller.is_admin and project_id != caller.project_id:
        raise fault("Forbidden", action="volume_extension:quotas:show")
