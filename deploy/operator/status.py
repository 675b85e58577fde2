# SPDX-License-Identifier: Apache-2.0
"""``kilonova status``: services, actions in hand, what is stuck, what hosts have still to remove,
drains and evacuations, what notifications wait."""

from __future__ import annotations

import argparse

from common.domain.clock import SECOND, iso
from common.domain.service_binaries import Binary
from common.domain.text import one_line
from common.service import config
from common.store import upgrades
from common.store.engine import Store, moment
from common.store.hosts import host_actions, services
from common.store.notifications import outbox
from conductor.hosts import move_progress
from deploy.operator import doctor
from deploy.operator.hosts.list import silence_of

LONGEST = 20  # lines of a list that are shown


def status(options: argparse.Namespace) -> int:
    """Print it; 1 when a service is down or silent."""
    conf = config.load(options.config)
    silence = conf.conductor.host_silence
    store = Store.opened(conf)
    upgrades.check(store)
    rows = store.read(services.list_all)
    ages = store.read(doctor.ages)
    heard = store.read(lambda tx: services.hosts_heard(tx, silence))
    unsent, at = store.read(lambda tx: (outbox.waiting(tx), moment(tx)))
    on_hosts = store.read(host_actions.list_open)
    store.close()
    print(f"{'service':<16} {'host':<30} {'state':<16} last sign of life")
    is_silent = False
    for row in rows:
        state = "forced down" if row.forced_down else "up" if row.up else "DOWN"
        too_few = heard if row.binary == Binary.COMPUTE else services.HostsHeard(1, 1)
        silent = silence_of(row.seen_at, row.up, at, silence, too_few)
        is_silent = is_silent or bool(silent and not row.forced_down)
        print(
            f"{row.binary:<16} {row.host:<30} {state + (', disabled' if row.disabled else ''):<16} "
            f"{iso(row.seen_at) or 'never'}{silent and f', {silent}'}"
        )
    for title, waiting in ages.items():
        print(f"\n{title}: {len(waiting)}")
        for server, what, seconds in waiting[:LONGEST]:
            print(f"  {server}  {one_line(what)}  for {seconds:.0f} s")
    print(f"\nhost actions: {len(on_hosts)}")
    for action in on_hosts:
        print(
            f"  {action.name} of {action.host}, {action.state}: {move_progress.summary(action.progress)}"
        )
    print(f"\nnotifications: {unsent.number if unsent else 0}")
    if unsent:
        print(
            f"  the oldest, {unsent.event} of {unsent.key}, for {(at - unsent.since) / SECOND:.0f} s"
        )
    return 1 if is_silent or not all(row.up or row.forced_down for row in rows) else 0
