# SPDX-License-Identifier: Apache-2.0
"""Filters for the scheduler hints ``same_host`` and ``different_host``: near to other servers of
one's own, or away.

Where those servers are comes with the snapshot, of the request's own project only: of others'
servers nothing is known here, so a hint cannot be used to find them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.domain.models import RequestSpec
from scheduler.filters.check import Check
from scheduler.snapshot import Mask, Snapshot


def different_host(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """None of the servers that the hint names is on the host."""
    if servers := _named(spec, "different_host"):
        yield Check(~_hosts_of(snapshot, servers), "with a server that different_host names")


def same_host(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """One of the servers that the hint names is on the host."""
    if servers := _named(spec, "same_host"):
        yield Check(_hosts_of(snapshot, servers), "without a server that same_host names")


def _named(spec: RequestSpec, hint: str) -> list[str]:
    found = spec.hints.get(hint) or []
    return [found] if isinstance(found, str) else [str(server) for server in found]


def _hosts_of(snapshot: Snapshot, servers: list[str]) -> Mask:
    there = np.zeros(len(snapshot.names), np.bool_)
    hosts = (snapshot.places.get(server, "") for server in servers)
    there[[snapshot.rows[host] for host in hosts if host in snapshot.rows]] = True
    return there
