# SPDX-License-Identifier: Apache-2.0
"""``kilonova host evacuate``: every server of a dead host is made again elsewhere.

Only with proof that the host's guests are dead: an admin's forced_down, or a fencing hook that each evacuation calls
before anything else. Where many hosts are gone at once it is likely our network that is broken and not they, so that is
refused unless somebody insists. Status 0: no server is left on the host; what is left there of them is a debt.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterable

from common import config, errors
from common.clock import SECOND
from common.store import departures, guests, migrations, services
from common.store.departures import HostState, Look
from deploy.cli import hands, plan
from deploy.cli.drain import rehearse
from deploy.cli.moving import Errand, Hands, Moving

BY = "kilonova host evacuate"
FEW, MOST = 5, 0.2               # from so many hosts on: the share of them that may be gone at once


def evacuate(options: argparse.Namespace) -> int:
    """Make its servers again elsewhere; 0 when none is left on it."""
    conf = config.load(options.config)
    return hands.carry_out(options, lambda found: leave(
        found, options.host, has_hook=bool(conf.conductor.fencing_hook), silence=conf.conductor.host_silence,
        dry_run=options.dry_run, parallel=options.parallel, insists=options.yes))


def leave(found: Hands, host: str, *, has_hook: bool, silence: int, dry_run: bool = False, parallel: int = 2,
          insists: bool = False) -> int:
    """The same with other hands. silence: seconds after which a host counts as gone.

    Raises:
        NotFound: there is no such host. Conflict: it is not known to be dead, or too many are gone at once.
        NoAnswer: a dry run, and no scheduler answers.
    """
    look = found.store.snapshot(lambda tx: departures.look(tx, host))
    refused = ("" if insists else too_many(found.store.read(departures.host_states).values(), look.at, silence)
               ) or _ends(look, has_hook)
    errand = _errand(host, has_hook)
    if dry_run:
        status = rehearse(errand, found, parallel)
        if refused:
            found.say(f"it would be refused: {refused}")
        return 1 if refused else status
    if refused:
        raise errors.Conflict(refused)
    status = Moving(errand, found, parallel).run()
    if owed := found.store.snapshot(lambda tx: departures.look(tx, host)).guests.get(guests.ABSENT):
        found.say(f"{owed} guests are still to be removed there when it is back: kilonova host debts {host}")
    return status


def _errand(host: str, has_hook: bool) -> Errand:
    return Errand(host, BY, f"{BY} {host}", plan.evacuated, _is_empty, lambda look: _ends(look, has_hook),
                  kinds=frozenset({migrations.EVACUATION}), fatal="fence")


def _is_empty(look: Look) -> bool:
    """No server is there, and none is being made again, which may fail still."""
    return not look.servers and not any(move.kind == migrations.EVACUATION for move in look.leaving)


def _ends(look: Look, has_hook: bool) -> str:
    """Why nothing can be evacuated, "" when it can."""
    host = look.host
    if host.answers:
        return f"Compute service of {host.name} is still in use. What runs is moved by: kilonova host drain {host.name}"
    return "" if host.forced_down or has_hook else services.NO_PROOF.format(host=host.name)


def too_many(hosts: Iterable[HostState], at: int, silence: int) -> str:
    """Why it is likely that the hosts are well and our network is not; "" when it is not.

    Looks at their last signs of life too, because conductors call no host down while most of them are silent.
    """
    known = list(hosts)
    gone = [one.name for one in known if not one.answers or (one.seen_at or 0) < at - silence * SECOND]
    if len(known) < FEW or len(gone) <= MOST * len(known):
        return ""
    return (f"{len(gone)} of {len(known)} hosts are gone at once ({', '.join(sorted(gone)[:FEW])}"
            f"{' …' if len(gone) > FEW else ''}): that is our network more likely than their hosts. Look at it first; "
            "when they are dead all the same, say --yes.")
