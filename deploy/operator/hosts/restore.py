# SPDX-License-Identifier: Apache-2.0
"""``kilonova host restore``: return a host to service.

This reverts the effects of a drain, a fencing hook or forced_down.
"""

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
    """Enable a host that a drain disabled, end forced_down, and print what is left to do.

    Return 0 if the host is up and enabled now, 1 if the operator has something left to do.

    Raises:
        NotFound: There is no such host.
    """
    conf = config.load(options.config)
    store = Store.open(conf, notifications=NotificationSettings.of(conf))
    upgrades.check(store)
    try:
        return give_back(store, options.host, print)
    finally:
        store.close()


@dataclass(frozen=True)
class Restoration:
    """The changes that ``kilonova host restore`` makes, and the conditions that remain."""

    #: Column of the host's service -> new value.
    changes: dict[str, object]
    #: A text about each change.
    done: list[str]
    #: A text about each condition that remains, with the next step.
    stays: list[str]


def plan_restoration(state: HostState) -> Restoration:
    """Return the changes that make a host usable again, and the conditions that remain.

    The changes enable a host that a drain disabled, and end forced_down of a host that is up and
    not fenced. Every other cause remains. This function changes nothing.
    """
    changes: dict[str, object] = {}
    done, stays = [], []
    if state.disabled and DISABLED_BY in state.reason:
        changes |= {"disabled": False, "disabled_reason": None}
        done.append(f"enabled (was: {state.reason})")
    elif state.disabled:
        stays.append(
            "it was not disabled by a drain, but for this reason: "
            f"{state.reason or 'no reason given'}. To enable it: openstack compute service set --enable {state.name} "
            "nova-compute"
        )
    if state.forced_down and state.up and not state.fenced:
        changes |= {"forced_down": False}
        done.append("not forced down any more, because its agent is up")
    elif state.forced_down:
        condition = (
            "it was fenced"
            if state.fenced
            else "it is forced down, which proves that its guests are dead"
        )
        stays.append(
            f"{condition}, and its agent has not registered since: start kilonova-agent on the host"
            + (
                ", which ends the fencing"
                if state.fenced
                else f", and then run: kilonova host restore {state.name}"
            )
        )
    elif not state.up:
        stays.append("it is silent: start kilonova-agent on the host")
    return Restoration(changes, done, stays)


def give_back(store: Store, host: str, say: Callable[[str], None]) -> int:
    """Make the changes of ``plan_restoration``, and print them and the conditions that remain.

    Also print the number of guests that the host still has to remove. Return 0 if the host is up
    and enabled now, 1 if a condition remains.

    Raises:
        NotFound: There is no such host.
    """

    def work(tx: Connection) -> Restoration:
        state = host_status.host_state(tx, host, locked=True)
        restoration = plan_restoration(state)
        if restoration.changes:
            services.set_state(tx, state.service, **restoration.changes)
        return restoration

    restoration = store.write(work)
    for text in restoration.done:
        say(f"host {host}: {text}")
    for text in restoration.stays:
        say(f"host {host}: {text}")
    if not restoration.done and not restoration.stays:
        say(f"host {host} is up and enabled: nothing to revert")
    if to_remove := store.snapshot(lambda tx: host_contents.removals(tx, host)):
        say(
            f"host {host} has {len(to_remove)} guests to remove, and removes them once its agent is up: "
            f"kilonova host removals {host}"
        )
    return 1 if restoration.stays else 0
