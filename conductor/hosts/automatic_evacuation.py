# SPDX-License-Identifier: Apache-2.0
"""Automatic evacuation ([ha], off by default): evacuate hosts that went down, without an operator.

The sweep calls ``evacuate`` every few seconds, on any number of conductors. Each evacuation first
calls the fencing hook, which proves that the host's guests are dead. If more hosts are down than
``max_hosts``, a broken network is more likely. Then no host is evacuated until an operator has
checked. Hosts that an admin has forced down are left to the admin.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.context import RequestContext
from common.service.log import get_logger
from common.store.engine import Connection, Store
from common.store.hosts import host_actions, host_status
from common.store.hosts.host_actions import Arguments, Name
from common.store.views import host_contents
from common.store.views.host_contents import Look
from conductor.engine.engine import Chore

log = get_logger(__name__)
#: Interval of the rounds.
PERIOD_SECONDS = 5.0
#: Delay before a failed evacuation of a host is tried again.
RETRY_MICROS = 600 * SECOND
#: Servers of a host that move at a time.
PARALLEL = 16


@dataclass(frozen=True)
class EvacuationPolicy:
    """The operator's limits.

    A host is evacuated after ``after`` seconds of silence. While more than ``max_hosts`` hosts with
    servers are down, no evacuation begins.
    """

    after: float = 60
    max_hosts: int = 1


def evacuate(store: Store, policy: EvacuationPolicy) -> list[str]:
    """Begin the evacuation of each down host with servers after ``policy.after`` s of silence.

    Hosts that an admin forced down are left out.

    Returns:
        The hosts whose evacuation this call has begun. Empty if more than ``policy.max_hosts`` of
        these hosts are down.

    Raises:
        Unavailable: The database does not answer.
    """
    dead = store.snapshot(_find_down_with_servers)
    if len(dead) > policy.max_hosts:
        log.error(
            "more hosts with servers are down than [ha] max_hosts permits, so no host is "
            "evacuated; check whether they are dead, then run for each dead host: kilonova host "
            "evacuate HOST",
            count=len(dead),
            hosts=", ".join(sorted(look.host.name for look in dead)),
            max_hosts=policy.max_hosts,
        )
        return []
    return [
        look.host.name
        for look in dead
        if (look.host.seen_at or 0) < look.at - policy.after * SECOND and _begin(store, look)
    ]


def _find_down_with_servers(tx: Connection) -> list[Look]:
    """Return the down hosts that have servers, except hosts that an admin forced down.

    A host that the fencing hook has forced down is included.
    """
    silent = [
        host.name
        for host in host_status.host_states(tx).values()
        if not host.up and (host.fenced or not host.forced_down)
    ]
    return [look for look in (host_contents.look(tx, name) for name in silent) if look.servers]


def _begin(store: Store, look: Look) -> bool:
    """Begin the evacuation of a host, and return True if it has begun.

    No evacuation begins if the host has an open host action, if its last one ended less than
    ``RETRY_MICROS`` ago, if ``host_actions.begin`` raises Conflict, or if the host was removed
    meanwhile.

    Raises:
        Unavailable: The database does not answer.
    """
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
        is_begun = store.write(work)
    except (errors.Conflict, errors.NotFound) as problem:
        log.info("the evacuation of a host cannot begin now", host=host, problem=problem)
        return False
    if is_begun:
        log.warning("a host is down: its servers are evacuated", host=host, count=len(look.servers))
    return is_begun


def chore(policy: EvacuationPolicy) -> Chore:
    """Return the sweep's chore that evacuates hosts that went down."""
    return Chore(
        lambda engine: evacuate(engine.store, policy), PERIOD_SECONDS, needs_certainty=True
    )


def refusal(evacuates: bool, fencing_hook: str) -> str:
    """Return why the configuration of automatic evacuation is invalid, or ""."""
    return (
        "[ha] evacuate is set, but [conductor] fencing_hook is not: set a fencing hook, because silence does not "
        "prove that the guests of a host are dead"
        if evacuates and not fencing_hook
        else ""
    )
