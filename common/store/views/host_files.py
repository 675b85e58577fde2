# SPDX-License-Identifier: Apache-2.0
"""Files of guests that hosts have without a guest: a folder that a removal has left, or all that a
lost commit has left of a server.

A host reports all of them when they change; they are kept as reported, and explained when somebody
asks. Of many it reports a page at a time, over and over; of those only what nothing explains is
kept. A record of a guest there explains them, since what it says comes true (a guest that
arrives, is kept, or is to be removed); so does a record on a host with the same storage, and an
action that has the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.hosts.hosts import FILES
from common.store.schema import guests, hosts, servers
from common.store.servers.guests import HERE


@dataclass(frozen=True, order=True)
class StrayFiles:
    """Files that nothing explains. ``is_spare``: their server was deleted, or its record says that
    its guest is on ``place``; else they may be all that is left of it."""

    server: str
    host: str
    is_spare: bool
    place: str | None = None


def note(
    tx: Connection, host: str, server_ids: Iterable[str], between: Sequence[str] | None = None
) -> list[str]:
    """Keep of which servers a host reports that it has files alone; returns those that nothing
    explains and that it had not reported before. ``between``: what these lie after, and up to what
    (empty: the end) they are all."""
    before = tx.scalar(sa.select(hosts.c.unclaimed).where(hosts.c.name == host)) or []
    files = sorted(set(server_ids))
    if between is not None:
        found = stray(tx, ((server, host) for server in files))
        files = [*_outside(before, *between), *(one.server for one in found)]
    unclaimed = [one for one in before if not one.startswith(FILES)]
    unclaimed += [FILES + server for server in files]
    if unclaimed == before:
        return []
    tx.execute(sa.update(hosts).where(hosts.c.name == host).values(unclaimed=unclaimed or None))
    found = stray(tx, ((server, host) for server in files if FILES + server not in before))
    return [one.server for one in found]


def _outside(before: Iterable[str], after: str, through: str) -> list[str]:
    """What a host reported before of files that a page says nothing of."""
    files = (one.removeprefix(FILES) for one in before if one.startswith(FILES))
    return [one for one in files if one <= after or (through and one > through)]


def reported(tx: Connection) -> list[tuple[str, str]]:
    """What hosts have reported: server and host."""
    return [
        (entry.removeprefix(FILES), row.name)
        for row in tx.execute(_REPORTED)
        for entry in row.unclaimed
        if entry.startswith(FILES)
    ]


_REPORTED = sa.select(hosts.c.name, hosts.c.unclaimed).where(hosts.c.unclaimed.is_not(None))


def stray(tx: Connection, found: Iterable[tuple[str, str]]) -> list[StrayFiles]:
    """Of these files (server and host) those that nothing explains."""
    pairs = sorted(set(found))
    if not pairs:
        return []
    names = sorted({server for server, _ in pairs})
    places: dict[str, dict[str, str]] = {}
    for guest in tx.execute(sa.select(guests).where(guests.c.server_id.in_(names))):
        places.setdefault(guest.server_id, {})[guest.host] = guest.wanted
    known = {row.id: row for row in tx.execute(sa.select(servers).where(servers.c.id.in_(names)))}
    storage = {
        row.name: (row.facts or {}).get("storage")
        for row in tx.execute(sa.select(hosts.c.name, hosts.c.facts))
    }
    left = []
    for server, host in pairs:
        recorded, row = places.get(server, {}), known.get(server)
        shared = storage.get(host) and storage[host] in map(storage.get, recorded)
        if host in recorded or shared or (row is not None and row.action is not None):
            continue
        if row is None:
            left.append(StrayFiles(server, host, False))
        else:
            has_guest = recorded.get(row.host or "") in HERE
            place = row.host if has_guest and not row.deleted else None
            left.append(StrayFiles(server, host, has_guest or bool(row.deleted), place))
    return left
