# SPDX-License-Identifier: Apache-2.0
"""What the volume service says of itself: zones, services, pools, extensions; and that of backups,
groups and the like there is nothing."""

from datetime import UTC, datetime

import falcon
from sqlalchemy import func, select

from deploy.standalone.listing import value_of
from deploy.standalone.schemas import TRUTHS
from deploy.standalone.volume.faults import fault
from deploy.standalone.volume.schema import snapshots, volumes
from deploy.standalone.volume.service import VolumeService
from deploy.standalone.volume.versions import UPDATED, require, since
from deploy.standalone.web import answer, read_json

#: alias -> name
EXTENSIONS = {
    "os-availability-zone": "AvailabilityZones",
    "os-quota-class-sets": "QuotaClasses",
    "os-quota-sets": "Quotas",
    "os-services": "Services",
    "os-types-extra-specs": "TypesExtraSpecs",
    "os-types-manage": "TypesManage",
    "os-used-limits": "UsedLimits",
    "os-vol-host-attr": "VolumeHostAttribute",
    "os-vol-image-meta": "VolumeImageMetadata",
    "os-vol-mig-status-attr": "VolumeMigStatusAttribute",
    "os-vol-tenant-attr": "VolumeTenantAttribute",
    "os-volume-actions": "VolumeActions",
    "os-admin-actions": "AdminActions",
    "os-snapshot-actions": "SnapshotActions",
    "os-extended-snapshot-attributes": "ExtendedSnapshotAttributes",
    "os-volume-transfer": "VolumeTransfer",
    "os-volume-type-access": "VolumeTypeAccess",
    "scheduler-stats": "Scheduler_stats",
}
#: What a client may look for and does not find: name in the path -> (name in a body, since).
EMPTY = {
    "backups": ("backups", 0),
    "messages": ("messages", 3),
    "clusters": ("clusters", 7),
    "group_types": ("group_types", 11),
    "groups": ("groups", 13),
    "group_snapshots": ("group_snapshots", 14),
    "consistencygroups": ("consistencygroups", 0),
    "cgsnapshots": ("cgsnapshots", 0),
    "qos-specs": ("qos_specs", 0),
}


class VolumeDocuments:
    """GET /v3/os-availability-zone, /v3/os-services, /v3/scheduler-stats/get_pools, /v3/os-hosts,
    /v3/extensions, /v3/resource_filters."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get_zones(self, req: falcon.Request, resp: falcon.Response) -> None:
        zone = {"zoneName": self._service.settings.zone, "zoneState": {"available": True}}
        answer(resp, {"availabilityZoneInfo": [zone]})

    def on_get_services(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.caller.require_admin("volume_extension:services:index")
        host, wanted = self._service.settings.host, req.params
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
        both = (("cinder-scheduler", host), ("cinder-volume", f"{host}@files"))
        found = [
            {
                "binary": binary,
                "host": place,
                "zone": self._service.settings.zone,
                "status": "enabled",
                "state": "up",
                "updated_at": now,
                "disabled_reason": None,
            }
            | ({"cluster": None} if since(req, 7) else {})
            | ({"backend_state": "up"} if since(req, 49) and binary == "cinder-volume" else {})
            for binary, place in both
            if value_of(wanted, "binary", binary) == binary
            and value_of(wanted, "host", place) == place
        ]
        answer(resp, {"services": found})

    def on_get_pools(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.caller.require_admin("scheduler_extension:scheduler_stats:get_pools")
        whole, free = self._service.files.capacity()
        pool: dict[str, object] = {"name": self._service.backend}
        if TRUTHS.get(value_of(req.params, "detail").lower()):
            with self._service.database.read() as connection:
                sums = [
                    connection.execute(select(func.coalesce(func.sum(one.c.size), 0))).scalar_one()
                    for one in (volumes, snapshots)
                ]
            pool["capabilities"] = {
                "volume_backend_name": "files",
                "storage_protocol": "file",
                "vendor_name": "Kilonova",
                "driver_version": "1.0",
                "total_capacity_gb": round(whole, 2),
                "free_capacity_gb": round(free, 2),
                "allocated_capacity_gb": sums[0],
                "provisioned_capacity_gb": sum(sums),
                "reserved_percentage": 0,
                "thin_provisioning_support": True,
                "thick_provisioning_support": False,
                "max_over_subscription_ratio": "20.0",
                "multiattach": True,
                "QoS_support": False,
                "timestamp": datetime.now(UTC).isoformat(),
            }
        answer(resp, {"pools": [pool]})

    def on_get_hosts(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.caller.require_admin("volume_extension:hosts")
        settings = self._service.settings
        host = {
            "host_name": f"{settings.host}@files",
            "service": "cinder-volume",
            "zone": settings.zone,
            "service-status": "available",
            "service-state": "enabled",
            "last-update": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f"),
        }
        answer(resp, {"hosts": [host]})

    def on_get_extensions(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"extensions": [_extension(alias) for alias in EXTENSIONS]})

    def on_get_extension(self, req: falcon.Request, resp: falcon.Response, alias: str) -> None:
        if alias not in EXTENSIONS:
            raise fault("NotFound")
        answer(resp, {"extension": _extension(alias)})

    def on_get_filters(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, 33)
        known = {
            "volume": ["name", "status", "metadata", "bootable", "availability_zone", "size"],
            "snapshot": ["name", "status", "volume_id", "metadata"],
            "attachment": ["volume_id", "status", "instance_id", "attach_status"],
        }
        wanted = value_of(req.params, "resource")
        found = [
            {"resource": name, "filters": filters}
            for name, filters in known.items()
            if wanted in ("", name)
        ]
        answer(resp, {"resource_filters": found})


class NothingHere:
    """/v3/backups and the like: empty lists, and 404 for one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._name, self._minor = EMPTY[path]

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, self._minor)
        answer(resp, {self._name: []})

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, self._minor)
        req.context.caller.require_member(f"{self._path}:create")
        read_json(req)
        if self._path == "backups":
            raise fault("NoBackupService")
        raise fault("BadRequest", why=f"There are no {self._name.replace('_', ' ')} here.")

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req, self._minor)
        if key == "detail":
            answer(resp, {self._name: []})
            return
        raise fault("BackupNotFound", id=key) if self._path == "backups" else fault("NotFound")

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self.on_get_one(req, resp, key)


def _extension(alias: str) -> dict[str, object]:
    name = EXTENSIONS[alias]
    return {
        "alias": alias,
        "name": name,
        "description": f"{name}.",
        "updated": UPDATED,
        "links": [],
    }
