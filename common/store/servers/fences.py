# SPDX-License-Identifier: Apache-2.0
"""Repair fences after the database has lost commits, by a fail-over or a restore.

The conductor calls this with the fences that hosts report. A host refuses commands with a lower
fence than its own. Therefore the server's fence is raised above the host's, together with the
fences of the running action and of the pending cleanups. They are then sent again and accepted. The
caller has locked the servers.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.statuses import GuestState
from common.service.log import get_logger
from common.store.engine import now
from common.store.schema import actions, guests, servers
from common.store.servers.actions import LIVE

log = get_logger(__name__)


def select_credible(tx: Connection, reported: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return by server the highest reported fence, from hosts that are related to the server.

    A host is related if the server is on it, if the server has a guest record there, or if the
    command of a running action of the server is there. Other reports are ignored. A fence above
    ``HIGHEST`` counts as ``HIGHEST``.

    Args:
        tx: The transaction.
        reported: (server, host) -> fence.
    """
    if not reported:
        return {}
    server_ids = sorted({server for server, _ in reported})
    query = sa.union(
        sa.select(servers.c.id.label("server"), servers.c.host.label("host")).where(
            servers.c.id.in_(server_ids)
        ),
        sa.select(guests.c.server_id, guests.c.host).where(guests.c.server_id.in_(server_ids)),
        sa.select(actions.c.server_id, actions.c.host).where(
            actions.c.server_id.in_(server_ids), actions.c.state.in_(LIVE)
        ),
    )
    places = {(row.server, row.host) for row in tx.execute(query)}
    fences: dict[str, int] = {}
    for (server, host), fence in reported.items():
        if (server, host) in places:
            fences[server] = max(fences.get(server, 0), min(fence, HIGHEST))
    return fences


#: Limit of accepted fences, far above every fence in use. A host with a higher fence must not use
#: up the numbers.
HIGHEST = 2**48


def rise_above(tx: Connection, reported_fences: Mapping[str, int]) -> bool:
    """Raise the fences of these servers, and of their running actions, above those of hosts.

    A server with a higher or equal fence keeps its own. Pending cleanups of these servers with a
    fence up to the reported one get the server's fence, or for a server without a row the next
    higher number, and are sent again.

    Args:
        tx: The transaction.
        reported_fences: Server -> highest fence that a host reports.

    Returns:
        True if the fence of a server was lower than a host's, so the database has lost commits.
    """
    has_lost_commits = False
    query = sa.select(servers.c.id, servers.c.fence, servers.c.action).where(
        servers.c.id.in_(sorted(reported_fences))
    )
    rows = {row.id: row for row in tx.execute(query)}
    for server, reported in sorted(reported_fences.items()):
        row = rows.get(server)
        fence = row.fence if row is not None and row.fence >= reported else reported + 1
        if row is not None and row.fence < reported:
            has_lost_commits = True
            log.warning(
                "a host reports a higher fence of a server than the database, which has lost "
                "commits: the fence is raised",
                server=server,
                reported=reported,
                stored=row.fence,
                fence=fence,
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
    return has_lost_commits
