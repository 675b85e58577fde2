# SPDX-License-Identifier: Apache-2.0
"""Rows of servers' volumes for the conductor: bulk reads and writes.

Servers without volumes cost no statement. ``common.store.servers.volumes`` begins the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import now, update_grouped
from common.store.rows import BlockDeviceRow, ServerRow, Values
from common.store.schema import block_devices as table


def of_servers(tx: Connection, servers: Iterable[ServerRow]) -> dict[str, list[BlockDeviceRow]]:
    """Return the rows of these servers' volumes by server id, oldest first.

    Servers without volumes are left out. If no server has volumes, there is no query.
    """
    server_ids = sorted(row.id for row in servers if row.volumes)
    by_server: dict[str, list[BlockDeviceRow]] = {}
    for row in tx.execute(_OF_SERVERS, {"ids": server_ids}) if server_ids else ():
        by_server.setdefault(row.server_id, []).append(row)
    return by_server


_OF_SERVERS = (
    sa.select(table)
    .where(table.c.server_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(table.c.created_at, table.c.uuid)
)


def of_server(tx: Connection, server: ServerRow) -> list[BlockDeviceRow]:
    """Return the rows of a server's volumes, oldest first."""
    return of_servers(tx, [server]).get(server.id, [])


def change(tx: Connection, changes: Mapping[str, Values | None]) -> None:
    """Change or delete the rows of volumes: uuid -> column values, or None to delete the row.

    The caller changes ``servers.volumes`` for deleted rows.
    """
    if renamed_ids := sorted(
        uuid for uuid, values in changes.items() if "device_name" in (values or ())
    ):
        # Device names are unique per server, even while names are exchanged.
        tx.execute(
            sa.update(table).where(table.c.uuid.in_(renamed_ids)).values(device_name=table.c.uuid)
        )
    row_changes = {
        uuid: {**values, "updated_at": now()}
        for uuid, values in changes.items()
        if values is not None
    }
    update_grouped(tx, table, table.c.uuid, row_changes)
    removed_ids = sorted(uuid for uuid, values in changes.items() if values is None)
    if removed_ids:
        tx.execute(sa.delete(table).where(table.c.uuid.in_(removed_ids)))
