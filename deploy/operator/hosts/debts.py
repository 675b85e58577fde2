# SPDX-License-Identifier: Apache-2.0
"""``kilonova host debts``: what is left of servers on hosts that have not removed it yet, and what
will make it go.

Read only, from the database alone. A debt holds its resources until its host has confirmed that
nothing is there, so it is never struck by hand: a host that is heard pays within seconds, one that
is silent when it is back.
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

LATE = 60 * SECOND  # a host that is heard has paid long before


def debts(options: argparse.Namespace) -> int:
    """Print them, oldest first; 1 when there are some."""
    store = Store.opened(config.load(options.config))
    upgrades.check(store)
    try:
        if options.host:
            store.read(lambda tx: host_status.host_state(tx, options.host))
        at, found = store.snapshot(lambda tx: (moment(tx), host_contents.debts(tx, options.host)))
    finally:
        store.close()
    print(
        json.dumps([facts(one, at) for one in found], indent=1)
        if options.json
        else table(found, at)
    )
    return 1 if found else 0


def facts(debt: Debt, at: int) -> dict[str, object]:
    """For programs."""
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


def table(found: list[Debt], at: int) -> str:
    """For people: one line a debt, then for each host what makes them go."""
    if not found:
        return "no host has anything still to remove"
    lines = [["server", "name", "host", "since", "holds"]]
    lines += [
        [one.server, one.name, one.host.name, iso(one.since) or "", _holds(one)] for one in found
    ]
    hosts = {one.host.name: one for one in reversed(found)}  # the oldest of each
    states = [
        f"host {name} is {state(one.host)}; {goes(one, at)}" for name, one in sorted(hosts.items())
    ]
    return "\n".join([columns(lines), f"{len(found)} debts", *states])


def _holds(debt: Debt) -> str:
    held = (
        ", ".join(f"{amount} {name}" for name, amount in sorted(debt.holds.items()))
        or "no resources"
    )
    return held + ("; its files stay, another host has them too" if debt.keeps_files else "")


def state(host: HostState) -> str:
    """up, silent or unknown; and what was declared."""
    if not host.service:
        return "unknown"
    words = ["up" if host.up else "silent"]
    if host.forced_down:
        words.append("fenced" if host.fenced else "forced down")
    return ", ".join([*words, *(["disabled"] if host.disabled else [])])


def goes(debt: Debt, at: int) -> str:
    """What will make this debt go."""
    if not debt.host.service:
        return "no service of it is known: start its agent there, and what is left is removed"
    if not debt.host.up:
        return "it is removed when the host is back: start it and its kilonova-agent, which learns it when it registers"
    if at - debt.since < LATE:
        return "it has the command to remove it and confirms within seconds"
    return (
        "it has had the command to remove it many times and has not confirmed: the log of kilonova-agent there "
        "says why, and the debt goes as soon as that is mended"
    )
