# SPDX-License-Identifier: Apache-2.0
"""Generations of host keys (``common.security.host_keys``). The keys themselves are not stored.

Messages of a host without a row are refused. ``kilonova host add``, ``rotate`` and ``remove`` write
the rows.

Invariant: a generation of a host is never used twice, even after a removal. So old keys of a
removed host are useless for a new host with the same name.
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
    """Return the valid generations of each host with a key, in one statement."""
    return {row.host: Generations(row.generation, bool(row.both)) for row in tx.execute(_ALL)}


def add(tx: Connection, host: str) -> None:
    """Create the host's first key.

    Raises:
        Conflict: The host has a key.
    """
    if not ensure(tx, host):
        raise errors.Conflict(
            f"Host {host} has a key already. To create a new key, run: kilonova host rotate {host}"
        )


def ensure(tx: Connection, host: str) -> bool:
    """Create the host's first key unless the host has a key, and return True if created.

    The generation is the current time in µs, which is greater than all earlier generations.
    """
    return insert_ignore(tx, host_keys, {"host": host, "generation": now(), "changed_at": now()})


def rotate(tx: Connection, host: str, seconds: int) -> None:
    """Create a new key. The previous key stays valid for ``seconds``, or ends at once for 0.

    Keys before the previous key end at once.

    Raises:
        NotFound: The host has no key.
    """
    until: Any = now() + seconds * SECOND if seconds else None
    if not tx.execute(
        sa.update(host_keys)
        .where(host_keys.c.host == host)
        .values(generation=host_keys.c.generation + 1, previous_until=until, changed_at=now())
    ).rowcount:
        raise errors.NotFound(
            f"Host {host} has no key. To create the first key, run: kilonova host add {host}"
        )


def remove(tx: Connection, host: str) -> bool:
    """Delete the host's keys, and return True if there were any."""
    return bool(tx.execute(sa.delete(host_keys).where(host_keys.c.host == host)).rowcount)


def of_all(store: Store, conf: cfg.ConfigOpts) -> AllKeys:
    """Return the source of all hosts' keys, for the purposes whose secret this process has.

    The source reads the generations from the database.
    """
    return AllKeys(
        {
            Purpose.COMMAND: conf.host_keys.command_secret,
            Purpose.QUERY: conf.host_keys.query_secret,
        },
        lambda: store.read(generations),
        Clock(),
    )
