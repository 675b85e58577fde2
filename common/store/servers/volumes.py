# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers: the rows of attached volumes, with device names and status.

The API begins the changes, and the conductor's workflows record their outcomes. A row exists from
the request until the attachment is deleted. ``servers.volumes`` counts a server's rows, so that
servers without volumes need no query. It changes with the rows, under the server's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import device_names, errors, ids, local_disks, states
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.models import Flavor
from common.domain.statuses import BlockDeviceStatus
from common.domain.wire import from_wire
from common.store.engine import insert_many, now
from common.store.rows import BlockDeviceRow, ServerState, Values
from common.store.schema import block_devices as table
from common.store.schema import servers
from common.store.servers import actions

VOLUME = "volume"


@dataclass(frozen=True, kw_only=True)
class WantedVolume:
    """A volume that is to be attached to a server, on a ``bus``. None: virtio."""

    volume_id: str
    size_gb: int
    bus: str | None = None
    tag: str | None = None
    delete_on_termination: bool = False
    read_only: bool = False
    multiattach: bool = False
    #: Other columns of the row.
    more: Values = field(default_factory=dict)


def list_of(tx: Connection, server_id: str) -> list[BlockDeviceRow]:
    """Return the rows of a server's volumes, by boot index. Rows without are last, oldest first."""
    return of_some(tx, [server_id]).get(server_id, [])


def of_some(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[BlockDeviceRow]]:
    """Return server id -> rows of volumes, in the order of ``list_of``.

    Servers without volumes are left out.
    """
    by_server: dict[str, list[BlockDeviceRow]] = {}
    for row in tx.execute(_OF_SERVERS, {"servers": sorted(server_ids)}):
        by_server.setdefault(row.server_id, []).append(row)
    for rows in by_server.values():
        rows.sort(key=lambda row: (row.boot_index is None, row.boot_index or 0))
    return by_server


_OF_SERVERS = (
    sa.select(table)
    .where(table.c.server_id.in_(sa.bindparam("servers", expanding=True)))
    .order_by(table.c.created_at, table.c.uuid)
)


def of_volume(tx: Connection, volume_id: str) -> list[BlockDeviceRow]:
    """Return the rows of a volume, a row for each server that has the volume, oldest first."""
    return list(
        tx.execute(
            sa.select(table).where(table.c.volume_id == volume_id).order_by(table.c.created_at)
        )
    )


def show(tx: Connection, server_id: str, volume_id: str) -> BlockDeviceRow:
    """Return the row of a server's volume.

    Raises:
        NotFound: The server does not have the volume.
    """
    volume = tx.execute(
        sa.select(table).where(table.c.server_id == server_id, table.c.volume_id == volume_id)
    ).first()
    if volume is None:
        raise errors.NotFound(f"Instance {server_id} is not attached to volume {volume_id[:80]}")
    return volume


def by_uuid(tx: Connection, uuid: str) -> BlockDeviceRow | None:
    """Return the row of a server's volume by the uuid of the row, or None."""
    return tx.execute(sa.select(table).where(table.c.uuid == uuid)).first()


def root_of(tx: Connection, server_id: str) -> BlockDeviceRow | None:
    """Return the row of a server's boot volume, or None if the server boots from a local disk."""
    return tx.execute(
        sa.select(table).where(table.c.server_id == server_id, table.c.boot_index == 0)
    ).first()


