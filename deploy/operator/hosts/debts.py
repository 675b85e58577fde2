# SPDX-License-Identifier: Apache-2.0
"""``kilonova host debts``: guests that hosts still have to remove, and the next step for each.

The command reads only the database. A guest to be removed holds resources until the host has
confirmed the removal, so no command drops the entry. A reachable host removes such guests within
seconds, a silent host when it is back.
"""

from __future__ import annotations

import argparse
import json

from common.domain.clock import SECOND, iso
from common.service import config
from common.store import upgrades
from common.store.engine import Store, moment
from common.store.hosts import host_status
from common.store.hosts.host_status import HostState
from common.store.views import host_contents
from common.store.views.host_contents import Debt
from deploy.operator.output import columns

# The age from which a guest is overdue. A reachable host removes a guest within seconds.
LATE = 60 * SECOND


def debts(options: argparse.Namespace) -> int:
    """Print the guests that hosts still have to remove, oldest first. Return 1 if there are any.

    Raises:
        NotFound: There is no host with the given name.
    """
    store = Store.opened(config.load(options.config))
    upgrades.check(store)
    try:
        if options.host:
            store.read(lambda tx: host_status.host_state(tx, options.host))
        at, pending = store.snapshot(lambda tx: (moment(tx), host_contents.debts(tx, options.host)))
    finally:
        store.close()
    print(
        json.dumps([facts(debt, at) for debt in pending], indent=1)
        if options.json
        else table(pending, at)
    )
    return 1 if pending else 0


def facts(debt: Debt, at: int) -> dict[str, object]:
    """Return a guest to be removed for JSON output.

    Args:
        debt: The guest to be removed.
        at: The present time of the database.
    """
    return {
        "server": debt.server,
        "name": debt.name,
        "host": debt.host.name,
        "host_state": state(debt.host),
        "since": iso(debt.since),
        "seconds": (at - debt.since) // SECOND,
        "holds": debt.holds,
        "keeps_files": debt.keeps_files,
        "goes": goes(debt, at),
    }


def table(pending: list[Debt], at: int) -> str:
    """Return a table of the guests to remove, followed by the next step for each host."""
    if not pending:
        return "no host has a guest to remove"
    lines = [["server", "name", "host", "since", "holds"]]
    lines += [
        [debt.server, debt.name, debt.host.name, iso(debt.since) or "", _holds(debt)]
        for debt in pending
    ]
    # The oldest entry of each host.
    hosts = {debt.host.name: debt for debt in reversed(pending)}
    states = [
        f"host {name} is {state(debt.host)}; {goes(debt, at)}"
        for name, debt in sorted(hosts.items())
    ]
    return "\n".join([columns(lines), f"{len(pending)} debts", *states])


def _holds(debt: Debt) -> str:
    resources = (
        ", ".join(f"{amount} {name}" for name, amount in sorted(debt.holds.items()))
        or "no resources"
    )
    return resources + (
        "; the files stay, because another host uses them" if debt.keeps_files else ""
    )


def state(host: HostState) -> str:
    """Return up, silent or unknown, followed by fenced or forced down, and disabled."""
    if not host.service:
        return "unknown"
    words = ["up" if host.up else "silent"]
    if host.forced_down:
        words.append("fenced" if host.fenced else "forced down")
    return ", ".join([*words, *(["disabled"] if host.disabled else [])])


def goes(debt: Debt, at: int) -> str:
    """Return a text about when the guest is removed, with the operator's next step if any."""
    if not debt.host.service:
        return "the host has no service: start its agent, which then removes the guest"
    if not debt.host.up:
        return (
            "the guest is removed when the host is back: start the host and its kilonova-agent, which gets the "
            "command when it registers"
        )
    if at - debt.since < LATE:
        return "the host has the command to remove the guest, and confirms within seconds"
    return (
        "the host got the command to remove the guest several times and has not confirmed: the log of "
        "kilonova-agent there has the reason. The host removes the guest when the cause is repaired"
    )
