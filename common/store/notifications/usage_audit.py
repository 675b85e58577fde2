# SPDX-License-Identifier: Apache-2.0
"""The usage audit: one notification instance.exists for each server that ran in a past period.

The row of this duty in ``leases`` holds the progress: ``until`` is the end of the period, ``owner``
the last server, or ``DONE``. Each step updates the row together with its notices, in one
transaction. So each server is notified once, with several conductors and after crashes.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import states
from common.notifications.events import Notice
from common.notifications.periods import Periods
from common.store.engine import for_update, insert_ignore, moment
from common.store.notifications import outbox
from common.store.schema import leases, servers

NAME, DONE = "usage_audit", "done"
AT_ONCE = 200
_MINE = sa.select(leases.c.owner, leases.c.until).where(leases.c.name == NAME)
_S = servers.c
#: Servers per step. Many were deleted long before the period.
LOOKED_AT = 1000
#: A server that left its host without being deleted used no resources.
NEXT = (
    sa.select(
        _S.id,
        sa.and_(
            _S.launched_at < sa.bindparam("end"),
            sa.or_(_S.terminated_at.is_(None), _S.terminated_at > sa.bindparam("begin")),
            sa.or_(_S.deleted != 0, _S.vm_state != states.SHELVED_OFFLOADED),
        ).label("ran"),
    )
    .where(_S.id > sa.bindparam("after"))
    .order_by(_S.id)
    .limit(LOOKED_AT)
)


def is_done(tx: Connection, periods: Periods) -> bool:
    """Return True if all notices of the last complete period are written."""
    row = tx.execute(_MINE).first()
    return row is not None and row.owner == DONE and row.until >= periods.last(moment(tx))[1]


def step(tx: Connection, periods: Periods) -> bool:
    """Write instance.exists for the next servers that ran in the period, at most ``AT_ONCE``.

    Servers come in the order of their ids. The period is the last complete one, but a begun period
    is completed first. A step reads at most ``LOOKED_AT`` servers, so a step may write nothing
    although servers are left.

    Returns:
        True if servers of the period may be left. False after the last one, or if the last complete
        period is done.
    """
    insert_ignore(tx, leases, {"name": NAME, "owner": DONE, "until": 0})
    row = tx.execute(for_update(_MINE)).one()
    begin, end = periods.last(row.until if row.owner != DONE else moment(tx))
    if row.owner == DONE and row.until >= end:
        return False
    after = "" if row.owner == DONE else row.owner
    looked_at = tx.execute(NEXT, {"after": after, "begin": begin, "end": end}).all()
    ids = [row.id for row in looked_at if row.ran][:AT_ONCE]
    outbox.add(
        tx, [Notice("instance.exists", server, about={"period": [begin, end]}) for server in ids]
    )
    is_last = len(ids) < AT_ONCE and len(looked_at) < LOOKED_AT
    last = ids[-1] if len(ids) == AT_ONCE else looked_at[-1].id if looked_at else ""
    tx.execute(
        sa.update(leases)
        .where(leases.c.name == NAME)
        .values(owner=DONE if is_last else last, until=end)
    )
    return not is_last
