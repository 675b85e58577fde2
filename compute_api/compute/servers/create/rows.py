# SPDX-License-Identifier: Apache-2.0
"""Create, phase 4: build the rows of servers, actions and volumes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.clients.image import Image
from common.domain import hardware, ids, states
from common.domain.json_types import JsonObject
from common.domain.models import Flavor
from common.domain.statuses import BlockDeviceStatus
from common.domain.text import with_suffix
from common.domain.wire import to_wire
from compute_api.compute.request import passwords
from compute_api.compute.request.request import Request
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.servers.create.body import RequestedServers
from compute_api.compute.servers.create.lookup import NamedResources
from compute_api.compute.servers.disks.disks import ChosenDisks
from compute_api.compute.servers.disks.volumes import ServerVolumes
from compute_api.compute.servers.networks.networks import ChosenInterfaces
from compute_api.http.validation import is_true

CREATE = states.row("create")


@dataclass(frozen=True)
class NewServers:
    """The servers of one create, except for the values that differ between them."""

    name: str
    #: None derives a host name from the name of each server.
    hostname: str | None
    flavor: Flavor
    min_count: int
    max_count: int
    #: Columns that the rows of all servers have.
    columns: JsonObject
    #: Arguments of each action.
    args: JsonObject
    #: The server group of the servers, or None.
    group_id: str | None
    #: Files for the config drive (personality).
    files: Sequence[dict[str, str]] = field(repr=False)
    #: With device names, in the order in which the guest sees the volumes.
    volumes: ServerVolumes


def build_servers(
    request: Request,
    requested: RequestedServers,
    named: NamedResources,
    disks: ChosenDisks,
    interfaces: ChosenInterfaces,
) -> NewServers:
    """Build everything that the servers of a request have in common.

    Raises:
        BadRequest: The image does not allow disk configuration AUTO, which the body requests.
    """
    body, flavor, image = request.body["server"], named.flavor, named.image
    config_drive = (
        is_true(body.get("config_drive", False))
        or bool(requested.files)
        or image.ref.properties.get("img_config_drive") == "mandatory"
    )
    columns = {
        **_build_image_columns(flavor, image, boots_from_volume=named.volumes.root is not None),
        "flavor": to_wire(flavor),
        "flavor_id": flavor.id,
        "vcpus": flavor.vcpus,
        "memory_mb": flavor.memory_mb,
        "key_name": named.key.name if named.key else None,
        "key_data": named.key.public_key if named.key else None,
        "config_drive": config_drive,
        "scheduler_hints": requested.hints,
        "security_groups": interfaces.groups,
        # Not NULL if the server may get ports, so that an early delete looks for them.
        "interfaces": interfaces.interfaces if interfaces.args["networks"] else None,
        "disks": disks.local,
        "root_device_name": disks.root_name,
        "volumes": len(disks.volumes),
        "pinned_availability_zone": named.destination.zone,
        "availability_zone": None,
        "description": body.get("description"),
        "user_data": passwords.seal_text(request.services.vault, body.get("user_data")),
        "meta": body.get("metadata", {}),
        "tags": sorted(set(body.get("tags", ()))),
        "trusted_image_certificates": body.get("trusted_image_certificates"),
        "access_ip_v4": server_fields.parse_access_ip(body.get("accessIPv4")),
        "access_ip_v6": server_fields.parse_access_ip(body.get("accessIPv6")),
        "disk_config": server_fields.choose_disk_config(body, image.ref.id, image.ref.properties)
        or "MANUAL",
    }
    roles = sorted(request.context.roles)
    return NewServers(
        name=body["name"].strip(),
        hostname=body.get("hostname"),
        flavor=flavor,
        min_count=requested.min_count,
        max_count=interfaces.max_count,
        columns=columns,
        args={**named.destination.args, **interfaces.args, "roles": roles},
        group_id=requested.group_id,
        files=requested.files,
        volumes=replace(named.volumes, mappings=disks.volumes),
    )


def _build_image_columns(flavor: Flavor, image: Image, *, boots_from_volume: bool) -> JsonObject:
    record = to_wire(replace(image.ref, id="") if boots_from_volume else image.ref)
    if boots_from_volume:
        record[hardware.ON_VOLUME] = True
    return {
        "image_id": None if boots_from_volume else image.ref.id,
        "image": record,
        "disk_gb": hardware.on_host(flavor, record).disk_gb,
    }


def build_rows(
    request: Request,
    new_servers: NewServers,
    reservation_id: str,
    row_ids: Sequence[tuple[str, str]],
    password: str,
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Build and return the server rows, and the rows of the actions that will create the guests.

    Args:
        request: The request.
        new_servers: The common data of the servers.
        reservation_id: Id that all servers of the request have.
        row_ids: For each server its id and the id of its action.
        password: Password of all servers. The actions store it encrypted if the cloud has a key.

    Raises:
        NotImplementedHere: There are files, and this cloud has no key to encrypt them.
    """
    context = request.context
    server_rows, action_rows = [], []
    sealed = passwords.seal(request.services.vault, password, new_servers.files)
    for number, (server_id, action_id) in enumerate(row_ids):
        suffix = f"-{number + 1}" if new_servers.max_count > 1 else ""
        server_rows.append(
            {
                **new_servers.columns,
                "id": server_id,
                "project_id": context.project_id,
                "user_id": context.user_id,
                "name": with_suffix(new_servers.name, suffix),
                "hostname": new_servers.hostname
                or _make_hostname(new_servers.name, server_id, suffix),
                "fence": 1,
                "action": action_id,
                "vm_state": states.BUILDING,
                "task_state": states.SCHEDULING,
                "reservation_id": reservation_id,
                "launch_index": number,
            }
        )
        action_rows.append(
            {
                "id": action_id,
                "server_id": server_id,
                "project_id": context.project_id,
                "user_id": context.user_id,
                "request_id": context.request_id,
                "name": CREATE.name,
                "workflow": CREATE.workflow,
                "args": new_servers.args,
                "fence": 1,
                "secrets": sealed,
            }
        )
    return server_rows, action_rows


