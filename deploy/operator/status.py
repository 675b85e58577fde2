# SPDX-License-Identifier: Apache-2.0
"""``kilonova status``: an overview of the cloud.

It lists services, running and stuck actions, pending work of hosts, drains and evacuations, and
waiting notifications.
"""

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
from deploy.operator.hosts.list import silence_of, state_of

# The number of lines shown of a list.
LONGEST = 20


def status(options: argparse.Namespace) -> int:
    """Print services, pending work, host actions and waiting notifications of the cloud.

    Return 1 if a service that is not forced down is down or silent, otherwise 0.
    """
    conf = config.load(options.config)
    silence = conf.conductor.host_silence
    store = Store.open(conf)
    upgrades.check(store)
    rows = store.read(services.list_all)
    ages = store.read(doctor.ages)
    hosts_heard = store.read(lambda tx: services.hosts_heard(tx, silence))
    waiting_notifications, at = store.read(lambda tx: (outbox.waiting(tx), moment(tx)))
    host_actions_open = store.read(host_actions.list_open)
    store.close()
    print(f"{'service':<16} {'host':<30} {'version':<12} {'state':<16} last sign of life")
    is_silent = False
    for row in rows:
        heard_for_service = (
            hosts_heard if row.binary == Binary.COMPUTE else services.HostsHeard(1, 1)
        )
        silent = silence_of(row.seen_at, row.up, at, silence, heard_for_service)
        is_silent = is_silent or bool(silent and not row.forced_down)
        state = state_of(row.up, row.forced_down, silent)
        print(
            f"{row.binary:<16} {row.host:<30} {row.version or 'unknown':<12} "
            f"{state + (', disabled' if row.disabled else ''):<16} "
            f"{iso(row.seen_at) or 'never'}{silent and f', {silent}'}"
        )
    for title, waiting in ages.items():
        print(f"\n{title}: {len(waiting)}")
        for server, work, seconds in waiting[:LONGEST]:
            print(f"  {server}  {one_line(work)}  for {seconds:.0f} s")
    print(f"\nhost actions: {len(host_actions_open)}")
    for action in host_actions_open:
        print(
            f"  {action.name} of {action.host}, {action.state}: {move_progress.summary(action.progress)}"
        )
    print(f"\nnotifications: {waiting_notifications.number if waiting_notifications else 0}")
    if waiting_notifications:
        print(
            f"  the oldest, {waiting_notifications.event} of {waiting_notifications.key}, "
            f"for {(at - waiting_notifications.since) / SECOND:.0f} s"
        )
    return 1 if is_silent or not all(row.up or row.forced_down for row in rows) else 0