def attach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    volume: WantedVolume,
) -> str:
    """Let the action that attaches a volume take the server, and return the action's id.

    The volume's new row gets the first free device name of the bus, and the status ATTACHING, or
    RESERVED if the server has no host. The action's arguments are ``block_device`` (the row's uuid)
    and ``volume_id``.

    Raises:
        NotFound, Locked, WrongState, Busy, Conflict: As in ``actions.begin``.
        BadRequest: The server has the volume already.
        Forbidden: No device name is left.
    """
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    volumes = list_of(tx, server_id)
    if volume.volume_id in [row.volume_id for row in volumes]:
        raise errors.BadRequest(f"Invalid volume: volume {volume.volume_id} already attached")
    used_names = {row.device_name for row in volumes}.union(_local_names(tx, server_id))
    device = device_names.next_free(used_names, volume.bus)
    uuid = ids.new()
    action = actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"block_device": uuid, "volume_id": volume.volume_id},
        changes={"volumes": servers.c.volumes + 1},
    )
    insert(
        tx,
        [
            {
                "uuid": uuid,
                "server_id": server_id,
                "volume_id": volume.volume_id,
                "status": BlockDeviceStatus.RESERVED
                if server.host is None
                else BlockDeviceStatus.ATTACHING,
                "source_type": VOLUME,
                "size_gb": volume.size_gb,
                "device_name": device,
                "disk_bus": volume.bus,
                "tag": volume.tag,
                "delete_on_termination": volume.delete_on_termination,
                "read_only": volume.read_only,
                "multiattach": volume.multiattach,
                **volume.more,
            }
        ],
    )
    return action


def _local_names(tx: Connection, server_id: str) -> list[str]:
    row = tx.execute(
        sa.select(
            servers.c.flavor, servers.c.disks, servers.c.image, servers.c.root_device_name
        ).where(servers.c.id == server_id)
    ).one()
    return local_names(row.flavor, row.disks, row.image, row.root_device_name)


def local_names(
    flavor: JsonObject, disks: JsonObject | None, image: JsonObject | None, root: str | None
) -> list[str]:
    """Return the device names of a server's root disk and of its other local disks.

    The arguments are columns of the server.

    Args:
        flavor: The stored flavor.
        disks: The requested local disks, or None for those of the flavor.
        image: The stored image, or None.
        root: The column root_device_name. None: the first name of the image's disk bus.
    """
    bus = (image or {}).get("properties", {}).get("hw_disk_bus")
    root = root or device_names.root_name(bus)
    local = local_disks.of(from_wire(Flavor, flavor), disks)
    return [root, *local_disks.devices(local, root, bus).values()]


def detach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    volume_id: str,
) -> str:
    """Let the action that detaches a volume take the server, and return the action's id.

    The status of the volume's row becomes DETACHING. The action's arguments are ``block_device``
    (the row's uuid), ``volume_id`` and ``before``, the previous status.

    Raises:
        NotFound: The server does not exist, or does not have the volume.
        Locked, WrongState, Busy, Conflict: As in ``actions.begin``.
        Forbidden: The server boots from the volume.
    """
    _, device = _take(tx, row, server_id, context, project_id, volume_id)
    refuse_root(device)
    action = actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"block_device": device.uuid, "volume_id": volume_id, "before": device.status},
    )
    put(tx, [device.uuid], BlockDeviceStatus.DETACHING)
    return action


def swap(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    volume_id: str,
    new_volume_id: str,
    new_size_gb: int,
    delete_on_termination: bool | None = None,
) -> str:
    """Let the action that swaps a volume take the server, and return the action's id.

    The action copies the volume to the new volume, which then takes its place. The arguments of the
    action are ``block_device`` (the row's uuid), ``volume_id``, ``new_volume_id`` and
    ``new_size_gb``. ``delete_on_termination`` is stored with the action. None: it is unchanged.

    Raises:
        NotFound: The server does not exist, or does not have the volume.
        Locked, WrongState, Busy: As in ``actions.begin``.
        Conflict: As in ``actions.begin``. Also, the volume is not attached yet, or not any more.
        BadRequest: The server has the new volume already.
    """
    _, device = _take(tx, row, server_id, context, project_id, volume_id)
    if any(other.volume_id == new_volume_id for other in list_of(tx, server_id)):
        raise errors.BadRequest(f"Invalid volume: volume {new_volume_id} already attached")
    if device.status != BlockDeviceStatus.ATTACHED:
        raise errors.Conflict(
            f"Volume {volume_id} of instance {server_id} is {device.status}. Swap the volume when it is attached."
        )
    if delete_on_termination is not None:
        set_values(tx, [device.uuid], delete_on_termination=delete_on_termination)
    return actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={
            "block_device": device.uuid,
            "volume_id": volume_id,
            "new_volume_id": new_volume_id,
            "new_size_gb": new_size_gb,
        },
    )


