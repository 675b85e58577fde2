# SPDX-License-Identifier: Apache-2.0
"""Pending removals: mark a server's guests for removal, and wait until the hosts confirm.

The steps of delete, shelve, offload and of moves use this. An action waits up to half a minute, and
only for reachable hosts. After that the action continues, and the removal remains pending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.domain.clock import SECOND
from common.store.engine import Connection
from common.store.rows import RemovalRow
from common.store.servers import actions, guests
from conductor.engine.run import AnyRun, cleanup_command

#: Time that an action waits for reachable hosts.
CONFIRM_TIMEOUT_MICROS = 30 * SECOND
POLL_MICROS = 2 * SECOND
#: Time between two checks whether the superseded action's conductor has finished its burst.
BURST_POLL_MICROS = SECOND // 20
R = TypeVar("R", bound=AnyRun)


def collect(
    tx: Connection,
    runs: Sequence[R],
    host_of: Callable[[R], str] | None = None,
    keeps_files: Callable[[R], bool] = lambda run: False,
) -> list[R]:
    """Record pending removals of the servers' guests, and return the runs that continue now.

    The commands for reachable hosts are sent after the commit. A run whose reachable hosts have not
    confirmed the removal yet becomes due again, until ``CONFIRM_TIMEOUT_MICROS`` have passed. While
    a conductor still works on the action that this action has superseded, the run becomes due again
    without a removal.

    Args:
        tx: The transaction.
        runs: The runs.
        host_of: Returns a host. Only the guest on this host, which does not run, is removed. None:
            all guests of the server.
        keeps_files: Returns True if another host uses the files of the guest.
    """
    ready = []
    for run in runs:
        if run.data.after and actions.busy_until(tx, run.data.after):
            # The old burst may still write guests, and these must be removed too.
            run.retry_in(BURST_POLL_MICROS)
        else:
            ready.append(run)
    for run in ready:
        if host_of is None:
            guests.add_removal(tx, run.server.id, run.fence)
        else:
            guests.add_removal(
                tx,
                run.server.id,
                run.fence,
                host=host_of(run),
                may_run=False,
                keeps_files=keeps_files(run),
            )
    removals, hosts = (
        defaultdict(list),
        {run.server.id: host_of(run) for run in ready} if host_of is not None else {},
    )
    for removal in guests.removals_of(tx, [run.server.id for run in ready]) if ready else ():
        if hosts.get(removal.server_id, removal.host) == removal.host:
            removals[removal.server_id].append(removal)
    return [run for run in ready if _is_over(tx, run, removals[run.server.id])]


def _is_over(tx: Connection, run: AnyRun, removals: Sequence[RemovalRow]) -> bool:
    if run.data.polls * POLL_MICROS >= CONFIRM_TIMEOUT_MICROS or not any(
        removal.up for removal in removals
    ):
        return True
    for removal in removals:
        if removal.up and removal.sent_at is None:
            run.commands.append(
                (
                    removal.host,
                    cleanup_command(run.server.id, removal.fence, keep_files=removal.keeps_files),
                )
            )
            guests.mark_sent(tx, removal.host, [run.server.id])
    run.data.polls += 1
    run.retry_in(POLL_MICROS)
    return False
