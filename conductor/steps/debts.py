# SPDX-License-Identifier: Apache-2.0
"""Waiting for debts: a server's guests become debts, and the action goes on when their removal is
confirmed.

Used by the steps of delete, shelve, offload and of moves. A host that cannot be reached, or that
takes longer than half a minute, keeps its debt, and the action goes on all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.domain.clock import SECOND
from common.store.engine import Connection
from common.store.rows import DebtRow
from common.store.servers import actions, guests
from conductor.engine.run import AnyRun, cleanup_command

CONFIRM_TIMEOUT_MICROS = 30 * SECOND  #: how long an action waits for hosts that are up
POLL_MICROS = 2 * SECOND
#: between two looks whether the superseded action's conductor is done
BURST_POLL_MICROS = SECOND // 20
R = TypeVar("R", bound=AnyRun)


def collect(
    tx: Connection,
    runs: Sequence[R],
    host_of: Callable[[R], str] | None = None,
    keeps_files: Callable[[R], bool] = lambda run: False,
) -> list[R]:
    """Make debts of the servers' guests and have them removed; returns the runs that need not wait
    any longer.
    ``host_of``: only of the guest on this host, which does not run; another host has its files when
    ``keeps_files``."""
    ready = []
    for run in runs:
        if run.data.after and actions.busy_until(tx, run.data.after):
            # the old burst may still write; what it leaves must be found
            run.retry_in(BURST_POLL_MICROS)
        else:
            ready.append(run)
    for run in ready:
        if host_of is None:
            guests.add_debt(tx, run.server.id, run.fence)
        else:
            guests.add_debt(
                tx,
                run.server.id,
                run.fence,
                host=host_of(run),
                may_run=False,
                keeps_files=keeps_files(run),
            )
    debts, hosts = (
        defaultdict(list),
        {run.server.id: host_of(run) for run in ready} if host_of is not None else {},
    )
    for debt in guests.debts_of(tx, [run.server.id for run in ready]) if ready else ():
        if hosts.get(debt.server_id, debt.host) == debt.host:
            debts[debt.server_id].append(debt)
    return [run for run in ready if _is_over(tx, run, debts[run.server.id])]


def _is_over(tx: Connection, run: AnyRun, debts: Sequence[DebtRow]) -> bool:
    if run.data.polls * POLL_MICROS >= CONFIRM_TIMEOUT_MICROS or not any(debt.up for debt in debts):
        return True
    for debt in debts:
        if debt.up and debt.sent_at is None:
            run.commands.append(
                (debt.host, cleanup_command(run.server.id, debt.fence, keep_files=debt.keeps_files))
            )
            guests.mark_sent(tx, debt.host, [run.server.id])
    run.data.polls += 1
    run.retry_in(POLL_MICROS)
    return False
