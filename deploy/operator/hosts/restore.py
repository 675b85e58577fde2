# SPDX-License-Identifier: Apache-2.0
"""``kilonova host restore``: takes back what a drain, a fencing hook or an admin's forced_down has
done to a host."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from common.service import config
from common.service.notification_options import NotificationSettings
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_status, services
from common.store.hosts.host_actions import DISABLED_BY
from common.store.hosts.host_status import HostState
from common.store.views import host_contents


def restore(options: argparse.Namespace) -> int:
    """Use the host again; 0 when it takes servers now."""
    conf = config.load(options.config)
    store = Store.opened(conf, notifications=NotificationSettings.of(conf))
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
    if state.disabled and DISABLED_BY in state.reason:
        changes |= {"disabled": False, "disabled_reason": None}
        said.append(f"enabled (was: {state.reason})")
    elif state.disabled:
        stays.append(
            f"it was not disabled by a drain but because: {state.reason or 'nobody said why'}. Whoever did "
            f"it enables it: openstack compute service set --enable {state.name} nova-compute"
        )
    if state.forced_down and state.up and not state.fenced:
        changes |= {"forced_down": False}
        said.append("not forced down any more: its agent is heard")
    elif state.forced_down:
        what = (
            "it was fenced"
            if state.fenced
            else "it is forced down, which proves that its guests are dead"
        )
        stays.append(
            f"{what}, and its agent has not registered since: start it there"
            + (
                ", which ends that"
                if state.fenced
                else f", then: kilonova host restore {state.name}"
            )
        )
    elif not state.up:
        stays.append("it is silent: start its kilonova-agent")
    return Undone(changes, said, stays)


def give_back(store: Store, host: str, say: Callable[[str], None]) -> int:
    """Take back what can be taken back, and say what that was.

    Raises:
        NotFound: there is no such host.
    """

    def work(tx: Connection) -> Undone:
        state = host_status.host_state(tx, host, locked=True)
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
    if to_remove := store.snapshot(lambda tx: host_contents.debts(tx, host)):
        say(
            f"host {host} has {len(to_remove)} guests to remove, and does when it is heard: "
            f"kilonova host debts {host}"
        )
    return 1 if found.stays else 0
