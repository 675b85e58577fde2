# SPDX-License-Identifier: Apache-2.0
"""POST /servers, from the body to the 202.

It reads what the request names (flavor, key, group, host; the image with the user's token), refuses
what cannot be, lets ``creation`` commit the rows, and wakes a conductor. Everything is read before
anything is written.

What the cloud does not have is refused by the name of its field: trusted image certificates.
Networks are in ``server_networks``, volumes in ``server_volumes``: those that are made for the
servers are made before the commit. Personality files (up to 2.56) are on the config drive, which
such a server always has. With an Idempotency-Key the same request may be repeated: it
is answered as the first time and nothing is made twice (``idempotency``). With another body it is a
409."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common import device_names, errors, hardware, ids, image_checks, local_disks, models, states
from common.clients.image import Image
from common.json_types import JsonObject
from common.store.engine import Connection
from common.store.servers import server_groups, servers
from common.store.tenants import flavors, keypairs, quotas
from common.text import with_suffix
from common.wire import to_wire
from compute_api.compute import passwords
from compute_api.compute.creation import Created, Creation, idempotency_conflict
from compute_api.compute.idempotency import IdempotentBody
from compute_api.compute.request import Request
from compute_api.compute.resources import (
    block_devices,
    destinations,
    server_disks,
    server_networks,
    server_volumes,
)
from compute_api.compute.resources import server_parts as parts
from compute_api.compute.resources.destinations import Destination
from compute_api.compute.resources.server_volumes import NewVolumes, ServerVolumes
from compute_api.edge.response import ApiResponse
from compute_api.edge.validation import is_true

_API = "os_compute_api:"
CREATE = next(row for row in states.ACTIONS if row.key == "create")


@dataclass
class ServerRequest:
    """A checked create: everything of the rows but what differs between servers of one request."""

    name: str
    flavor: models.Flavor
    image: Image
    min_count: int
    max_count: int
    hostname: str | None  #: None: made of the name
    columns: JsonObject  #: of each server's row
    args: JsonObject = field(default_factory=dict)  #: of each action
    group: str | None = None  #: the server group that they join
    files: list[dict[str, str]] = field(default_factory=list, repr=False)  #: personality
    volumes: NewVolumes | None = None  #: None: they have none


def create(request: Request) -> ApiResponse:
    """POST /servers"""
    body = request.body["server"]
    key = parts.idempotency_key(request.headers.get("IDEMPOTENCY-KEY"))
    identity = IdempotentBody(request.services.vault, request.context.project_id, key, request.body)
    created = _known(request, identity)
    disk_config = body.get(parts.DISK_CONFIG)
    if created is None:
        order = _parsed(request, body)
        disk_config = order.columns["disk_config"]
        created = _made(request, order, identity)
    elif disk_config is None:
        disk_config = _disk_config(request, created.server_id)
    if not created.repeated:
        request.services.wakeup.wake()
    return _answer(request, body, created, identity, disk_config)


def _disk_config(request: Request, server_id: str) -> str:
    """Return the disk_config of a server that may be deleted by now."""
    try:
        return str(request.read(servers.show, server_id, request.scope).disk_config)
    except errors.NotFound:
        return "MANUAL"


def _known(request: Request, identity: IdempotentBody) -> Created | None:
    """What came of the same request before; asked first, since what it names may be gone by now."""
    if identity.key is None:
        return None
    keys = [identity.key]
    row = request.read(servers.idempotent, request.context.project_id, keys).get(identity.key)
    if row is None:
        return None
    if row.digest not in identity.digests:
        raise idempotency_conflict()
    return Created(row.server_id, row.reservation_id, repeated=True, digest=row.digest)


def _made(request: Request, order: ServerRequest, identity: IdempotentBody) -> Created:
    """Make the volumes, and the servers; what no server has in the end is deleted."""
    new = order.volumes
    if new is None:
        return _commit(request, order, identity)
    order.max_count = request.read(_room, request, order)
    cross = request.services.settings.cross_az_attach
    new.make(order.max_count, None if cross else order.columns["pinned_availability_zone"])
    try:
        created = _commit(request, order, identity)
    except errors.Unavailable:
        raise  # whether they are committed is not known: nobody's volume is deleted
    except errors.Problem:
        new.give_up(0)
        raise
    new.give_up(created.count)
    return created


def _room(tx: Connection, request: Request, order: ServerRequest) -> int:
    """How many servers the project may have of these. Raises OverQuota: too few."""
    limits = request.services.quota.source(request.context.project_id)(tx)
    size = quotas.Size(
        1,
        order.flavor.vcpus,
        order.flavor.memory_mb,
        hardware.resources_of(order.flavor, order.columns["image"]),
    )
    account = quotas.Account(tx, request.context.project_id, limits)
    return account.room(request.context.user_id, size, order.min_count, order.max_count)


def _commit(request: Request, order: ServerRequest, identity: IdempotentBody) -> Created:
    reservation_id = "r-" + "".join(
        secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)
    )

    # once: the transaction may run several times
    made = [(ids.new(), ids.new()) for _ in range(order.max_count)]

    def rows(count: int) -> tuple[list[JsonObject], list[JsonObject]]:
        return _rows(request, order, reservation_id, made[:count], identity)

    return request.services.creator.create(
        Creation(
            project_id=request.context.project_id,
            user_id=request.context.user_id,
            vcpus=order.flavor.vcpus,
            memory_mb=order.flavor.memory_mb,
            min_count=order.min_count,
            max_count=order.max_count,
            reservation_id=reservation_id,
            rows=rows,
            volumes=lambda count: (
                order.volumes.rows([server for server, _ in made[:count]]) if order.volumes else []
            ),
            key=identity.key,
            digest=identity.digests[0],
            older_digests=identity.digests[1:],
            group=order.group,
            limits=request.services.quota.source(request.context.project_id),
            classes=hardware.resources_of(order.flavor, order.columns["image"]),
        )
    )


def _answer(
    request: Request,
    body: JsonObject,
    created: Created,
    identity: IdempotentBody,
    disk_config: str,
) -> ApiResponse:
    if is_true(body.get("return_reservation_id", False)):
        return ApiResponse({"reservation_id": created.reservation_id})
    links = request.links.of("servers", created.server_id)
    password = (
        identity.password_again(created.server_id, created.digest)
        if created.repeated
        else identity.password(created.server_id)
    )
    return ApiResponse(
        {
            "server": {
                "id": created.server_id,
                "links": links,
                "OS-DCF:diskConfig": disk_config,
                "security_groups": parts.security_groups(body),
                **({} if password is None else {"adminPass": password}),
            }
        },
        headers={"Location": links[0]["href"]},
    )


def _parsed(request: Request, body: JsonObject) -> ServerRequest:
    """Everything that can be wrong with a create is found here."""
    min_count, max_count = parts.counts(body)
    if body.get("hostname") and max_count > 1:
        raise errors.BadRequest(
            "hostname: several servers of one request cannot have the same; leave it out, and each "
            "gets one made of its name."
        )
    local, asked = block_devices.split(_mappings(request, body))
    image_id = server_disks.boot_image(body, local, asked)
    files = parts.personality(body, request.limits)
    parts.check_metadata(body.get("metadata", {}), request.limits)
    hints = (
        request.body.get("os:scheduler_hints")
        or request.body.get("OS-SCH-HNT:scheduler_hints")
        or {}
    )
    parts.check_hints(hints)
    where = _destination(request, body)
    flavor, key, group, where = _named(request, body, hints, where)
    found = server_volumes.wanted(request, asked, max_count, bool(image_id))
    image = found.image or _image(request, image_id)
    where = replace(where, zone=server_volumes.zone_of(request, found, where.zone))
    if found.root is not None:
        server_volumes.check_image(image, flavor, found.root)
    else:
        parts.check_image(image, flavor)
    image_checks.check_hardware(flavor, image.ref.properties)
    parts.check_signature(body, image)
    if flavor.root_gb == 0 and found.root is None:
        try:
            request.require(_API + "servers:create:zero_disk_flavor")
        except errors.Forbidden as refusal:
            raise errors.Forbidden(
                "Only volume-backed servers are allowed for flavors with zero disk."
            ) from refusal
    server_disks.check_boot_disk(local, flavor, image.ref.properties)
    disks = server_disks.requested_disks(local, flavor, request.services.settings.max_local_disks)
    volumes = _volumes(request, found, flavor, disks, image.ref.properties)
    interfaces = server_networks.choose_interfaces(request, body, min_count, max_count)
    config_drive = (
        is_true(body.get("config_drive", False))
        or bool(files)
        or image.ref.properties.get("img_config_drive") == "mandatory"
    )
    columns = {
        **_columns(request, body, flavor, image, volumes),
        "key_name": key.name if key else None,
        "key_data": key.public_key if key else None,
        "config_drive": config_drive,
        "scheduler_hints": hints,
        "security_groups": interfaces.groups,
        # Not NULL when it may get ports: a delete that comes in the middle has to look for them.
        "interfaces": interfaces.interfaces if interfaces.args["networks"] else None,
        "disks": disks,
        "pinned_availability_zone": where.zone,
    }
    return ServerRequest(
        body["name"].strip(),
        flavor,
        image,
        min_count,
        interfaces.max_count,
        body.get("hostname"),
        columns,
        {**where.args, **interfaces.args, "roles": sorted(request.context.roles)},
        group,
        files,
        volumes,
    )


def _mappings(request: Request, body: JsonObject) -> list[JsonObject]:
    """What the request asks for, and what its image names."""
    asked, image_id = block_devices.read(body), str(body.get("imageRef") or "")
    if not image_id:
        return asked
    image = request.image(image_id)
    return block_devices.merged(block_devices.of_image(image_id, image.ref.properties), asked)


def _image(request: Request, image_id: str) -> Image:
    """The image, without what it names in place of bytes."""
    found = request.image(image_id)
    kept = {
        name: value
        for name, value in found.ref.properties.items()
        if name not in block_devices.OF_IMAGE
    }
    return replace(found, ref=replace(found.ref, properties=kept))


def _columns(
    request: Request,
    body: JsonObject,
    flavor: models.Flavor,
    image: Image,
    volumes: NewVolumes | None,
) -> JsonObject:
    """What stands in each server's row of the body, and of what it is made of."""
    has_disk = volumes is None or volumes.found.root is None
    frozen = to_wire(image.ref if has_disk else replace(image.ref, id=""))
    if not has_disk:
        frozen[hardware.ON_VOLUME] = True
    return {
        "description": body.get("description"),
        "image_id": image.ref.id if has_disk else None,
        "image": frozen,
        "flavor": to_wire(flavor),
        "flavor_id": flavor.id,
        "vcpus": flavor.vcpus,
        "memory_mb": flavor.memory_mb,
        "disk_gb": hardware.on_host(flavor, frozen).disk_gb,
        "user_data": passwords.sealed_text(request.services.vault, body.get("user_data")),
        "meta": body.get("metadata", {}),
        "tags": sorted(set(body.get("tags", ()))),
        "trusted_image_certificates": body.get("trusted_image_certificates"),
        "access_ip_v4": parts.access_ip(body.get("accessIPv4")),
        "access_ip_v6": parts.access_ip(body.get("accessIPv6")),
        "disk_config": parts.disk_config(body, image.ref.id, image.ref.properties) or "MANUAL",
        "root_device_name": volumes.root_name
        if volumes
        else device_names.root_name(image.ref.properties.get("hw_disk_bus")),
        "volumes": len(volumes.names) if volumes else 0,
        "availability_zone": None,
    }


