# SPDX-License-Identifier: Apache-2.0
"""Volumes of servers: the records against themselves, against the attachments that the block
storage service has, and against the disks that guests run with.

What an action has in hand is not judged, nor what
a pending cleanup puts right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import states
from common.domain.json_types import JsonMapping
from common.domain.statuses import BlockDeviceStatus
from common.store import cleanups
from common.store.rows import BlockDeviceRow, ServerRow
from common.store.rows import ServerState as ServerPlace
from common.store.schema import actions, block_devices, servers
from common.store.servers import block_devices as block_device_rows
from common.store.servers.actions import LIVE
from deploy.operator.doctor.finding import Finding

_ALL = sa.select(block_devices).order_by(block_devices.c.created_at, block_devices.c.uuid)
#: What an attachment is whose server has the volume.
_COMPLETE = "attached"


def check(tx: Connection, live: Mapping[str, ServerRow]) -> Iterator[Finding]:
    """A server counts its volumes; one that is gone has none; an idle one has each of them where it
    is."""
    rows: list[BlockDeviceRow] = list(tx.execute(_ALL))
    spared = pending(tx) if rows else set()
    numbers: dict[str, int] = {}
    for row in rows:
        numbers[row.server_id] = numbers.get(row.server_id, 0) + 1
    for server in live.values():
        if server.volumes != numbers.get(server.id, 0):
            yield Finding(
                "volumes",
                server.id,
                f"counts {server.volumes} volumes and has {numbers.get(server.id, 0)}",
            )
    for gone in numbers.keys() - live.keys():
        yield Finding("volumes", gone, "has volumes and is gone", "volumes-of-gone")
    for row in rows:
        owner = live.get(row.server_id)
        spares = (row.server_id, row.volume_id) in spared
        if owner is not None and owner.action is None and not spares:
            yield from _of_row(owner, row)


def pending(tx: Connection) -> set[tuple[str, str]]:
    """Server and volume of each pending cleanup of an attachment; of a volume that was to migrate,
    the new one too."""
    return {
        (row.server_id, volume)
        for row in cleanups.list_all(tx)
        if row.kind in cleanups.OF_VOLUMES
        for volume in (row.place, row.args.get("migrates_to"))
        if volume
    }


def _of_row(server: ServerRow, row: BlockDeviceRow) -> Iterator[Finding]:
    if row.status == BlockDeviceStatus.ERROR:
        yield Finding(
            "volume-of-server",
            server.id,
            f"its guest may have volume {row.volume_id}, which could not be attached and not be taken back",
            "volume-in-error",
            (str(row.volume_id),),
        )
        return
    usual = (BlockDeviceStatus.ATTACHED,) if server.host else (BlockDeviceStatus.RESERVED,)
    failed = (
        (BlockDeviceStatus.CREATING, BlockDeviceStatus.RESERVED)
        if server.vm_state == states.ERROR and not server.host
        else ()
    )
    if row.status not in (*usual, *failed) or bool(row.connection) != bool(server.host):
        yield Finding(
            "volume-of-server",
            server.id,
            f"it is on {server.host or 'no host'}, and its volume {row.volume_id} is {row.status}"
            f"{'' if row.connection else ', connected nowhere'}",
            "volume-elsewhere",
            (str(row.volume_id),),
        )


def compare_volumes(attachments: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """The attachments of all servers, as the block storage service has them (id, volume_id,
    server_id, status), against the records.

    Finds a volume that a server has without an attachment, one that was not completed, and an
    attachment that its server, which may be gone, does not know.
    """
    held = {str(one["id"]): one for one in attachments}
    idle = sa.select(servers.c.id, servers.c.host, servers.c.vm_state).where(
        servers.c.deleted == 0, servers.c.action.is_(None)
    )
    resting = {row.id: row for row in tx.execute(idle)}
    rows: list[BlockDeviceRow] = [
        row
        for row in tx.execute(_ALL)
        if row.server_id in resting
        and (row.attachment_id or not _was_never_made(resting[row.server_id]))
    ]
    spared = pending(tx)
    busy = set(tx.scalars(sa.select(actions.c.server_id).where(actions.c.state.in_(LIVE))))
    named = sorted({str(one["server_id"]) for one in attachments})
    ours = set(tx.scalars(sa.select(servers.c.id).where(servers.c.id.in_(named))))
    findings = [
        *_without_attachment(rows, held, spared),
        *(
            Finding(
                "attachment-of-server",
                str(one["id"]),
                f"lets server {one['server_id']} have volume {one['volume_id']}, and the server "
                f"{'does not know it' if one['server_id'] in resting else 'is gone'}",
                facts=(str(one["server_id"]), str(one["volume_id"])),
            )
            for one in held.values()
            if one["server_id"] in ours - busy
            and (one["server_id"], one["volume_id"]) not in spared
            and all(row.attachment_id != one["id"] for row in rows)
        ),
    ]
    return sorted(findings)


def compare_guests(
    had: Mapping[str, Mapping[str, Collection[str]]], tx: Connection
) -> list[Finding]:
    """The volumes that guests have as their hosts run them (host -> server -> ids), against the
    records of idle servers.

    Finds a volume that a guest can write to and its server does not have, and one that its server
    has and the guest cannot see. A guest that is off has none: what it starts with is decided then.
    """
    idle = sa.select(servers).where(
        servers.c.deleted == 0, servers.c.action.is_(None), servers.c.host.in_(sorted(had))
    )
    running = [row for row in tx.execute(idle) if row.id in had[row.host]]
    rows = block_device_rows.of_servers(tx, running)
    findings = []
    for server in running:
        mine = {str(row.volume_id): row.status for row in rows.get(server.id, ())}
        has = set(had[server.host][server.id])
        findings += [
            Finding(
                "volume-of-guest",
                server.id,
                f"its guest on {server.host} runs with volume {volume}, which the server does not have: it may be "
                "another server's",
                "volume-of-another",
                (volume,),
            )
            for volume in has - mine.keys()
        ]
        findings += [
            Finding(
                "volume-of-guest",
                server.id,
                f"has volume {volume}, and its guest on {server.host} runs without it",
                "volume-not-in-guest",
                (volume,),
            )
            for volume, status in mine.items()
            if status == BlockDeviceStatus.ATTACHED and volume not in has
        ]
    return sorted(findings)


def _was_never_made(server: ServerPlace) -> bool:
    """Its create has failed, perhaps before it had its volumes: they are its delete's."""
    return server.host is None and server.vm_state == states.ERROR


def _without_attachment(
    rows: Sequence[BlockDeviceRow],
    held: Mapping[str, JsonMapping],
    spared: set[tuple[str, str]],
) -> Iterator[Finding]:
    for row in rows:
        if (row.server_id, row.volume_id) in spared or row.status == BlockDeviceStatus.CREATING:
            continue
        found = held.get(str(row.attachment_id))
        if found is None:
            yield Finding(
                "volume-of-server",
                row.server_id,
                f"has volume {row.volume_id}, and the block storage service knows no attachment of it: others may "
                "get it",
                "volume-without-attachment",
                (str(row.volume_id),),
            )
        elif row.status == BlockDeviceStatus.ATTACHED and found["status"] != _COMPLETE:
            yield Finding(
                "volume-of-server",
                row.server_id,
                f"has volume {row.volume_id}, and its attachment is {found['status']}",
                "attachment-incomplete",
                (str(row.volume_id), str(found["id"])),
            )