def assist(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    volume_id: str,
    details: Values,
) -> str:
    """Let an assisted snapshot action take the server, and return the action's id.

    The block storage service delegates these actions to the server's host: to snapshot a volume, or
    to merge a snapshot into the volume.

    Args:
        tx: The transaction.
        row: The row of the action in the table of actions.
        server_id: Id of the server.
        context: The caller's request.
        project_id: Project of the server. None: any project.
        volume_id: Id of the volume.
        details: Further arguments of the action.

    Raises:
        NotFound: The server does not exist, or does not have the volume.
        Locked, WrongState, Busy: As in ``actions.begin``.
        Conflict: As in ``actions.begin``. Also, the server is on no host, or the volume is not
            attached and connected.
    """
    server, device = _take(tx, row, server_id, context, project_id, volume_id)
    if server.host is None or device.status != BlockDeviceStatus.ATTACHED or not device.connection:
        raise errors.Conflict(
            f"Volume {volume_id} of instance {server_id} is not connected to a host (status: {device.status})."
        )
    return actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"block_device": device.uuid, "volume_id": volume_id, **details},
    )


def _take(
    tx: Connection,
    row: states.Action,
    server_id: str,
    context: RequestContext,
    project_id: str | None,
    volume_id: str,
) -> tuple[ServerState, BlockDeviceRow]:
    """Lock the server, check that the action may begin, and return the server and the volume's row.

    Raises:
        NotFound, Locked, WrongState, Busy, Conflict: As in ``actions.begin`` and ``show``.
    """
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    return server, show(tx, server_id, volume_id)


def refuse_root(device: BlockDeviceRow) -> None:
    """Raise Forbidden if the server boots from the volume."""
    if device.boot_index == 0:
        raise errors.Forbidden("Cannot detach a root device volume")


def insert(tx: Connection, rows: Sequence[Values]) -> None:
    """Insert rows of servers' volumes, with defaults for missing columns.

    The caller raises ``servers.volumes``.
    """
    base = {
        "uuid": None,
        "server_id": None,
        "volume_id": None,
        "status": BlockDeviceStatus.CREATING,
        "source_type": VOLUME,
        "source_id": None,
        "volume_type": None,
        "size_gb": None,
        "boot_index": None,
        "device_name": None,
        "disk_bus": None,
        "device_type": None,
        "tag": None,
        "delete_on_termination": False,
        "read_only": False,
        "multiattach": False,
    }
    insert_many(tx, table, [base | dict(row) for row in rows], "created_at", "updated_at")


def put(tx: Connection, uuids: Sequence[str], status: BlockDeviceStatus) -> None:
    """Set the status of the rows with these uuids."""
    set_values(tx, uuids, status=status)


def set_values(tx: Connection, uuids: Sequence[str], **values: object) -> int:
    """Change columns of the rows with these uuids, and return the number of rows that exist."""
    return tx.execute(
        sa.update(table).where(table.c.uuid.in_(uuids)).values(**values, updated_at=now())
    ).rowcount


def set_delete_on_termination(
    tx: Connection, server_id: str, volume_id: str, delete_on_termination: bool
) -> None:
    """Store whether the volume is deleted together with the server.

    Raises:
        NotFound: The server does not have the volume.
    """
    row = show(tx, server_id, volume_id)
    set_values(tx, [row.uuid], delete_on_termination=delete_on_termination)


def leaving(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[BlockDeviceRow]]:
    """Set all volumes of servers that are being deleted to DETACHING.

    Returns:
        Server id -> rows as before the change. Servers without volumes are left out.
    """
    by_server = of_some(tx, server_ids)
    put(tx, [row.uuid for rows in by_server.values() for row in rows], BlockDeviceStatus.DETACHING)
    return by_server


def remove(tx: Connection, server_id: str, uuids: Sequence[str]) -> None:
    """Delete rows of a server's volumes, and reduce ``servers.volumes`` by their number.

    Missing rows are ignored.
    """
    count = tx.execute(
        sa.delete(table).where(table.c.server_id == server_id, table.c.uuid.in_(uuids))
    ).rowcount
    if count:
        tx.execute(
            sa.update(servers)
            .where(servers.c.id == server_id)
            .values(volumes=servers.c.volumes - count)
        )
