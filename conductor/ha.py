# SPDX-License-Identifier: Apache-2.0
"""Automatic evacuation ([ha], off by default): the servers of a host that went down are made again elsewhere, without
anybody's word.

Called by the sweep every few seconds; several conductors may. Proof that the host's guests are dead is the fencing
hook's: each evacuation calls it before anything else. When more hosts are down than the operator allows it is likely a
network that is broken and not they: then nobody is evacuated, until an operator has looked. What an admin forced down
is the admin's to evacuate.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass

from common import errors, states
from common.clock import SECOND
from common.context import RequestContext
from common.store import departures, migrations
from common.store.departures import Look, Resident
from common.store.engine import Connection, Store

log = logging.getLogger(__name__)
PERIOD = 5.0                 #: seconds between two rounds
AGAIN = 600 * SECOND         #: before a server whose evacuation failed is tried once more
AT_ONCE = 16                 #: evacuations of a host under way
BY = "[ha] evacuate"
_CAN_GO = states.row("evacuate").vm


@dataclass(frozen=True)
class Policy:
    """What the operator allows. ``after``: seconds for which a host must have been silent; ``max_hosts``: the most that
    may be taken for dead at once."""

    after: float = 60
    max_hosts: int = 1


def evacuate(store: Store, policy: Policy) -> list[str]:
    """One round; returns the servers whose evacuation was begun."""
    dead = store.snapshot(_down_with_servers)
    if len(dead) > policy.max_hosts:
        log.error("%d hosts with servers are down (%s), and [ha] max_hosts is %d: nothing is evacuated; see whether "
                  "they are dead, then: kilonova host evacuate HOST", len(dead),
                  ", ".join(sorted(look.host.name for look in dead)), policy.max_hosts)
        return []
    return [server for look in dead if (look.host.seen_at or 0) < look.at - policy.after * SECOND
            for server in _begin_those_of(store, look)]


def _down_with_servers(tx: Connection) -> list[Look]:
    """Silent hosts, but for those that an admin forced down."""
    silent = [host.name for host in departures.host_states(tx).values()
              if not host.up and (host.fenced or not host.forced_down)]
    return [look for look in (departures.look(tx, name) for name in silent) if look.servers]


def _begin_those_of(store: Store, look: Look) -> list[str]:
    host = look.host.name
    under_way = sum(move.kind == migrations.EVACUATION and move.status in migrations.IN_PROGRESS
                    for move in look.leaving)
    failed = store.read(lambda tx: migrations.failed_since(tx, host, migrations.EVACUATION, look.at - AGAIN))
    ready = [server for server in look.servers
             if server.vm_state in _CAN_GO and not server.busy and server.id not in failed]
    begun = [server.id for server in ready[:max(0, AT_ONCE - under_way)] if _begin(store, host, server)]
    if begun:
        log.warning("host %s is down: %d servers are evacuated, %d wait", host, len(begun), len(ready) - len(begun))
    return begun


def _begin(store: Store, host: str, server: Resident) -> bool:
    """Compare-and-set: another conductor, an operator or the server's owner may have been first."""
    system = RequestContext.of_ourselves(server.project_id)
    try:
        store.write(lambda tx: departures.begin(
            tx, host, "evacuate", server.id, migrations.EVACUATION, vm_state=server.vm_state, context=system,
            args={"by": BY, "stopped": False, "shared": None}))
    except errors.Problem as problem:
        log.info("server %s is not evacuated now: %s", server.id, problem)
        return False
    return True


def refusal(evacuates: bool, fencing_hook: str) -> str:
    """Why this configuration cannot be, or ""."""
    return ("[ha] evacuate needs [conductor] fencing_hook: silence does not prove that a host's guests are dead"
            if evacuates and not fencing_hook else "")
