# SPDX-License-Identifier: Apache-2.0
"""Which token lets which host join: the newest of each host, for an hour, once.

Used by ``kilonova host add`` (``invite``) and by the conductors (``look``, ``use``). Whoever uses
it first has the host's keys: one update decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.clock import SECOND
from common.store.engine import moment, now
from common.store.hosts import host_keys, services
from common.store.schema import host_joins, hosts
from common.store.schema import host_keys as keys_table

GOOD_SECONDS = 3600


class JoinState(StrEnum):
    """Of a token."""

    OPEN = "open"
    USED = "used"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class HostJoin:
    """How a token stands ``at`` a moment; moments are microseconds. ``is_heard``: the host is
    up."""

    state: JoinState
    address: str
    at: int
    until: int
    used_by: str | None
    used_at: int | None
    is_heard: bool


def invite(tx: Connection, host: str, address: str) -> int:
    """The host may join with keys of this generation, which is returned; keys that it was given
    before, and tokens, are worthless.

    Raises:
        Conflict: it has joined, with keys that count.
    """
    is_new = host_keys.ensure(tx, host)
    if not is_new and tx.scalar(sa.select(hosts.c.name).where(hosts.c.name == host)) is not None:
        raise errors.Conflict(
            f"Host {host} has joined. New keys: kilonova host rotate {host}; to let another machine be it, "
            f"or this one anew: kilonova host remove {host}, then add it"
        )
    if not is_new:
        host_keys.rotate(tx, host, 0)
    generation = int(
        tx.scalar(sa.select(keys_table.c.generation).where(keys_table.c.host == host)) or 0
    )
    forget(tx, host)
    tx.execute(
        sa.insert(host_joins).values(
            host=host,
            generation=generation,
            address=address,
            until=now() + GOOD_SECONDS * SECOND,
        )
    )
    return generation


def look(tx: Connection, host: str, generation: int) -> HostJoin:
    """How the token of these keys stands.

    Raises:
        NotFound: it was replaced, or its host was removed or has other keys.
    """
    row = tx.execute(
        sa.select(host_joins).where(
            host_joins.c.host == host, host_joins.c.generation == generation, _counts()
        )
    ).first()
    if row is None:
        raise errors.NotFound(
            f"This token does not count any more. Another one: kilonova host add {host}"
        )
    at = moment(tx)
    state = JoinState.USED if row.used_by else JoinState.OVER if row.until <= at else JoinState.OPEN
    heard = services.is_up(tx, host)
    return HostJoin(state, row.address, at, row.until, row.used_by, row.used_at, heard)


def use(tx: Connection, host: str, generation: int, by: str) -> bool:
    """The token is ``by``'s from now on; False: it is somebody else's, or over. Repeatable."""
    mine = sa.or_(host_joins.c.used_by == by, host_joins.c.used_by.is_(None))
    return bool(
        tx.execute(
            sa.update(host_joins)
            .where(
                host_joins.c.host == host,
                host_joins.c.generation == generation,
                host_joins.c.until > now(),
                mine,
                _counts(),
            )
            .values(used_by=by, used_at=sa.func.coalesce(host_joins.c.used_at, now()))
        ).rowcount
    )


def forget(tx: Connection, host: str) -> None:
    """No token lets it join."""
    tx.execute(sa.delete(host_joins).where(host_joins.c.host == host))


def _counts() -> sa.ColumnElement[bool]:
    """The host's newest keys are those of its token."""
    return sa.exists(sa.literal(1)).where(
        keys_table.c.host == host_joins.c.host,
        keys_table.c.generation == host_joins.c.generation,
    )
