# SPDX-License-Identifier: Apache-2.0
"""Waiting for debts: a server's guests become debts, and the action goes on when they are paid.

Used by the steps of delete, shelve and offload. A host that cannot be reached, or that takes longer than half a
minute, keeps its debt, and the action goes on all the same.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from common.clock import SECOND
from common.store import actions, guests
from common.store.engine import Connection, Row
from conductor.saga import Run, debt_command

PATIENCE = 30 * SECOND       #: how long a host that is up has to confirm before nobody waits any longer
LOOK_AGAIN = 2 * SECOND
BURST_POLL = SECOND // 20


def settle(tx: Connection, runs: Sequence[Run], at: Callable[[Run], str] | None = None) -> list[Run]:
    """Make debts of the servers' guests and ask for payment; returns those that need not wait any longer. ``at``: only
    of the guest on this host, which does not run; another host has its files when storage is ``shared``."""
    ready = []
    for run in runs:
        before = run.data.get("after")
        if before and actions.busy_until(tx, before):
            run.again_in(BURST_POLL)        # the old burst may still write; what it leaves must be found
        else:
            ready.append(run)
    for run in ready:
        if at is None:
            guests.owe(tx, run.server.id, run.fence)
        else:
            guests.owe(tx, run.server.id, run.fence, host=at(run), may_run=False,
                       keeps_files=bool(run.data.get("shared")))
    owed, hosts = defaultdict(list), {run.server.id: at(run) for run in ready} if at is not None else {}
    for debt in guests.debts_of(tx, [run.server.id for run in ready]) if ready else ():
        if hosts.get(debt.server_id, debt.host) == debt.host:
            owed[debt.server_id].append(debt)
    return [run for run in ready if _is_settled(tx, run, owed[run.server.id])]


def _is_settled(tx: Connection, run: Run, debts: Sequence[Row[Any]]) -> bool:
    late = run.data.get("polls", 0) * LOOK_AGAIN >= PATIENCE
    if late or not any(debt.up for debt in debts):
        return True
    for debt in debts:
        if debt.up and debt.sent_at is None:
            run.commands.append((debt.host, debt_command(run.server.id, debt.fence, 0, debt.keeps_files)))
            guests.mark_sent(tx, debt.host, [run.server.id])
    run.again_in(LOOK_AGAIN, polls=run.data.get("polls", 0) + 1)
    return False
