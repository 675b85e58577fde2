# SPDX-License-Identifier: Apache-2.0
"""What a host knows of a server beside running it: enough to make the server's row again.

A driver keeps these facts with the guest (``Driver.server_facts``), made of the spec of the command
that defined it last; ``kilonova host adopt`` reads them when the database knows no such server.
Pure. Must stay true: no secret is among them, and nothing that a tenant may write as often as he
likes: description, metadata and tags are in the database alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from common.domain.json_types import JsonObject
from common.domain.models import Flavor, GuestSpec, HardwareAssignment, ImageRef, Interface


@dataclass(frozen=True, slots=True)
class HostedServer:
    """The server of a guest as its host remembers it. Empty: not known. created_at: µs
    since the epoch; ports: of its interfaces, in their order, each with the interface's tag; disks:
    as ``servers.disks``; volumes: the ids of those that it has now. is_suspended, is_rescued: how
    the guest rests now."""

    name: str = ""
    project_id: str = ""
    user_id: str = ""
    flavor: Flavor | None = None
    image: ImageRef | None = None
    hostname: str = ""
    key_name: str = ""
    key_data: str = ""
    created_at: int = 0
    availability_zone: str = ""
    pinned_availability_zone: str = ""
    config_drive: bool = False
    ports: dict[str, str] = field(default_factory=dict)
    security_groups: list[str] = field(default_factory=list)
    disks: JsonObject | None = None
    assignment: HardwareAssignment | None = None
    reservation_id: str = ""
    launch_index: int = 0
    root_device_name: str = ""
    is_suspended: bool = False
    is_rescued: bool = False
    volumes: list[str] = field(default_factory=list)

    def plugged(self, interface: Interface) -> HostedServer:
        """With this interface too."""
        return replace(self, ports={**self.ports, interface.port: interface.tag})

    def unplugged(self, port: str) -> HostedServer:
        """Without the interface of this port."""
        return replace(self, ports={one: tag for one, tag in self.ports.items() if one != port})


def facts_of(spec: GuestSpec) -> HostedServer:
    """What a guest's host is to remember of its server."""
    about, record = spec.instance, spec.record
    keys: list[JsonObject] = about.get("keys") or []
    key = keys[0] if keys else {}
    return HostedServer(
        name=spec.name,
        project_id=about.get("project_id") or "",
        user_id=record.get("user_id") or "",
        flavor=spec.flavor,
        image=spec.image,
        hostname=about.get("hostname") or "",
        key_name=key.get("name") or "",
        key_data=key.get("data") or "",
        created_at=record.get("created_at") or 0,
        availability_zone=about.get("availability_zone") or "",
        pinned_availability_zone=record.get("pinned_availability_zone") or "",
        config_drive=spec.config_drive,
        ports=ports_of(spec.interfaces),
        security_groups=list(about.get("security_groups") or ()),
        disks=record.get("disks"),
        assignment=spec.assignment,
        reservation_id=about.get("reservation_id") or "",
        launch_index=about.get("launch_index") or 0,
        root_device_name=about.get("root_device_name") or "",
    )


def ports_of(interfaces: Iterable[Interface]) -> dict[str, str]:
    """The ports of interfaces, with their tags."""
    return {one.port: one.tag for one in interfaces}
