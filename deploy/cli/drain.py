# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` and ``kilonova host restore``: a host is emptied for maintenance, and used again.

Drain disables the host, says where each server would go, and moves them a few at a time in the foreground until the
host is empty (status 0) or what is left cannot go now (1); with --wait it stays until that can. It may be ended and
given again at any time. Restore takes back what a drain, a fencing hook or an admin's forced_down has done to the host.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from common import config
from common.clock import iso
from common.notifications.options import Telling
from common.store import departures, migrations, services, upgrades
from common.store.departures import HostState, Look
from common.store.engine import Connection, Store, moment
from deploy.cli import hands, plan, progress
from deploy.cli.moving import Errand, Hands, Moving, look_ahead

BY = "kilonova host drain"


def drain(options: argparse.Namespace) -> int:
    """Empty the host; 0 only when it is empty."""
    return hands.carry_out(options, lambda found: empty(
        found, options.host, cold=options.cold, dry_run=options.dry_run, parallel=options.parallel, wait=options.wait))


def empty(found: Hands, host: str, *, cold: bool = False, dry_run: bool = False, parallel: int = 2, wait: bool = False
          ) -> int:
    """The same with other hands.

    Raises:
        NotFound: there is no such host. NoAnswer: a dry run, and no scheduler answers.
    """
    errand = _errand(host, cold)
    if dry_run:
        return rehearse(errand, found, parallel)
    found.say(found.store.write(lambda tx: disable(tx, host)))
    return Moving(errand, found, parallel, wait).run()


def _errand(host: str, cold: bool) -> Errand:
    again = f"{BY} {host}{' --cold' * cold}"
    return Errand(host, BY, again, lambda server: plan.drained(server, cold), _is_empty, _ends, needs_up=True,
                  kinds=frozenset({migrations.LIVE, migrations.MIGRATION, migrations.RESIZE}))


def _is_empty(look: Look) -> bool:
    """No server, no guest that waits there to come back or to be removed, and none on its way there. None comes after:
    the host is disabled, and claims heed that."""
    return not (look.servers or look.leaving or look.coming or look.guests)


def _ends(look: Look) -> str:
    return "" if look.host.disabled else f"somebody has enabled host {look.host.name} again"


def rehearse(errand: Errand, found: Hands, parallel: int) -> int:
    """Say where everything would go, and change nothing; 0 when all of it can.

    Raises:
        NotFound: there is no such host. NoAnswer: no scheduler answers.
    """
    look = found.store.snapshot(lambda tx: departures.look(tx, errand.host))
    lines = look_ahead(errand, found, look.servers)
    going = [line for line in lines if line.way is not None]
    found.say(plan.table(lines) if lines else f"no server is on host {errand.host}")
    took = [seconds for kind in sorted({line.way.kind for line in going if line.way is not None})
            for seconds in found.store.read(lambda tx, kind=kind: departures.took(tx, errand.host, kind))]  # type: ignore[misc]
    rest = progress.forecast(took, [], len(going), parallel, look.at)
    found.say(f"{len(going)} of {len(lines)} would go{f' in about {progress.words(rest)}' if rest and going else ''}; "
              "nothing was changed")
    return 0 if len(going) == len(lines) else 1


def disable(tx: Connection, host: str) -> str:
    """Let it get no more servers; what somebody else disabled stays as that one has it.

    Raises:
        NotFound: there is no such host.
    """
    state = departures.host_state(tx, host, locked=True)
    if state.disabled:
        return f"host {host} is disabled already: {state.reason or 'nobody said why'}"
    services.set_state(tx, state.service, disabled=True, disabled_reason=f"drained by {BY} since {iso(moment(tx))}")
    return f"host {host} gets no more servers; kilonova host restore {host} takes that back"


# --- back again ---
def restore(options: argparse.Namespace) -> int:
    """Use the host again; 0 when it takes servers now."""
    conf = config.load(options.config)
    store = Store.opened(conf.database, telling=Telling.of(conf))
    upgrades.check(store)
    try:
        return give_back(store, options.host, print)
    finally:
        store.close()


@dataclass(frozen=True)
class Undone:
    """What is taken back (columns of the service), what is said of it, and what stays as it is."""

    changes: dict[str, object]
    said: list[str]
    stays: list[str]


def undo(state: HostState) -> Undone:
    """What of a host's state can be taken back."""
    changes: dict[str, object] = {}
    said, stays = [], []
    if state.disabled and BY in state.reason:
        changes |= {"disabled": False, "disabled_reason": None}
        said.append(f"enabled (was: {state.reason})")
    elif state.disabled:
        stays.append(f"it was not disabled by a drain but because: {state.reason or 'nobody said why'}. Whoever did "
                     f"it enables it: openstack compute service set --enable {state.name} nova-compute")
    if state.forced_down and state.up and not state.fenced:
        changes |= {"forced_down": False}
        said.append("not forced down any more: its agent is heard")
    elif state.forced_down:
        what = "it was fenced" if state.fenced else "it is forced down, which proves that its guests are dead"
        stays.append(f"{what}, and its agent has not said hello since: start it there" + (
            ", which ends that" if state.fenced else f", then: kilonova host restore {state.name}"))
    elif not state.up:
        stays.append("it is silent: start its kilonova-agent")
    return Undone(changes, said, stays)


def give_back(store: Store, host: str, say: Callable[[str], None]) -> int:
    """Take back what can be taken back, and say what that was.

    Raises:
        NotFound: there is no such host.
    """
    def work(tx: Connection) -> Undone:
        state = departures.host_state(tx, host, locked=True)
        found = undo(state)
        if found.changes:
            services.set_state(tx, state.service, **found.changes)
        return found

    found = store.write(work)
    for text in found.said:
        say(f"host {host}: {text}")
    for text in found.stays:
        say(f"host {host}: {text}")
    if not found.said and not found.stays:
        say(f"host {host} is up and enabled: nothing to take back")
    if owed := store.snapshot(lambda tx: departures.debts(tx, host)):
        say(f"host {host} has {len(owed)} guests to remove, and does when it is heard: kilonova host debts {host}")
    return 1 if found.stays else 0
