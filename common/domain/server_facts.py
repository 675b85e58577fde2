# SPDX-License-Identifier: Apache-2.0
"""The facts about a server on the host: enough to create the server's row again. Pure.

A driver stores these facts with the guest (``Driver.server_facts``), built from the spec of the
last command that defined the guest. ``kilonova host adopt`` reads them if the database has no such
server.

Invariant: the facts contain no secrets, and no data that tenants may change at any rate.
Description, metadata and tags are stored only in the database.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from common.domain.json_types import JsonObject
from common.domain.models import Flavor, GuestSpec, HardwareAssignment, ImageRef, Interface


@dataclass(frozen=True, slots=True)
class HostedServer:
    """The server of a guest, as the host stores it. An empty field is unknown."""

    name: str = ""
    project_id: str = ""
    user_id: str = ""
    flavor: Flavor | None = None
    image: ImageRef | None = None
    hostname: str = ""
    key_name: str = ""
    key_data: str = ""
    #: Microseconds since the epoch.
    created_at: int = 0
    availability_zone: str = ""
    pinned_availability_zone: str = ""
    config_drive: bool = False
    #: Port -> tag of each interface, in order.
    ports: dict[str, str] = field(default_factory=dict)
    security_groups: list[str] = field(default_factory=list)
    #: As in the column ``servers.disks``.
    disks: JsonObject | None = None
    assignment: HardwareAssignment | None = None
    reservation_id: str = ""
    launch_index: int = 0
    root_device_name: str = ""
    is_suspended: bool = False
    is_rescued: bool = False
    #: Ids of the volumes that the guest has now.
    volumes: list[str] = field(default_factory=list)

    def with_interface(self, interface: Interface) -> HostedServer:
        """Return a copy with this interface added. The same port gets the new tag."""
        return replace(self, ports={**self.ports, interface.port: interface.tag})

    def without_interface(self, port: str) -> HostedServer:
        """Return a copy without the interface of this port. A missing port is no error."""
        return replace(self, ports={name: tag for name, tag in self.ports.items() if name != port})


def facts_of(spec: GuestSpec) -> HostedServer:
    """Return the facts that a guest's host stores about the server.

    ``is_suspended``, ``is_rescued`` and ``volumes`` keep their defaults. The driver adds them when
    the facts are read.
    """
    instance, record = spec.instance, spec.record
    keys: list[JsonObject] = instance.get("keys") or []
    key = keys[0] if keys else {}
    return HostedServer(
        name=spec.name,
        project_id=instance.get("project_id") or "",
        user_id=record.get("user_id") or "",
        flavor=spec.flavor,
        image=spec.image,
        hostname=instance.get("hostname") or "",
        key_name=key.get("name") or "",
        key_data=key.get("data") or "",
        created_at=record.get("created_at") or 0,
        availability_zone=instance.get("availability_zone") or "",
        pinned_availability_zone=record.get("pinned_availability_zone") or "",
        config_drive=spec.config_drive,
        ports=ports_of(spec.interfaces),
        security_groups=list(instance.get("security_groups") or ()),
        disks=record.get("disks"),
        assignment=spec.assignment,
        reservation_id=instance.get("reservation_id") or "",
        launch_index=instance.get("launch_index") or 0,
        root_device_name=instance.get("root_device_name") or "",
    )


def ports_of(interfaces: Iterable[Interface]) -> dict[str, str]:
    """Return port -> tag of each interface, in order."""
    return {interface.port: interface.tag for interface in interfaces}
