# SPDX-License-Identifier: Apache-2.0
"""``kilonova host removals``: guests that hosts still have to remove, and the next step for each.

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
from common.store.views.host_contents import PendingRemoval
from deploy.operator.output import columns

# The age from which a guest is overdue. A reachable host removes a guest within seconds.
LATE = 60 * SECOND


def removals(options: argparse.Namespace) -> int:
    """Print the guests that one host or all hosts still have to remove, oldest first.

    Return 1 if there are any, otherwise 0.

    Raises:
        NotFound: There is no host with the given name.
    """
    store = Store.open(config.load(options.config))
    upgrades.check(store)
    try:
        if options.host:
            store.read(lambda tx: host_status.host_state(tx, options.host))
        at, pending = store.snapshot(
            lambda tx: (moment(tx), host_contents.removals(tx, options.host))
        )
    finally:
        store.close()
    print(
        json.dumps([facts(removal, at) for removal in pending], indent=1)
        if options.json
        else table(pending, at)
    )
    return 1 if pending else 0


def facts(removal: PendingRemoval, at: int) -> dict[str, object]:
    """Return a guest to be removed, with host, age and next step, for JSON output.

    Args:
        removal: The guest to be removed.
        at: The present time of the database, in µs.
    """
    return {
        "server": removal.server,
        "name": removal.name,
        "host": removal.host.name,
        "host_state": state(removal.host),
        "since": iso(removal.since),
        "seconds": (at - removal.since) // SECOND,
        "holds": removal.holds,
        "keeps_files": removal.keeps_files,
        "goes": goes(removal, at),
    }


def table(pending: list[PendingRemoval], at: int) -> str:
    """Return a table of the guests to remove, followed by the next step for each host.

    Args:
        pending: The guests to remove, oldest first.
        at: The present time of the database, in µs.
    """
    if not pending:
        return "no host has a guest to remove"
    lines = [["server", "name", "host", "since", "holds"]]
    lines += [
        [removal.server, removal.name, removal.host.name, iso(removal.since) or "", _holds(removal)]
        for removal in pending
    ]
    # The oldest entry of each host.
    hosts = {removal.host.name: removal for removal in reversed(pending)}
    states = [
        f"host {name} is {state(removal.host)}; {goes(removal, at)}"
        for name, removal in sorted(hosts.items())
    ]
    return "\n".join([columns(lines), f"{len(pending)} removals", *states])


def _holds(removal: PendingRemoval) -> str:
    resources = (
        ", ".join(f"{amount} {name}" for name, amount in sorted(removal.holds.items()))
        or "no resources"
    )
    return resources + (
        "; the files stay, because another host uses them" if removal.keeps_files else ""
    )


def state(host: HostState) -> str:
    """Return "up" or "silent", then "fenced" or "forced down", then "disabled", as far as true.

    The words are separated by commas. The text is "unknown" if the host has no compute service.
    """
    if not host.service:
        return "unknown"
    words = ["up" if host.up else "silent"]
    if host.forced_down:
        words.append("fenced" if host.fenced else "forced down")
    return ", ".join([*words, *(["disabled"] if host.disabled else [])])


def goes(removal: PendingRemoval, at: int) -> str:
    """Return a text about when the host removes the guest, with the operator's next step if any."""
    if not removal.host.service:
        return "the host has no service: start its agent, which then removes the guest"
    if not removal.host.up:
        return (
            "the guest is removed when the host is back: start the host and its kilonova-agent, which gets the "
            "command when it registers"
        )
    if at - removal.since < LATE:
        return "the host has the command to remove the guest, and confirms within seconds"
    return (
        "the host got the command to remove the guest several times and has not confirmed: the log of "
        "kilonova-agent there has the reason. The host removes the guest when the cause is repaired"
    )