def _volumes(
    request: Request,
    found: ServerVolumes,
    flavor: models.Flavor,
    disks: JsonObject | None,
    properties: Mapping[str, str],
) -> NewVolumes | None:
    """Those of the servers, with their names; the disks of a host are called after the root."""
    if not found.mappings:
        return None
    found = replace(found, bus=properties.get("hw_disk_bus"))
    root, rest = (
        device_names.root_name(found.bus),
        [one for one in found.mappings if not one.is_root],
    )
    if found.root is not None:
        [root] = block_devices.named([found.root], [], found.bus)
    local = local_disks.devices(local_disks.of(flavor, disks), root, found.bus).values()
    names = block_devices.named(rest, [root, *local], found.bus)
    ordered = replace(found, mappings=[*([found.root] if found.root else []), *rest])
    service = request.services.volumes
    assert service is not None  # there are mappings, which were looked at
    called = [*([root] if found.root else []), *names]
    return NewVolumes(service, request.context.token, ordered, called, root)


def _destination(request: Request, body: JsonObject) -> Destination:
    """The zone and the host asked for; a host only by those who may."""
    where = destinations.parse(
        body.get("availability_zone"), request.services.settings.default_schedule_zone
    )
    asked: dict[str, str] = {
        name: body[name] for name in ("host", "hypervisor_hostname") if name in body
    }
    if where.forced:
        request.require(_API + "servers:create:forced_host")
    if asked:
        request.require("compute:servers:create:requested_destination")
        if where.forced:
            raise errors.BadRequest(
                f"A host in availability_zone cannot be given together with {' and '.join(asked)}."
            )
        return Destination(where.zone, asked.get("host"), asked.get("hypervisor_hostname"))
    return where


