# SPDX-License-Identifier: Apache-2.0
"""The rows of servers' volumes as the conductor reads and writes them: many servers' at once, and
none at all for servers without volumes, so that nothing of theirs comes here.

``store.servers.volumes`` begins what changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import now, update_grouped
from common.store.rows import BlockDeviceRow, ServerRow, Values
from common.store.schema import block_devices as table


def of_servers(tx: Connection, servers: Iterable[ServerRow]) -> dict[str, list[BlockDeviceRow]]:
    """The volumes of these servers, by server, the oldest first; nobody is asked when they have
    none."""
    having = sorted(row.id for row in servers if row.volumes)
    found: dict[str, list[BlockDeviceRow]] = {}
    for row in tx.execute(_OF_SERVERS, {"ids": having}) if having else ():
        found.setdefault(row.server_id, []).append(row)
    return found


_OF_SERVERS = (
    sa.select(table)
    .where(table.c.server_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(table.c.created_at, table.c.uuid)
)


def of_server(tx: Connection, server: ServerRow) -> list[BlockDeviceRow]:
    """The same of one."""
    return of_servers(tx, [server]).get(server.id, [])


def change(tx: Connection, changes: Mapping[str, Values | None]) -> None:
    """Write rows by uuid; None removes one, and whoever does that changes its server's count."""
    if renamed := sorted(
        uuid for uuid, values in changes.items() if "device_name" in (values or ())
    ):
        # Two disks of a server never have one name, not even while names are exchanged.
        tx.execute(
            sa.update(table).where(table.c.uuid.in_(renamed)).values(device_name=table.c.uuid)
        )
    written = {
        uuid: {**values, "updated_at": now()}
        for uuid, values in changes.items()
        if values is not None
    }
    update_grouped(tx, table, table.c.uuid, written)
    removed = sorted(uuid for uuid, values in changes.items() if values is None)
    if removed:
        tx.execute(sa.delete(table).where(table.c.uuid.in_(removed)))
