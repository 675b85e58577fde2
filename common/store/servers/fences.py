# SPDX-License-Identifier: Apache-2.0
"""Fences that hosts know and the database does not: it has lost commits, by a fail-over or a
restore.

Called by the conductor with what hosts tell. A host refuses whatever is older than what it knows,
so the server's fence is raised above that, and with it the action that has the server and the debts
of its guests: they are then sent again, and count. The servers are locked by the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.statuses import GuestState
from common.store.engine import now
from common.store.schema import actions, guests, servers
from common.store.servers.actions import LIVE

log = logging.getLogger(__name__)


def believed(tx: Connection, reported: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """By server, the highest fence that a host tells to know (``told``, by server and host) which
    has something to do with it: the server is there, or a guest of it is or is to be removed, or an
    action waits for its command there."""
    if not reported:
        return {}
    named = sorted({server for server, _ in reported})
    query = sa.union(
        sa.select(servers.c.id.label("server"), servers.c.host.label("host")).where(
            servers.c.id.in_(named)
        ),
        sa.select(guests.c.server_id, guests.c.host).where(guests.c.server_id.in_(named)),
        sa.select(actions.c.server_id, actions.c.host).where(
            actions.c.server_id.in_(named), actions.c.state.in_(LIVE)
        ),
    )
    places = {(row.server, row.host) for row in tx.execute(query)}
    found: dict[str, int] = {}
    for (server, host), fence in reported.items():
        if (server, host) in places:
            found[server] = max(found.get(server, 0), min(fence, HIGHEST))
    return found


#: Beyond it is no fence that we ever gave: a host that tells a higher one must not use them up.
HIGHEST = 2**48


def rise_above(tx: Connection, known: Mapping[str, int]) -> bool:
    """``known``: server to the highest fence that some host knows. Whose own is not lower keeps it.
    Returns whether the database has lost commits."""
    lost = False
    query = sa.select(servers.c.id, servers.c.fence, servers.c.action).where(
        servers.c.id.in_(sorted(known))
    )
    rows = {row.id: row for row in tx.execute(query)}
    for server, reported in sorted(known.items()):
        row = rows.get(server)
        fence = row.fence if row is not None and row.fence >= reported else reported + 1
        if row is not None and row.fence < reported:
            lost = True
            log.warning(
                "a host knows fence %d of server %s, the database had only %d: it has lost commits; it goes on "
                "with %d",
                reported,
                server,
                row.fence,
                fence,
            )
            tx.execute(
                sa.update(servers)
                .where(servers.c.id == server)
                .values(fence=fence, updated_at=now())
            )
            tx.execute(
                sa.update(actions)
                .where(actions.c.id == row.action, actions.c.state.in_(LIVE))
                .values(fence=fence, updated_at=now())
            )
        tx.execute(
            sa.update(guests)
            .where(
                guests.c.server_id == server,
                guests.c.wanted == GuestState.ABSENT,
                guests.c.fence <= reported,
            )
            .values(fence=fence, sent_at=None)
        )
    return lost
