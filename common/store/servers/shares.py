# SPDX-License-Identifier: Apache-2.0
"""Shares of servers: the rows of attached shares, with tags and status.

The API begins the changes, and the conductor's workflows record their outcomes. ``servers.shares``
counts a server's rows, so that servers without shares need no query. It changes with the rows,
under the server's lock. The status "active" is not stored: an attached share is active while the
server runs. An access rule of the share service belongs to a share and a host's address
(``access_to``). All servers on a host use the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids, states
from common.domain.context import RequestContext
from common.domain.statuses import ShareStatus
from common.store.engine import insert_many, now
from common.store.rows import ServerRow, ShareMappingRow
from common.store.schema import hosts, servers
from common.store.schema import share_mappings as table
from common.store.servers import actions

#: Mappings with one of these statuses need the access rule of their share and host.
USING = (ShareStatus.ATTACHING, ShareStatus.INACTIVE)
#: Traits of a host that can give shares to guests: the device, and memory that the device's process
#: can map.
TRAITS = ("COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE")


def list_of(tx: Connection, server_id: str) -> list[ShareMappingRow]:
    """Return the mappings of a server's shares, oldest first."""
    return list(
        tx.execute(
            sa.select(table)
            .where(table.c.server_id == server_id)
            .order_by(table.c.created_at, table.c.uuid)
        )
    )


def ids_of(tx: Connection, servers: Iterable[ServerRow]) -> dict[str, list[str]]:
    """Return the share ids of these servers by server id, oldest first.

    Servers without shares are left out. If no server has shares, there is no query.
    """
    server_ids = sorted(row.id for row in servers if row.shares)
    by_server: dict[str, list[str]] = {}
    for row in tx.execute(_OF_SERVERS, {"ids": server_ids}) if server_ids else ():
        by_server.setdefault(row.server_id, []).append(row.share_id)
    return by_server


_OF_SERVERS = (
    sa.select(table.c.server_id, table.c.share_id)
    .where(table.c.server_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(table.c.created_at, table.c.uuid)
)


def show(tx: Connection, server_id: str, share_id: str) -> ShareMappingRow:
    """Return the mapping of a server's share.

    Raises:
        NotFound: The server does not have the share.
    """
    mapping = tx.execute(
        sa.select(table).where(table.c.server_id == server_id, table.c.share_id == share_id)
    ).first()
    if mapping is None:
        raise errors.NotFound(f"Share {share_id} could not be found.")
    return mapping


def attach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    share: Mapping[str, str],
) -> str:
    """Let the action that attaches a share take the server, and return the action's id.

    The share's new mapping has the status ATTACHING.

    Args:
        tx: The transaction.
        row: The row of the action in the table of actions.
        server_id: Id of the server.
        context: The caller's request.
        project_id: Project of the server. None: any project.
        share: share_id, tag, protocol and export_location. They become the argument ``share`` of
            the action, with the mapping's ``uuid`` and ``access_to``, the host's address.

    Raises:
        NotFound, Locked, WrongState, Busy: As in ``actions.begin``.
        Conflict: As in ``actions.begin``. Also, the server has the share or the tag already, or has
            no host, or its host does not support shares.
    """
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    alike = sa.or_(table.c.share_id == share["share_id"], table.c.tag == share["tag"])
    if (
        tx.execute(sa.select(table.c.uuid).where(table.c.server_id == server_id, alike)).first()
        is not None
    ):
        raise errors.Conflict(
            f"Share '{share['share_id']}' or tag '{share['tag']}' already associated to this server."
        )
    values = {**share, "uuid": ids.new(), "access_to": _mount_address(tx, server.host)}
    action = actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"share": values},
        changes={"shares": servers.c.shares + 1},
    )
    insert_many(
        tx,
        table,
        [{**values, "server_id": server_id, "status": ShareStatus.ATTACHING}],
        "created_at",
        "updated_at",
    )
    return action


def _mount_address(tx: Connection, host: str | None) -> str:
    """Return the address from which a host mounts shares.

    Raises:
        Conflict: The server has no host, or the host does not support shares.
    """
    host_row = tx.execute(
        sa.select(hosts.c.host_ip, hosts.c.traits, hosts.c.facts).where(hosts.c.name == host)
    ).first()
    if host_row is None:
        raise errors.Conflict("The server is on no host, so no share can be attached.")
    missing = [trait for trait in TRAITS if trait not in host_row.traits]
    if missing:
        raise errors.Conflict(
            "Feature not supported because the server's host is not configured for it: it lacks "
            f"{' and '.join(missing)}."
        )
    return str((host_row.facts or {}).get("share_address") or host_row.host_ip)


def detach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    share_id: str,
) -> str:
    """Let the action that detaches a share take the server, and return the action's id.

    The mapping's status becomes DETACHING. The action's argument ``share`` is the mapping
    (``as_args``), with the previous status as ``was``.

    Raises:
        NotFound: The server does not exist, or does not have the share.
        Locked, WrongState, Busy, Conflict: As in ``actions.begin``.
    """
    server = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, server, context, tx)
    mapping = show(tx, server_id, share_id)
    action = actions.begin(
        tx,
        row,
        server_id,
        context=context,
        project_id=project_id,
        args={"share": {**as_args(mapping), "was": mapping.status}},
    )
    put(tx, [mapping.uuid], ShareStatus.DETACHING)
    return action


def as_args(mapping: ShareMappingRow) -> dict[str, str]:
    """Return the columns of a mapping that actions and commands have as argument ``share``."""
    return {
        name: getattr(mapping, name)
        for name in ("uuid", "share_id", "tag", "protocol", "export_location", "access_to")
    }


def put(tx: Connection, uuids: Sequence[str], status: ShareStatus) -> None:
    """Set the status of the mappings with these uuids."""
    tx.execute(
        sa.update(table).where(table.c.uuid.in_(uuids)).values(status=status, updated_at=now())
    )


def leaving(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """Set all shares of servers that are being deleted to DETACHING.

    Returns:
        Server id -> its mappings in the form of ``as_args``. Servers without shares are left out.
    """
    by_server: dict[str, list[dict[str, str]]] = {}
    rows = tx.execute(
        sa.select(table)
        .where(table.c.server_id.in_(sorted(server_ids)))
        .order_by(table.c.created_at, table.c.uuid)
    ).all()
    for row in rows:
        by_server.setdefault(row.server_id, []).append(as_args(row))
    put(tx, [row.uuid for row in rows], ShareStatus.DETACHING)
    return by_server


def remove(tx: Connection, uuids: Sequence[str]) -> None:
    """Delete the mappings with these uuids. The caller reduces ``servers.shares``."""
    tx.execute(sa.delete(table).where(table.c.uuid.in_(uuids)))


def is_used(tx: Connection, share_id: str, access_to: str) -> bool:
    """Return True if a server needs the access rule of this share for this host's address.

    These are servers with a mapping in one of the statuses ``USING``.
    """
    return (
        tx.scalar(
            sa.select(table.c.uuid)
            .where(
                table.c.share_id == share_id,
                table.c.access_to == access_to,
                table.c.status.in_(USING),
            )
            .limit(1)
        )
        is not None
    )
