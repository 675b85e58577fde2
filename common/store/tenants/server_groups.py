# SPDX-License-Identifier: Apache-2.0
"""Server groups: servers that a policy wants together or apart.

Called by the API, and ``lock_hard`` by the claim, because a hard policy is a guarantee. A server
joins in the transaction that creates it; where it is, its guest records say.
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
#: Was this new row committed?
is_made = is_there(server_groups)


@dataclass
class Hard:
    """A group whose policy is a guarantee. most: its servers that one host may have. members:
    (server, host), each where a guest of a member is or is about to be."""

    policy: str
    most: int = 1
    members: list[tuple[str, str]] = field(default_factory=list)

    def allows(self, server: str, host: str) -> bool:
        """May this server be on this host, as far as the others are concerned?"""
        others = [where for member, where in self.members if member != server]
        if self.policy == AFFINITY:
            # one that moves is in two places until it has moved
            return all(where == host for where in others)
        return others.count(host) < self.most


def page(
    tx: Connection, project_id: str | None, limit: int, offset: int = 0
) -> list[ServerGroupRow]:
    """The groups of a project (None: of all), oldest first."""
    query = sa.select(server_groups).order_by(server_groups.c.created_at, server_groups.c.id)
    if project_id is not None:
        query = query.where(server_groups.c.project_id == project_id)
    return list(tx.execute(query.limit(limit).offset(offset)))


def members(tx: Connection, groups: Iterable[str]) -> dict[str, list[str]]:
    """Group to the ids of its servers that still exist; one query."""
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
    """One group, if it belongs to the project (None: any). Raises NotFound."""
    query = sa.select(server_groups).where(server_groups.c.id == group)
    if project_id is not None:
        query = query.where(server_groups.c.project_id == project_id)
    row = tx.execute(query).first()
    if row is None:
        raise errors.NotFound(f"Instance group {group} could not be found.")
    return row


def create(tx: Connection, values: Values) -> ServerGroupRow:
    """Insert {project_id, user_id, name, policy, rules}, and the id when the caller has made
    one."""
    group = values.get("id") or ids.new()
    tx.execute(sa.insert(server_groups).values(created_at=now()), {**values, "id": group})
    _tell(tx, "server_group.create", [group])
    return show(tx, group)


def delete(tx: Connection, group: str) -> None:
    """Remove a group; its servers stay. The group goes first: whoever joins has it locked, or finds
    it gone."""
    _tell(tx, "server_group.delete", [group])
    tx.execute(sa.delete(server_groups).where(server_groups.c.id == group))
    tx.execute(sa.delete(server_group_members).where(server_group_members.c.group_id == group))


def lock(tx: Connection, groups: Iterable[str]) -> set[str]:
    """Lock these groups, ascending, so that none goes while servers join; those that exist."""
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
    """Those of these groups (None: of all) whose policy is hard, with the places of their
    members."""
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
    """Lock those of these groups whose policy is hard, in ascending order: no other claim of theirs
    goes on meanwhile. No statement when there are none to ask for."""
    wanted = set(groups)
    return hard(tx, wanted, locked=True) if wanted else {}


def join(tx: Connection, rows: list[dict[str, str]]) -> None:
    """Insert memberships: {group_id, server_id}."""
    if rows:
        tx.execute(sa.insert(server_group_members), rows)
        _tell(tx, "server_group.add_member", {row["group_id"] for row in rows})


def _tell(tx: Connection, event: str, groups: Iterable[str]) -> None:
    """Of each of these groups, with its members."""
    if notification_settings(tx) is None:
        return
    there = members(tx, groups)
    for row in tx.execute(
        sa.select(server_groups).where(server_groups.c.id.in_(sorted(groups)))
    ).mappings():
        outbox.tell(tx, row["id"], {**row, "members": there.get(row["id"], [])}, event)


def of_server(tx: Connection, server_id: str) -> list[str]:
    """The ids of the groups that a server is in: none or one."""
    return list(
        tx.scalars(
            sa.select(server_group_members.c.group_id).where(
                server_group_members.c.server_id == server_id
            )
        )
    )