Named = tuple[models.Flavor, Any, str | None, Destination]


def _named(request: Request, body: JsonObject, hints: JsonObject, where: Destination) -> Named:
    """What the request names and the database knows, read at one moment: flavor, key, group, and
    the place."""
    flavor_id, group_id = parts.flavor_id(body["flavorRef"]), parts.group_id(hints)

    def work(tx: Connection) -> Named:
        try:
            flavor = hardware.with_aliases(
                flavors.record(flavors.show(tx, flavor_id, request.scope)),
                request.services.settings.pci_aliases,
            )
            if group_id is not None:
                server_groups.show(tx, group_id, request.context.project_id)
        except errors.NotFound as problem:
            raise errors.BadRequest(problem.text) from problem
        key = None
        if body.get("key_name"):
            try:
                key = keypairs.show(tx, request.context.user_id, body["key_name"])
            except errors.NotFound as problem:
                raise errors.BadRequest("Invalid key_name provided.") from problem
        return (
            flavor,
            key,
            group_id,
            destinations.resolve(tx, where, request.services.settings.default_zone),
        )

    return request.read(work)


def _rows(
    request: Request,
    order: ServerRequest,
    reservation_id: str,
    made: list[tuple[str, str]],
    identity: IdempotentBody,
) -> tuple[list[JsonObject], list[JsonObject]]:
    """The rows of servers and of the actions that will build them, with the ids ``made`` for
    both."""
    context = request.context
    server_rows, action_rows = [], []
    sealed = passwords.sealed(request.services.vault, identity.password(made[0][0]), order.files)
    for number, (server_id, action_id) in enumerate(made):
        suffix = f"-{number + 1}" if order.max_count > 1 else ""
        name = with_suffix(order.name, suffix)
        hostname = order.hostname or parts.hostname(order.name, server_id, suffix)
        server_rows.append(
            {
                **order.columns,
                "id": server_id,
                "project_id": context.project_id,
                "user_id": context.user_id,
                "name": name,
                "hostname": hostname,
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
                "args": order.args,
                "fence": 1,
                "secrets": sealed,
            }
        )
    return server_rows, action_rows
