# SPDX-License-Identifier: Apache-2.0
"""States and times because of which no process would ever continue a row.

A resting state needs no action, and all others need one. A time far in the future was written with
a wrong clock, because all of Kilonova's intervals are shorter.

Called by ``doctor.check``. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import states
from common.domain.clock import SECOND
from common.domain.statuses import ActionState, GuestState, ShareStatus
from common.store import cleanups as pending
from common.store.engine import moment, now
from common.store.rows import GuestRow, ServerRow
from common.store.schema import (
    actions,
    block_devices,
    cleanups,
    host_actions,
    leases,
    server_group_members,
    server_groups,
    share_mappings,
)
from common.store.servers.actions import LIVE
from common.store.servers.guests import HERE
from deploy.operator.doctor.finding import Finding

#: Longer than any lease of Kilonova.
AHEAD = 3600 * SECOND
#: Longer than any pause of a pending cleanup.
FAR_AHEAD = 24 * 3600 * SECOND
#: States of servers with a guest on their host. A server in ERROR may have none.
WITH_DOMAIN = (
    states.ACTIVE,
    states.STOPPED,
    states.PAUSED,
    states.SUSPENDED,
    states.RESCUED,
    states.RESIZED,
)
#: States that end after a time, and the column with their beginning.
_RESTING = {states.SHELVED: "shelved_at", states.SOFT_DELETED: "soft_deleted_at"}

# Queries are built once, because monitoring runs the checks often.
_UNSENT = sa.and_(
    actions.c.state == ActionState.WAITING,
    sa.or_(actions.c.host.is_(None), actions.c.sent_at.is_(None)),
)
_LEASED = sa.and_(actions.c.state == ActionState.DUE, actions.c.lease_until > now() + AHEAD)
_LOST = sa.select(actions.c.id, actions.c.server_id, actions.c.state, actions.c.workflow).where(
    actions.c.state.in_(LIVE), sa.or_(_UNSENT, _LEASED)
)
#: Servers whose root disk is a volume.
_ON_VOLUMES = sa.select(block_devices.c.server_id).where(block_devices.c.boot_index == 0)
_CLEANUPS = sa.select(cleanups).where(cleanups.c.due_at > now() + FAR_AHEAD)
_DUTIES = sa.select(leases).where(leases.c.until > now() + AHEAD)
_HOST_ACTIONS = sa.select(host_actions.c.id, host_actions.c.host, host_actions.c.name).where(
    host_actions.c.open_host.is_not(None), host_actions.c.locked_until > now() + AHEAD
)
_IN_TRANSIT = sa.select(share_mappings).where(
    share_mappings.c.status.in_((ShareStatus.ATTACHING, ShareStatus.DETACHING))
)
_NO_GROUP = (
    sa.select(server_group_members.c.group_id, sa.func.count().label("number"))
    .where(server_group_members.c.group_id.not_in(sa.select(server_groups.c.id)))
    .group_by(server_group_members.c.group_id)
)


def check(
    tx: Connection, live: Mapping[str, ServerRow], records: Sequence[GuestRow]
) -> Iterator[Finding]:
    """Yield a finding for each state or time because of which a row would never continue.

    The rows are servers, guest removals, actions, shares, group members, leases of host actions and
    duties, and pending cleanups.

    Args:
        tx: The transaction.
        live: The servers that are not deleted, by id.
        records: All guest records.
    """
    yield from _servers(tx, live, records)
    yield from _removals(moment(tx), records)
    yield from _actions(tx)
    yield from _shares(tx, live)
    for row in tx.execute(_NO_GROUP):
        yield Finding("group-member", row.group_id, f"is deleted, but has {row.number} members")
    for row in tx.execute(_HOST_ACTIONS):
        yield Finding(
            "due",
            row.host,
            f"a conductor's lease of its {row.name} ends more than an hour from now",
            "host-action-lease",
            (row.id,),
        )
    for row in tx.execute(_CLEANUPS):
        yield Finding(
            "due",
            row.server_id,
            f"pending cleanup {row.id}, {pending.describe(row)}, is due more than a day from now",
            "cleanup",
            (str(row.id),),
        )
    for row in tx.execute(_DUTIES):
        yield Finding(
            "due",
            row.name,
            f"the lease of this duty by {row.owner} ends more than an hour from now",
            "duty",
        )


def _servers(
    tx: Connection, live: Mapping[str, ServerRow], records: Sequence[GuestRow]
) -> Iterator[Finding]:
    """Yield findings about lock owners, and about the states of servers without an action.

    A locked server has a lock owner, and any other server has no owner. A server without an action
    is not BUILDING. Such a server has a host in the states ``WITH_DOMAIN``, an image, a guest or a
    root volume in SHELVED_OFFLOADED, and the time of the change in SHELVED and SOFT_DELETED.
    """
    has_disk = {row.server_id for row in records if row.wanted in HERE}
    has_disk |= set(tx.scalars(_ON_VOLUMES))
    for row in live.values():
        if bool(row.locked) != (row.locked_by is not None):
            yield Finding(
                "server-lock",
                row.id,
                "is locked without an owner"
                if row.locked
                else f"is not locked, but has the lock owner {row.locked_by}",
                "lock",
            )
        if row.action is not None:
            continue
        if row.vm_state == states.BUILDING:
            yield Finding("server-state", row.id, "is BUILDING without an action", "building-idle")
        if row.vm_state in WITH_DOMAIN and row.host is None:
            yield Finding("server-state", row.id, f"is {row.vm_state} on no host", "nowhere")
        if (
            row.vm_state == states.SHELVED_OFFLOADED
            and row.shelved_image_id is None
            and row.id not in has_disk
        ):
            yield Finding(
                "server-state",
                row.id,
                f"is {row.vm_state} and has neither image nor guest",
                "shelved-without-image",
            )
        since = _RESTING.get(row.vm_state)
        if since and getattr(row, since) is None:
            yield Finding(
                "server-state",
                row.id,
                f"is {row.vm_state}, but {since} is not set",
                "resting-since",
            )


def _removals(at: int, records: Sequence[GuestRow]) -> Iterator[Finding]:
    """Yield a finding for each guest removal with a send time more than an hour after ``at``.

    The conductor would not repeat the command before that time.

    Args:
        at: The present time of the database, in µs.
        records: All guest records.
    """
    for row in records:
        if row.wanted == GuestState.ABSENT and (row.sent_at or 0) > at + AHEAD:
            yield Finding(
                "removal",
                row.server_id,
                f"host {row.host} has a command to remove its guest that was sent more than an hour in the future",
                "removal-sent",
                (row.host,),
            )


def _actions(tx: Connection) -> Iterator[Finding]:
    """Yield a finding for each waiting action whose command has no host or no send time.

    Also yield a finding for each due action with a lease that ends more than an hour from now.
    """
    for row in tx.execute(_LOST):
        waits = row.state == ActionState.WAITING
        yield Finding(
            "due",
            row.server_id,
            f"{row.workflow} waits for a command that was never sent"
            if waits
            else f"a conductor's lease of {row.workflow} ends more than an hour from now",
            "never-sent" if waits else "lease-of-action",
            (row.id,),
        )


def _shares(tx: Connection, live: Mapping[str, ServerRow]) -> Iterator[Finding]:
    """Yield a finding for each share that is being attached or detached without an action.

    Shares of servers that are not in ``live`` are left out.
    """
    for row in tx.execute(_IN_TRANSIT):
        server = live.get(row.server_id)
        if server is not None and server.action is None:
            yield Finding(
                "share-in-transit",
                row.server_id,
                f"its share {row.share_id} is {row.status}, but the server has no action",
                facts=(row.uuid,),
            )
