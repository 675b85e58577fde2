# SPDX-License-Identifier: Apache-2.0
"""The queries of the metadata service: one statement for each kind of data.

``version`` changes whenever the guest's metadata changes. Invariant: each transaction that changes
such data also changes ``updated_at``, the fence or another column of the version.

A guest can store a password once. The server's owner clears it through the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.statuses import MIGRATIONS_IN_PROGRESS, BlockDeviceStatus
from common.store.engine import now
from common.store.rows import BlockDeviceRow, ServerFacts
from common.store.schema import actions, block_devices, migrations, servers
from common.store.servers import volumes

C = servers.c
Version = tuple[int | str | None, ...]
#: Columns that change with the metadata, and with the hosts that may request it.
_VERSION = [
    C.fence,
    C.updated_at,
    C.host,
    C.volumes,
    migrations.c.source_host,
    migrations.c.dest_host,
    sa.select(sa.func.max(block_devices.c.updated_at))
    .where(block_devices.c.server_id == C.id)
    .scalar_subquery()
    .label("volumes_updated_at"),
]
#: The columns that ``instance_data.guest_spec`` reads, and the password.
_FACTS = [
    *(
        C[name]
        for name in (
            "id",
            "name",
            "hostname",
            "project_id",
            "availability_zone",
            "launch_index",
            "meta",
            "key_name",
            "key_data",
            "flavor",
            "image",
            "config_drive",
            "user_data",
            "interfaces",
            "security_groups",
            "reservation_id",
            "root_device_name",
            "password",
            "disks",
        )
    ),
    *_VERSION,
]
#: During a move the guest may run on both hosts.
_WITH_MOVE = servers.outerjoin(
    migrations,
    sa.and_(migrations.c.server_id == C.id, migrations.c.status.in_(MIGRATIONS_IN_PROGRESS)),
)


def facts(tx: Connection, server_id: str) -> ServerFacts | None:
    """Return the data for a guest's metadata, or None if the server is deleted or unknown.

    JSON columns are parsed.
    """
    return tx.execute(_of_server(_FACTS, server_id)).first()


def version(tx: Connection, server_id: str) -> Version | None:
    """Return the present version of the data for a guest's metadata.

    A change of the data or of the server's hosts changes the version. Returns None if the server is
    deleted or unknown.
    """
    row = tx.execute(_of_server(_VERSION, server_id)).first()
    return None if row is None else tuple(row)


def version_of(server: ServerFacts) -> Version:
    """Return the version of a result of ``facts``, to compare with ``version``."""
    return tuple(getattr(server, column.name) for column in _VERSION)


def _of_server(columns: Sequence[sa.ColumnElement[Any]], server_id: str) -> sa.Select[Any]:
    return sa.select(*columns).select_from(_WITH_MOVE).where(C.id == server_id, C.deleted == 0)


def tagged_volumes(tx: Connection, server: ServerFacts) -> list[BlockDeviceRow]:
    """Return the server's volumes that are attached and have a tag. Without volumes: no query."""
    if not server.volumes:
        return []
    return [
        row
        for row in volumes.list_of(tx, server.id)
        if row.tag and row.status == BlockDeviceStatus.ATTACHED
    ]


def boot_roles(tx: Connection, server_id: str) -> list[str]:
    """Return the roles of the user that created the server, or [] if they were not stored."""
    args = tx.scalar(
        sa.select(actions.c.args).where(
            actions.c.server_id == server_id, actions.c.workflow == "create"
        )
    )
    return list((args or {}).get("roles") or ())


def post_password(tx: Connection, server_id: str, password: str) -> bool:
    """Store the guest's password, which the guest has encrypted, and return True.

    Returns False if the server has a password already, is deleted, or does not exist.
    """
    return bool(
        tx.execute(
            sa.update(servers)
            .where(C.id == server_id, C.deleted == 0, C.password.is_(None))
            .values(password=password, updated_at=now())
        ).rowcount
    )
