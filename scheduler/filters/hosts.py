# SPDX-License-Identifier: Apache-2.0
"""Filters that look at the host itself: its service, its zone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.domain.models import RequestSpec
from common.store.schema import DamagedObject
from scheduler.filters.check import Check
from scheduler.snapshot import Snapshot


def all_hosts(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Any host will do."""
    return ()


def compute_status(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host's agent is known, not forced down and heard from."""
    yield Check(snapshot.served, "without a compute service")
    yield Check(~snapshot.forced_down, "forced down")
    yield Check(snapshot.up, "not heard from")


def enabled(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """Nobody has taken the host out of use. The claim holds to it, so it is asked whatever the
    operator enables."""
    yield Check(~snapshot.disabled, "disabled")


def known_aggregates(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The metadata of the host's aggregates can be read.

    Why: a damaged document may have kept the host for some projects, images or flavors."""
    damaged = [
        aggregate.members
        for aggregate in snapshot.aggregates
        if isinstance(aggregate.meta, DamagedObject)
    ]
    if damaged:
        passes = ~np.logical_or.reduce(damaged)
        yield Check(passes, "in an aggregate whose metadata is damaged (kilonova doctor)")


def availability_zone(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
    """The host is in the zone that was asked for; any will do when none was."""
    if spec.availability_zone is not None:
        number = snapshot.zone_numbers.get(spec.availability_zone, -1)
        yield Check(snapshot.zones == number, f"not in zone {spec.availability_zone}")
