# SPDX-License-Identifier: Apache-2.0
"""Server groups: servers that a policy places together or apart.

The API calls this file, and claims call ``lock_hard``, because a hard policy is a guarantee. A
server joins in the transaction that creates it. The guest records contain the hosts of members.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids
from common.domain.statuses import GuestState
from common.store.engine import for_update, is_there, notification_settings, now
from common.store.notifications import outbox
from common.store.rows import ServerGroupRow, Values
from common.store.schema import guests, server_group_members, server_groups, servers

AFFINITY, ANTI_AFFINITY = "affinity", "anti-affinity"
#: Returns True if this new row was committed.
is_made = is_there(server_groups)


@dataclass
class Hard:
    """A server group with a hard policy: affinity or anti-affinity.

    most: maximum of its servers per host. members: (server, host) of each present or planned guest.
    """

    policy: str
    most: int = 1
    members: list[tuple[str, str]] = field(default_factory=list)

    def allows(self, server: str, host: str) -> bool:
        """Return True if the other members permit this server on this host."""
        others = [where for member, where in self.members if member != server]
        if self.policy == AFFINITY:
            # A server has two hosts while it moves.
            return all(where == host for where in others)
        return others.count(host) < self.most


def page(
    tx: Connection, project_id: str | None, limit: int, offset: int = 0
) -> list[ServerGroupRow]:
    """Return one page of the server groups of a project (None: of all projects), oldest first."""
    query = sa.select(server_groups).order_by(server_groups.c.created_at, server_groups.c.id)
    if project_id is not None:
        query = query.where(server_groups.c.project_id == project_id)
    return list(tx.execute(query.limit(limit).offset(offset)))


def members(tx: Connection, groups: Iterable[str]) -> dict[str, list[str]]:
    """Return group id -> ids of members that are not deleted, oldest first, in one statement."""
    found: dict[str, list[str]] = {group: [] for group in groups}
    rows = tx.execute(
        sa.select(server_group_members.c.group_id, server_group_members.c.server_id)
        .join(servers, servers.c.id == server_group_members.c.server_id)
        .where(server_group_members.c.group_id.in_(list(found)), servers.c.deleted == 0)
        .order_by(servers.c.created_at, servers.c.id)
    )
    for group, server in rows:
        found[group].append(server)
    return found


def show(tx: Connection, group: str, project_id: str | None = None) -> ServerGroupRow:
    """Return a server group of the project, or of any project for None.

    Raises:
        NotFound: The group does not exist in the project.
    """
    query = sa.select(server_groups).where(server_groups.c.id == group)
    if project_id is not None:
        query = query.where(server_groups.c.project_id == project_id)
    row = tx.execute(query).first()
    if row is None:
        raise errors.NotFound(f"Instance group {group} could not be found.")
    return row


def create(tx: Connection, values: Values) -> ServerGroupRow:
    """Insert a group, with the id in ``values`` or a new one, and its notice. Return the row."""
    group = values.get("id") or ids.new()
    tx.execute(sa.insert(server_groups).values(created_at=now()), {**values, "id": group})
    _tell(tx, "server_group.create", [group])
    return show(tx, group)


def delete(tx: Connection, group: str) -> None:
    """Delete a server group, if it exists. The servers stay.

    The group's row is deleted before the memberships. A transaction in which servers join either
    has locked the group already, or does not find the group.
    """
    _tell(tx, "server_group.delete", [group])
    tx.execute(sa.delete(server_groups).where(server_groups.c.id == group))
    tx.execute(sa.delete(server_group_members).where(server_group_members.c.group_id == group))


def lock(tx: Connection, groups: Iterable[str]) -> set[str]:
    """Lock these groups in ascending order, and return the ids of those that exist.

    Why: no group can be deleted while the caller's servers join.
    """
    query = (
        sa.select(server_groups.c.id)
        .where(server_groups.c.id.in_(sorted(groups)))
        .order_by(server_groups.c.id)
    )
    return set(tx.scalars(for_update(query)))


_HARD = (
    sa.select(server_groups.c.id, server_groups.c.policy, server_groups.c.rules)
    .where(server_groups.c.policy.in_((AFFINITY, ANTI_AFFINITY)))
    .order_by(server_groups.c.id)
)
_HARD_OF = _HARD.where(server_groups.c.id.in_(sa.bindparam("groups", expanding=True)))


def hard(
    tx: Connection, groups: Iterable[str] | None = None, *, locked: bool = False
) -> dict[str, Hard]:
    """Return the groups with a hard policy by id, with the hosts of their members.

    Args:
        tx: The transaction.
        groups: Only these groups. None: all groups.
        locked: Lock the groups in ascending order.
    """
    query = _HARD if groups is None else _HARD_OF
    wanted = {} if groups is None else {"groups": sorted(groups)}
    found = {
        row.id: Hard(row.policy, int((row.rules or {}).get("max_server_per_host", 1)))
        for row in tx.execute(for_update(query) if locked else query, wanted)
    }
    if not found:
        return {}
    places = (
        sa.select(server_group_members.c.group_id, guests.c.server_id, guests.c.host)
        .join(guests, guests.c.server_id == server_group_members.c.server_id)
        .where(guests.c.wanted != GuestState.ABSENT)
    )
    if groups is not None:
        places = places.where(server_group_members.c.group_id.in_(sorted(found)))
    for row in tx.execute(places):
        if row.group_id in found:
            found[row.group_id].members.append((row.server_id, row.host))
    return found


def lock_hard(tx: Connection, groups: Iterable[str]) -> dict[str, Hard]:
    """Lock the groups with a hard policy among these, and return them by id, as ``hard``.

    Other claims for servers of the groups wait. Without groups there is no statement.
    """
    wanted = set(groups)
    return hard(tx, wanted, locked=True) if wanted else {}


def join(tx: Connection, rows: list[dict[str, str]]) -> None:
    """Insert memberships. Each row has group_id and server_id. The caller has locked the groups."""
    if rows:
        tx.execute(sa.insert(server_group_members), rows)
        _tell(tx, "server_group.add_member", {row["group_id"] for row in rows})


def _tell(tx: Connection, event: str, groups: Iterable[str]) -> None:
    """Write a notice for each existing group with its members, if notifications are on."""
    if notification_settings(tx) is None:
        return
    there = members(tx, groups)
    for row in tx.execute(
        sa.select(server_groups).where(server_groups.c.id.in_(sorted(groups)))
    ).mappings():
        outbox.tell(tx, row["id"], {**row, "members": there.get(row["id"], [])}, event)