def _make_hostname(name: str, server_id: str, suffix: str) -> str:
    """Make a host name of at most 63 letters, digits and hyphens out of a server's name.

    Args:
        name: Name of the server.
        server_id: Id of the server. A name without usable letters and digits gives
            ``server-<server_id>``.
        suffix: Distinguishes the servers of one request. Only the text before the suffix is cut.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    plain = re.sub(r"[ _.]", "-", plain)
    plain = re.sub(r"[^a-z0-9-]+", "", plain)[: 63 - len(suffix)].strip("-")
    return plain + suffix if plain else f"server-{server_id}"


def build_volume_rows(
    server_volumes: ServerVolumes, server_id: str, new_ids: Sequence[str | None]
) -> list[JsonObject]:
    """Build the rows of one server's volumes.

    Args:
        server_volumes: The mappings, and the volumes that existed before.
        server_id: Id of the server.
        new_ids: For each mapping the id of the new volume, or None if the volume existed before.
    """
    rows: list[JsonObject] = []
    for mapping, new_id in zip(server_volumes.mappings, new_ids, strict=True):
        volume = server_volumes.existing.get(str(mapping.source_id))
        rows.append(
            {
                "uuid": ids.new(),
                "server_id": server_id,
                "volume_id": new_id or mapping.source_id,
                "status": BlockDeviceStatus.CREATING if new_id else BlockDeviceStatus.RESERVED,
                "source_type": mapping.source,
                "source_id": mapping.source_id if new_id else None,
                "volume_type": mapping.volume_type,
                "size_gb": mapping.size_gb,
                "boot_index": mapping.boot_index,
                "device_name": mapping.device_name,
                "disk_bus": mapping.bus,
                "device_type": mapping.device_type,
                "tag": mapping.tag,
                "delete_on_termination": mapping.delete_on_termination,
                "read_only": volume is not None and volume.read_only,
                "multiattach": volume is not None and volume.multiattach,
            }
        )
    return rows
