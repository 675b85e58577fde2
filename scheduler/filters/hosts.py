# SPDX-License-Identifier: Apache-2.0
"""Filters by the state of the host: its service, zone and aggregates."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.domain.models import RequestSpec
from common.store.schema import DamagedObject
from scheduler.filters.check import Check
from scheduler.snapshot import Snapshot


def all_hosts(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Accept every host."""
    return ()


def compute_status(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require a compute service that is up and not forced down."""
    yield Check(snapshot.served, "without a compute service")
    yield Check(~snapshot.forced_down, "forced down")
    yield Check(snapshot.up, "without a recent report")


def enabled(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require a host that is not disabled.

    No option disables this check, because the claim also rejects disabled hosts. Requests with
    ``force_host`` and rebuilds do not have this check.
    """
    yield Check(~snapshot.disabled, "disabled")


def known_aggregates(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require that the metadata of all aggregates of the host are readable.

    Why: damaged metadata may have reserved the host for certain projects, images or flavors.
    """
    damaged = [
        aggregate.members
        for aggregate in snapshot.aggregates
        if isinstance(aggregate.meta, DamagedObject)
    ]
    if damaged:
        passes = ~np.logical_or.reduce(damaged)
        yield Check(passes, "in an aggregate whose metadata is damaged (kilonova doctor)")


def availability_zone(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Require a host in the requested availability zone.

    A request without a zone has no check.
    """
    if spec.availability_zone is not None:
        number = snapshot.zone_numbers.get(spec.availability_zone, -1)
        yield Check(snapshot.zones == number, f"not in zone {spec.availability_zone}")
