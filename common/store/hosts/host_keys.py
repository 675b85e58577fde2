# SPDX-License-Identifier: Apache-2.0
"""Which keys of hosts count: the generation of each (``common.security.host_keys``). No key is
here.

A host without a row is not heard. ``kilonova host add``, ``rotate`` and ``remove`` write the rows.
Must stay true: no generation of a host ever comes again, also when the host was removed in between;
so keys of a host that was removed open nothing of one that is added by the same name.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.clock import SECOND, Clock
from common.security.host_keys import AllKeys, Generations, Purpose
from common.store.engine import Store, insert_ignore, now
from common.store.schema import host_keys

_ALL = sa.select(
    host_keys.c.host, host_keys.c.generation, (host_keys.c.previous_until > now()).label("both")
)


def generations(tx: Connection) -> dict[str, Generations]:
    """Of every host that has a key; one statement."""
    return {row.host: Generations(row.generation, bool(row.both)) for row in tx.execute(_ALL)}


def add(tx: Connection, host: str) -> None:
    """The host's first key counts from now on.

    Raises:
        Conflict: it has one.
    """
    if not ensure(tx, host):
        raise errors.Conflict(
            f"Host {host} has a key; a new one is made by: kilonova host rotate {host}"
        )


def ensure(tx: Connection, host: str) -> bool:
    """The host's first key counts, unless it has one; returns whether it had none. Its generation
    is the moment, in microseconds: greater than any that a host of this name had before."""
    return insert_ignore(tx, host_keys, {"host": host, "generation": now(), "changed_at": now()})


def rotate(tx: Connection, host: str, seconds: int) -> None:
    """A new key counts from now on, and the one before for so many seconds.

    Raises:
        NotFound: it has none.
    """
    until: Any = now() + seconds * SECOND if seconds else None
    if not tx.execute(
        sa.update(host_keys)
        .where(host_keys.c.host == host)
        .values(generation=host_keys.c.generation + 1, previous_until=until, changed_at=now())
    ).rowcount:
        raise errors.NotFound(
            f"Host {host} has no key; its first one is made by: kilonova host add {host}"
        )


def remove(tx: Connection, host: str) -> bool:
    """No key of the host counts any more; returns whether one did."""
    return bool(tx.execute(sa.delete(host_keys).where(host_keys.c.host == host)).rowcount)


def of_all(store: Store, conf: cfg.ConfigOpts) -> AllKeys:
    """The keys of all hosts, for those purposes for which this process has the secret."""
    return AllKeys(
        {
            Purpose.COMMAND: conf.host_keys.command_secret,
            Purpose.QUERY: conf.host_keys.query_secret,
        },
        lambda: store.read(generations),
        Clock(),
    )
