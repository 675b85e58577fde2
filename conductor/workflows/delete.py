# SPDX-License-Identifier: Apache-2.0
"""Delete: always wins. Whatever guests the server has become debts; the server is gone when they are paid.

A host that cannot be reached, or that takes longer than half a minute, keeps its debt, and the server is
gone for its tenant all the same. The action that ran before was superseded when this one was accepted.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from common import states
from common.clock import SECOND
from common.store import actions, guests
from common.store.engine import Connection, Row, now
from conductor.saga import Engine, Run, Step, Workflow, debt_command

PATIENCE = 30 * SECOND       #: how long a host that is up has to confirm before the tenant stops waiting
LOOK_AGAIN = 2 * SECOND
BURST_POLL = SECOND // 20


def _remove(tx: Connection, engine: Engine, runs: Sequence[Run]) -> None:
    ready = []
    for run in runs:
        before = run.data.get("after")
        if before and actions.busy_until(tx, before):
            run.again_in(BURST_POLL)        # the old burst may still write; what it leaves must be found
        else:
            ready.append(run)
    for run in ready:
        guests.owe(tx, run.server.id, run.action.fence)
    owed = defaultdict(list)
    for debt in guests.debts_of(tx, [run.server.id for run in ready]) if ready else ():
        owed[debt.server_id].append(debt)
    for run in ready:
        _settle(tx, run, owed[run.server.id])


def _settle(tx: Connection, run: Run, debts: Sequence[Row[Any]]) -> None:
    reachable = [debt.host for debt in debts if debt.up]
    late = run.data.get("polls", 0) * LOOK_AGAIN >= PATIENCE
    if reachable and not late:
        for debt in debts:
            if debt.up and debt.sent_at is None:
                run.commands.append((debt.host, debt_command(run.server.id, debt.fence, 0)))
                guests.mark_sent(tx, debt.host, [run.server.id])
        run.again_in(LOOK_AGAIN, polls=run.data.get("polls", 0) + 1)
        return
    run.set(power_state=states.NOSTATE, deleted=1, deleted_at=now(), terminated_at=now(), progress=0)


DELETE = Workflow("delete", steps=(
    Step("remove", "the only step: there is nothing to go back to once a user has said delete",
         apply=_remove, pivot=True),
))
