# SPDX-License-Identifier: Apache-2.0
"""Files of guests on hosts that have no such guest, for example after a lost commit.

A host reports its files when they change. Reports are stored as they are, and explained when an
operator reads them. A host with many files reports pages, again and again, and only unexplained
files of those are stored. Files are explained by a guest record on the host, by a guest record on a
host with the same storage, or by a running action of the server.
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
    """Unexplained files of a server on ``host``.

    ``is_spare`` is True if the server is deleted, or has its guest on another host. Otherwise these
    may be the only files of the server. ``place`` is that other host, or None.
    """

    server: str
    host: str
    is_spare: bool
    place: str | None = None


def note(
    tx: Connection, host: str, server_ids: Iterable[str], between: Sequence[str] | None = None
) -> list[str]:
    """Replace the stored servers of which a host reports files without a guest.

    Of a page, only servers with unexplained files are stored, and other pages stay.

    Args:
        tx: The transaction.
        host: Name of the host.
        server_ids: Ids of the servers of which the host has files.
        between: The range of a page: after the first id, up to the second, which is "" at the end.
            ``server_ids`` are all ids of the range. None: all ids of the host.

    Returns:
        The servers whose files are unexplained and were not stored before.
    """
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
    """Return the servers of stored files that are not after ``after`` and up to ``through``.

    ``through`` is "" at the end.
    """
    files = (one.removeprefix(FILES) for one in before if one.startswith(FILES))
    return [one for one in files if one <= after or (through and one > through)]


def list_reported(tx: Connection) -> list[tuple[str, str]]:
    """Return (server, host) of all stored files, whether explained or not."""
    return [
        (entry.removeprefix(FILES), row.name)
        for row in tx.execute(_REPORTED)
        for entry in row.unclaimed
        if entry.startswith(FILES)
    ]


_REPORTED = sa.select(hosts.c.name, hosts.c.unclaimed).where(hosts.c.unclaimed.is_not(None))


def stray(tx: Connection, found: Iterable[tuple[str, str]]) -> list[StrayFiles]:
    """Return the files that are unexplained now, of these (server, host) pairs, sorted.

    Files are explained by a guest record on the host or on a host with the same storage, or by a
    running action of the server.
    """
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
