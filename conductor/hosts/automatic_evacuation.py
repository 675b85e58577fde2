# SPDX-License-Identifier: Apache-2.0
"""Automatic evacuation ([ha], off by default): the servers of a host that went down are made again
elsewhere, without anybody's word.

Called by the sweep every few seconds; several conductors may. Proof that the host's guests are dead
is the fencing hook's: each evacuation calls it before anything else. When more hosts are down than
the operator allows it is likely a network that is broken and not they: then nobody is evacuated,
until an operator has looked. What an admin forced down is the admin's to evacuate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.store.engine import Connection, Store
from common.store.hosts import host_actions, host_status
from common.store.hosts.host_actions import Arguments, Name
from common.store.views import host_contents
from common.store.views.host_contents import Look
from conductor.engine.engine import Chore

log = logging.getLogger(__name__)
PERIOD_SECONDS = 5.0  #: between two rounds
RETRY_MICROS = 600 * SECOND  #: before a host whose evacuation failed is tried once more
PARALLEL = 16  #: servers of a host at a time


@dataclass(frozen=True)
class EvacuationPolicy:
    """What the operator allows. ``after``: seconds for which a host must have been silent;
    ``max_hosts``: the most that may be taken for dead at once."""

    after: float = 60
    max_hosts: int = 1


def evacuate(store: Store, policy: EvacuationPolicy) -> list[str]:
    """One round; returns the hosts whose evacuation was begun."""
    dead = store.snapshot(_down_with_servers)
    if len(dead) > policy.max_hosts:
        log.error(
            "%d hosts with servers are down (%s), and [ha] max_hosts is %d: nothing is evacuated; see whether "
            "they are dead, then: kilonova host evacuate HOST",
            len(dead),
            ", ".join(sorted(look.host.name for look in dead)),
            policy.max_hosts,
        )
        return []
    return [
        look.host.name
        for look in dead
        if (look.host.seen_at or 0) < look.at - policy.after * SECOND and _begin(store, look)
    ]


def _down_with_servers(tx: Connection) -> list[Look]:
    """Silent hosts, but for those that an admin forced down."""
    silent = [
        host.name
        for host in host_status.host_states(tx).values()
        if not host.up and (host.fenced or not host.forced_down)
    ]
    return [look for look in (host_contents.look(tx, name) for name in silent) if look.servers]


def _begin(store: Store, look: Look) -> bool:
    """Compare-and-set: another conductor or an operator may have been first."""
    host = look.host.name

    def work(tx: Connection) -> bool:
        last = host_actions.page(tx, host, limit=1)
        if last and (last[0].is_open or (last[0].finished_at or 0) > look.at - RETRY_MICROS):
            return False
        host_actions.begin(
            tx,
            host,
            Name.EVACUATE,
            Arguments(parallel=PARALLEL, force=True),
            RequestContext.of_ourselves(""),
        )
        return True

    try:
        begun = store.write(work)
    except errors.Conflict as problem:
        log.info("host %s is not evacuated now: %s", host, problem)
        return False
    if begun:
        log.warning("host %s is down: its %d servers are evacuated", host, len(look.servers))
    return begun


def chore(policy: EvacuationPolicy) -> Chore:
    """Return the chore of the sweep that evacuates hosts that went down."""
    return Chore(
        lambda engine: evacuate(engine.store, policy), PERIOD_SECONDS, needs_certainty=True
    )


def refusal(evacuates: bool, fencing_hook: str) -> str:
    """Why this configuration cannot be, or ""."""
    return (
        "[ha] evacuate needs [conductor] fencing_hook: silence does not prove that a host's guests are dead"
        if evacuates and not fencing_hook
        else ""
    )
