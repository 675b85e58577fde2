# SPDX-License-Identifier: Apache-2.0
"""Filters for the scheduler hints ``same_host`` and ``different_host``.

The snapshot contains only the hosts of the project's own servers. A hint therefore cannot reveal
the host of another project's server.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.domain.models import RequestSpec
from scheduler.filters.check import Check
from scheduler.snapshot import Mask, Snapshot


def different_host(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require a host without the project's servers that the hint ``different_host`` names.

    A request without the hint has no check.
    """
    if servers := _read_hint(spec, "different_host"):
        yield Check(~_find_hosts(snapshot, servers), "with a server that different_host names")


def same_host(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require a host with at least one of the project's servers that the hint ``same_host`` names.

    A request without the hint has no check.
    """
    if servers := _read_hint(spec, "same_host"):
        yield Check(_find_hosts(snapshot, servers), "without a server that same_host names")


def _read_hint(spec: RequestSpec, hint: str) -> list[str]:
    value = spec.hints.get(hint) or []
    return [value] if isinstance(value, str) else [str(server) for server in value]


def _find_hosts(snapshot: Snapshot, servers: list[str]) -> Mask:
    mask = np.zeros(len(snapshot.names), np.bool_)
    hosts = (snapshot.places.get(server, "") for server in servers)
    mask[[snapshot.rows[host] for host in hosts if host in snapshot.rows]] = True
    return mask
