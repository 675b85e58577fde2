# SPDX-License-Identifier: Apache-2.0
"""Shares of servers: which share a server has, by which tag, and how far it is.

The API begins what changes them, the conductor's workflows write what becomes of it.
``servers.shares`` counts a server's rows and is changed with them under the server's lock, so that
nobody else asks this table. Whether a share is active is not kept: an attached one is while its
server runs. An access rule at the share service is of a share and of a host's address
(``access_to``); servers of one host need the same one.
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

#: A mapping in one of these needs the access rule of its share and host.
USING = (ShareStatus.ATTACHING, ShareStatus.INACTIVE)
#: What a host needs for a guest with a share: the device, and memory that the device's process can
#: see.
TRAITS = ("COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE")


def list_of(tx: Connection, server_id: str) -> list[ShareMappingRow]:
    """A server's, the oldest first."""
    return list(
        tx.execute(
            sa.select(table)
            .where(table.c.server_id == server_id)
            .order_by(table.c.created_at, table.c.uuid)
        )
    )


def ids_of(tx: Connection, servers: Iterable[ServerRow]) -> dict[str, list[str]]:
    """The ids of the shares of these servers, by server; nobody is asked when they have none."""
    having = sorted(row.id for row in servers if row.shares)
    found: dict[str, list[str]] = {}
    for row in tx.execute(_OF_SERVERS, {"ids": having}) if having else ():
        found.setdefault(row.server_id, []).append(row.share_id)
    return found


_OF_SERVERS = (
    sa.select(table.c.server_id, table.c.share_id)
    .where(table.c.server_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(table.c.created_at, table.c.uuid)
)


def show(tx: Connection, server_id: str, share_id: str) -> ShareMappingRow:
    """One of a server's. Raises NotFound."""
    found = tx.execute(
        sa.select(table).where(table.c.server_id == server_id, table.c.share_id == share_id)
    ).first()
    if found is None:
        raise errors.NotFound(f"Share {share_id} could not be found.")
    return found


def attach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    share: Mapping[str, str],
) -> str:
    """Let the action that attaches a share take the server; returns the action's id. ``share``: its
    share_id, tag, protocol and export_location; the action's args get them, with the mapping's uuid
    and the host's address.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``.
        Conflict: the server has the share or the tag already, or its host cannot give guests any.
    """
    found = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, found, context, tx)
    alike = sa.or_(table.c.share_id == share["share_id"], table.c.tag == share["tag"])
    if (
        tx.execute(sa.select(table.c.uuid).where(table.c.server_id == server_id, alike)).first()
        is not None
    ):
        raise errors.Conflict(
            f"Share '{share['share_id']}' or tag '{share['tag']}' already associated to this server."
        )
    values = {**share, "uuid": ids.new(), "access_to": _address(tx, found.host)}
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


def _address(tx: Connection, host: str | None) -> str:
    """The address from which a host mounts shares, if it can give them to guests."""
    found = tx.execute(
        sa.select(hosts.c.host_ip, hosts.c.traits, hosts.c.facts).where(hosts.c.name == host)
    ).first()
    if found is None:
        raise errors.Conflict("The server is on no host that could mount a share.")
    missing = [trait for trait in TRAITS if trait not in found.traits]
    if missing:
        raise errors.Conflict(
            "Feature not supported because the server's host is not configured for it: it lacks "
            f"{' and '.join(missing)}."
        )
    return str((found.facts or {}).get("share_address") or found.host_ip)


def detach(
    tx: Connection,
    row: states.Action,
    server_id: str,
    *,
    context: RequestContext,
    project_id: str | None,
    share_id: str,
) -> str:
    """Let the action that detaches a share take the server; returns the action's id. Its args get
    the share, and as ``was`` how far it was.

    Raises:
        NotFound, Locked, WrongState, Busy: as ``actions.begin``. NotFound: the server does not have
        the share.
    """
    found = actions.take_lock(tx, server_id, project_id)
    actions.check(row, server_id, found, context, tx)
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
    """A mapping as the actions and commands about it carry it."""
    return {
        name: getattr(mapping, name)
        for name in ("uuid", "share_id", "tag", "protocol", "export_location", "access_to")
    }


def put(tx: Connection, uuids: Sequence[str], status: ShareStatus) -> None:
    """Write how far these are."""
    tx.execute(
        sa.update(table).where(table.c.uuid.in_(uuids)).values(status=status, updated_at=now())
    )


def leaving(tx: Connection, server_ids: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """All shares of these servers, which are deleted, are on their way out; as args, by server."""
    found: dict[str, list[dict[str, str]]] = {}
    rows = tx.execute(
        sa.select(table)
        .where(table.c.server_id.in_(sorted(server_ids)))
        .order_by(table.c.created_at, table.c.uuid)
    ).all()
    for row in rows:
        found.setdefault(row.server_id, []).append(as_args(row))
    put(tx, [row.uuid for row in rows], ShareStatus.DETACHING)
    return found


def remove(tx: Connection, uuids: Sequence[str]) -> None:
    """Forget these; their servers' rows are changed by the caller."""
    tx.execute(sa.delete(table).where(table.c.uuid.in_(uuids)))


def is_used(tx: Connection, share_id: str, access_to: str) -> bool:
    """Does a server need the rule that lets this address mount the share?"""
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
