# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers: which volume a server has, what it calls it, and how far it is.

The API begins what changes them, the conductor's workflows write what becomes of it.
``servers.volumes`` counts a server's rows and is changed with them under the server's lock, so that
nobody else asks this table. A row is there from the moment a volume is asked for to the moment its
attachment is gone.
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
    """A volume that a server is to get on a ``bus``."""

    volume_id: str
    size_gb: int
    bus: str | None = None
    tag: str | None = None
    delete_on_termination: bool = False
    read_only: bool = False
    multiattach: bool = False
    more: Values = field(default_factory=dict)  #: other columns of the row


def list_of(tx: Connection, server_id: str) -> list[BlockDeviceRow]:
    """A server's, the oldest first, those that it boots from before."""
    return of_some(tx, [server_id]).get(server_id, [])


def of_some(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[BlockDeviceRow]]:
    """Those of each of these servers that has some, as ``list_of``."""
    found: dict[str, list[BlockDeviceRow]] = {}
    query = (
        sa.select(table)
        .where(table.c.server_id.in_(sorted(server_ids)))
        .order_by(table.c.created_at, table.c.uuid)
    )
    for row in tx.execute(query):
        found.setdefault(row.server_id, []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: (row.boot_index is None, row.boot_index or 0))
    return found


def of_volume(tx: Connection, volume_id: str) -> list[BlockDeviceRow]:
    """Those of all servers that have this volume."""
    return list(
        tx.execute(
            sa.select(table).where(table.c.volume_id == volume_id).order_by(table.c.created_at)
        )
    )


def show(tx: Connection, server_id: str, volume_id: str) -> BlockDeviceRow:
    """One of a server's. Raises NotFound."""
    found = tx.execute(
        sa.select(table).where(table.c.server_id == server_id, table.c.volume_id == volume_id)
    ).first()
    if found is None:
        raise errors.NotFound(f"Instance {server_id} is not attached to volume {volume_id[:80]}")
    return found


def by_uuid(tx: Connection, uuid: str) -> BlockDeviceRow | None:
    """One row; None: it is gone."""
    return tx.execute(sa.select(table).where(table.c.uuid == uuid)).first()


def root_of(tx: Connection, server_id: str) -> BlockDeviceRow | None:
    """The volume that a server boots from; None: it boots from a disk of its host."""
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
    """Let the action that attaches a volume take the server; returns the action's id, whose args
    name the new row and the volume.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``. BadRequest: the server has the
        volume already. Forbidden: it has as many disks as there are names.
    """
    found = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, found, context, tx)
    there = list_of(tx, server_id)
    if volume.volume_id in [one.volume_id for one in there]:
        raise errors.BadRequest(f"Invalid volume: volume {volume.volume_id} already attached")
    used = {one.device_name for one in there}.union(_local_names(tx, server_id))
    device = device_names.next_free(used, volume.bus)
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
                if found.host is None
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
    """Return the names of a server's root disk and of its host's other disks.

    Args:
        flavor: Column of the server, as are disks and image.
        root: Its root_device_name.
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
    """Let the action that detaches a volume take the server; returns the action's id, whose args
    name the row and the volume.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``. NotFound: the server does not have
        the volume. Forbidden: it boots from it.
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
) -> str:
    """Let the action that puts another volume in the place of one take the server; returns its id.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``. NotFound: the server does not have
        the volume. BadRequest: it has the other one too. Conflict: it does not have the volume yet.
    """
    _, device = _take(tx, row, server_id, context, project_id, volume_id)
    if any(one.volume_id == new_volume_id for one in list_of(tx, server_id)):
        raise errors.BadRequest(f"Invalid volume: volume {new_volume_id} already attached")
    if device.status != BlockDeviceStatus.ATTACHED:
        raise errors.Conflict(
            f"Volume {volume_id} of instance {server_id} is {device.status}; exchange it when it is attached."
        )
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
    about: Values,
) -> str:
    """Let an action take the server by which its host snapshots a volume for the block storage
    service, or merges such a snapshot; returns its id. ``about``: what else its args have.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``. NotFound: the server does not have
        the volume. Conflict: it has it nowhere yet, or not any more.
    """
    found, device = _take(tx, row, server_id, context, project_id, volume_id)
    if found.host is None or device.status != BlockDeviceStatus.ATTACHED or not device.connection:
        raise errors.Conflict(
            f"Instance {server_id} has volume {volume_id} on no host just now: it is {device.status}."
        )
    return actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"block_device": device.uuid, "volume_id": volume_id, **about},
    )


def _take(
    tx: Connection,
    row: states.Action,
    server_id: str,
    context: RequestContext,
    project_id: str | None,
    volume_id: str,
) -> tuple[ServerState, BlockDeviceRow]:
    """The server, locked, if the action may begin, and the volume of it. Raises as
    ``actions.begin`` and ``show``."""
    found = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, found, context, tx)
    return found, show(tx, server_id, volume_id)


def refuse_root(device: BlockDeviceRow) -> None:
    """Raises Forbidden: a server keeps what it boots from."""
    if device.boot_index == 0:
        raise errors.Forbidden("Cannot detach a root device volume")


def insert(tx: Connection, rows: Sequence[Values]) -> None:
    """Write new rows; their servers' rows are changed by the caller."""
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
    """Write how far these are."""
    set_values(tx, uuids, status=status)


def set_values(tx: Connection, uuids: Sequence[str], **values: object) -> int:
    """Change columns of these; returns how many there were."""
    return tx.execute(
        sa.update(table).where(table.c.uuid.in_(uuids)).values(**values, updated_at=now())
    ).rowcount


def keep_on_termination(
    tx: Connection, server_id: str, volume_id: str, delete_on_termination: bool
) -> None:
    """Is a volume to be deleted with its server? Raises NotFound: the server does not have it."""
    found = show(tx, server_id, volume_id)
    set_values(tx, [found.uuid], delete_on_termination=delete_on_termination)


def leaving(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[BlockDeviceRow]]:
    """All volumes of these servers, which are deleted, are on their way out; by server, as they
    were."""
    found = of_some(tx, server_ids)
    put(tx, [row.uuid for rows in found.values() for row in rows], BlockDeviceStatus.DETACHING)
    return found


def remove(tx: Connection, server_id: str, uuids: Sequence[str]) -> None:
    """Forget these of a server, which counts them no longer; those that are gone are fine."""
    gone = tx.execute(
        sa.delete(table).where(table.c.server_id == server_id, table.c.uuid.in_(uuids))
    ).rowcount
    if gone:
        tx.execute(
            sa.update(servers)
            .where(servers.c.id == server_id)
            .values(volumes=servers.c.volumes - gone)
        )
