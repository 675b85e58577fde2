# SPDX-License-Identifier: Apache-2.0
"""Join tokens of hosts: the newest of each host, valid for an hour, usable once.

``kilonova host add`` calls ``invite``, and the conductors ``look`` and ``use``. The first user of a
token gets the host's keys. A single UPDATE decides that.
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
    """The state of a join token. OVER: the token has expired, and no machine has used it."""

    OPEN = "open"
    USED = "used"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class HostJoin:
    """A join token at the time ``at``. Times are in µs.

    address: the host's address, or "". until: the end of the token's validity. used_by: public key
    of the machine that has used the token, or None. is_heard: True if the host is up.
    """

    state: JoinState
    address: str
    at: int
    until: int
    used_by: str | None
    used_at: int | None
    is_heard: bool


def invite(tx: Connection, host: str, address: str) -> int:
    """Record a new join token of a host, and return the generation of the host's keys.

    The caller makes the token from this generation. Earlier keys and tokens of the host become
    invalid.

    Args:
        tx: The transaction.
        host: The name of the host.
        address: The address for the host's certificate, or "".

    Raises:
        Conflict: The host has a key, and has registered already.
    """
    is_new = host_keys.ensure(tx, host)
    if not is_new and tx.scalar(sa.select(hosts.c.name).where(hosts.c.name == host)) is not None:
        raise errors.Conflict(
            f"Host {host} has joined already. To create new keys, run: kilonova host rotate {host}. To join "
            f"a machine under this name again, run kilonova host remove {host}, then kilonova host add {host}"
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
    """Return the host's token for this generation of its keys, which may be used or expired.

    Raises:
        NotFound: The token was replaced, or the host was removed or has other keys.
    """
    row = tx.execute(
        sa.select(host_joins).where(
            host_joins.c.host == host, host_joins.c.generation == generation, _counts()
        )
    ).first()
    if row is None:
        raise errors.NotFound(
            f"This join token of host {host} is not valid any more. Create a new token: kilonova host add {host}"
        )
    at = moment(tx)
    state = JoinState.USED if row.used_by else JoinState.OVER if row.until <= at else JoinState.OPEN
    heard = services.is_up(tx, host)
    return HostJoin(state, row.address, at, row.until, row.used_by, row.used_at, heard)


def use(tx: Connection, host: str, generation: int, by: str) -> bool:
    """Record that the machine with the public key ``by`` uses the token, and return True.

    The machine may repeat the use until the token expires. Return False if another machine has used
    the token, the token has expired or was replaced, or the host was removed.
    """
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
    """Delete the host's token."""
    tx.execute(sa.delete(host_joins).where(host_joins.c.host == host))


def _counts() -> sa.ColumnElement[bool]:
    """Return the condition that the token belongs to the host's newest keys."""
    return sa.exists(sa.literal(1)).where(
        keys_table.c.host == host_joins.c.host,
        keys_table.c.generation == host_joins.c.generation,
    )
