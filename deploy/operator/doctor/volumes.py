# SPDX-License-Identifier: Apache-2.0
"""Comparison of servers' volumes in three places.

These are the records, the attachments in the block storage service, and the disks of running
guests. Servers with a running action are left out, except from the count of volumes. ``check`` and
``compare_volumes`` also leave out volumes with a pending cleanup.
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
#: The status of an attachment in use.
_COMPLETE = "attached"


def check(tx: Connection, live: Mapping[str, ServerRow]) -> Iterator[Finding]:
    """Yield findings about the volumes of servers in the database.

    The findings are a wrong number of volumes in a server's row, volumes of a deleted server, and a
    volume with a wrong status or connection. If the server is on a host, the volume is attached and
    connected. Otherwise the volume is reserved, or being created for a server in ERROR, and not
    connected. This last check leaves out servers with an action and volumes with a pending cleanup.

    Args:
        tx: The transaction.
        live: The servers that are not deleted, by id.
    """
    rows: list[BlockDeviceRow] = list(tx.execute(_ALL))
    ignored_volumes = pending(tx) if rows else set()
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
    for server_id in numbers.keys() - live.keys():
        yield Finding("volumes", server_id, "is deleted, but has volumes", "volumes-of-gone")
    for row in rows:
        owner = live.get(row.server_id)
        is_ignored = (row.server_id, row.volume_id) in ignored_volumes
        if owner is not None and owner.action is None and not is_ignored:
            yield from _check_row(owner, row)


def pending(tx: Connection) -> set[tuple[str, str]]:
    """Return (server id, volume id) of each pending cleanup of a volume (``cleanups.OF_VOLUMES``).

    For a volume that was being migrated, the pair with the new volume is included too.
    """
    return {
        (row.server_id, volume)
        for row in cleanups.list_all(tx)
        if row.kind in cleanups.OF_VOLUMES
        for volume in (row.place, row.args.get("migrates_to"))
        if volume
    }


def _check_row(server: ServerRow, row: BlockDeviceRow) -> Iterator[Finding]:
    if row.status == BlockDeviceStatus.ERROR:
        yield Finding(
            "volume-of-server",
            server.id,
            f"its guest may have volume {row.volume_id}, because attaching the volume failed, and so did the undo",
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
            f"it is on {server.host or 'no host'}, but its volume {row.volume_id} is {row.status}"
            f"{'' if row.connection else ' and not connected to a host'}",
            "volume-elsewhere",
            (str(row.volume_id),),
        )


def compare_volumes(attachments: Sequence[JsonMapping], tx: Connection) -> list[Finding]:
    """Compare attachments in the block storage service with the database. Return the findings.

    The findings are a server's volume without an attachment, an attached volume with an attachment
    that was not completed, and an attachment that the server's row does not have. In the last case
    the server may be deleted. Servers with an action, servers without a row, volumes with a pending
    cleanup, and missing attachments of new volumes or after a failed create are left out.

    Args:
        attachments: All attachments to servers, each with id, volume_id, server_id and status.
        tx: The transaction.
    """
    held = {str(attachment["id"]): attachment for attachment in attachments}
    idle = sa.select(servers.c.id, servers.c.host, servers.c.vm_state).where(
        servers.c.deleted == 0, servers.c.action.is_(None)
    )
    resting = {row.id: row for row in tx.execute(idle)}
    rows: list[BlockDeviceRow] = [
        row
        for row in tx.execute(_ALL)
        if row.server_id in resting
        and (row.attachment_id or not _was_never_built(resting[row.server_id]))
    ]
    ignored_volumes = pending(tx)
    busy = set(tx.scalars(sa.select(actions.c.server_id).where(actions.c.state.in_(LIVE))))
    named = sorted({str(attachment["server_id"]) for attachment in attachments})
    known_servers = set(tx.scalars(sa.select(servers.c.id).where(servers.c.id.in_(named))))
    findings = [
        *_without_attachment(rows, held, ignored_volumes),
        *(
            Finding(
                "attachment-of-server",
                str(attachment["id"]),
                f"attaches volume {attachment['volume_id']} to server {attachment['server_id']}, but the server "
                f"{'does not have it' if attachment['server_id'] in resting else 'is gone'}",
                facts=(str(attachment["server_id"]), str(attachment["volume_id"])),
            )
            for attachment in held.values()
            if attachment["server_id"] in known_servers - busy
            and (attachment["server_id"], attachment["volume_id"]) not in ignored_volumes
            and all(row.attachment_id != attachment["id"] for row in rows)
        ),
    ]
    return sorted(findings)


def compare_guests(
    volumes_by_host: Mapping[str, Mapping[str, Collection[str]]], tx: Connection
) -> list[Finding]:
    """Compare the volumes of running guests with the database. Return the findings.

    The findings are a volume that the guest has and the server does not, and an attached volume of
    the server that the guest does not have. Servers with an action are left out. Guests that are
    off are left out too, because their volumes are decided at the next start.

    Args:
        volumes_by_host: Host -> server -> ids of the volumes of the server's running guest.
        tx: The transaction.
    """
    idle = sa.select(servers).where(
        servers.c.deleted == 0,
        servers.c.action.is_(None),
        servers.c.host.in_(sorted(volumes_by_host)),
    )
    running = [row for row in tx.execute(idle) if row.id in volumes_by_host[row.host]]
    rows = block_device_rows.of_servers(tx, running)
    findings = []
    for server in running:
        recorded_volumes = {str(row.volume_id): row.status for row in rows.get(server.id, ())}
        guest_volumes = set(volumes_by_host[server.host][server.id])
        findings += [
            Finding(
                "volume-of-guest",
                server.id,
                f"its guest on {server.host} runs with volume {volume}, which the server does not have and which may "
                "belong to another server",
                "volume-of-another",
                (volume,),
            )
            for volume in guest_volumes - recorded_volumes.keys()
        ]
        findings += [
            Finding(
                "volume-of-guest",
                server.id,
                f"has volume {volume}, but its guest on {server.host} runs without the volume",
                "volume-not-in-guest",
                (volume,),
            )
            for volume, status in recorded_volumes.items()
            if status == BlockDeviceStatus.ATTACHED and volume not in guest_volumes
        ]
    return sorted(findings)


def _was_never_built(server: ServerPlace) -> bool:
    """Return True if the server is in ERROR on no host, as after a failed create.

    Its volumes may never have been attached. The delete of the server releases them.
    """
    return server.host is None and server.vm_state == states.ERROR


def _without_attachment(
    rows: Sequence[BlockDeviceRow],
    held: Mapping[str, JsonMapping],
    ignored_volumes: set[tuple[str, str]],
) -> Iterator[Finding]:
    for row in rows:
        if (
            row.server_id,
            row.volume_id,
        ) in ignored_volumes or row.status == BlockDeviceStatus.CREATING:
            continue
        attachment = held.get(str(row.attachment_id))
        if attachment is None:
            yield Finding(
                "volume-of-server",
                row.server_id,
                f"has volume {row.volume_id}, but the block storage service has no attachment of the volume, so other "
                "servers may get it",
                "volume-without-attachment",
                (str(row.volume_id),),
            )
        elif row.status == BlockDeviceStatus.ATTACHED and attachment["status"] != _COMPLETE:
            yield Finding(
                "volume-of-server",
                row.server_id,
                f"has volume {row.volume_id}, but its attachment is {attachment['status']}",
                "attachment-incomplete",
                (str(row.volume_id), str(attachment["id"])),
            )
