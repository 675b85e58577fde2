# SPDX-License-Identifier: Apache-2.0
"""Documents of the volume service: zones, services and extensions.

Lists of backups, groups and other unsupported objects are empty.
"""

from datetime import UTC, datetime

import falcon

from deploy.one_machine.services.listing import value_of
from deploy.one_machine.services.volume.service import VolumeService
from deploy.one_machine.services.volume.versions import UPDATED, since
from deploy.one_machine.services.web import answer

#: Alias -> name.
EXTENSIONS = {
    "os-availability-zone": "AvailabilityZones",
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
}
#: Lists that are always empty here. Path -> (name in the body, first minor version).
EMPTY = {
    "backups": ("backups", 0),
    "messages": ("messages", 3),
    "group_types": ("group_types", 11),
    "groups": ("groups", 13),
    "group_snapshots": ("group_snapshots", 14),
    "qos-specs": ("qos_specs", 0),
    "os-volume-transfer": ("transfers", 0),
    "volume-transfers": ("transfers", 55),
}


class VolumeDocuments:
    """GET /v3/os-availability-zone, /v3/os-services and /v3/extensions."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get_zones(self, req: falcon.Request, resp: falcon.Response) -> None:
        zone = {"zoneName": self._service.settings.zone, "zoneState": {"available": True}}
        answer(resp, {"availabilityZoneInfo": [zone]})

    def on_get_services(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.caller.require_admin("volume_extension:services:index")
        host, parameters = self._service.settings.host, req.params
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
        binaries = (("cinder-scheduler", host), ("cinder-volume", f"{host}@files"))
        services = [
            {
                "binary": binary,
                "host": host_name,
                "zone": self._service.settings.zone,
                "status": "enabled",
                "state": "up",
                "updated_at": now,
                "disabled_reason": None,
            }
            | ({"cluster": None} if since(req, 7) else {})
            | ({"backend_state": "up"} if since(req, 49) and binary == "cinder-volume" else {})
            for binary, host_name in binaries
            if value_of(parameters, "binary", binary) == binary
            and value_of(parameters, "host", host_name) == host_name
        ]
        answer(resp, {"services": services})

    def on_get_extensions(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"extensions": [_extension(alias) for alias in EXTENSIONS]})


class EmptyCollection:
    """GET the list of a kind of object that this service does not support, also .../detail.

    Args:
        name: The kind's name in the body.
        minor: The first minor version with this kind.
    """

    def __init__(self, name: str, minor: int) -> None:
        self._name, self.minor = name, minor

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {self._name: []})


def _extension(alias: str) -> dict[str, object]:
    name = EXTENSIONS[alias]
    return {
        "alias": alias,
        "name": name,
        "description": f"{name}.",
        "updated": UPDATED,
        "links": [],
    }
