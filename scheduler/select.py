# SPDX-License-Identifier: Apache-2.0
"""Choose hosts: candidates, filters, weighers, reasons. Pure: the same input gives the same answer.

Called by ``scheduler.service`` with a snapshot that it may use up: each server of the list takes its first
choice from the same remaining columns, so a request for many is one pass. Every host that is not a
candidate is rejected for exactly one reason, the first that holds.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.models import RequestSpec, Selection
from scheduler.filters import FILTERS, Check
from scheduler.filters.placement import named_hosts, resources
from scheduler.hosts import seed
from scheduler.snapshot import Mask, Numbers, Snapshot
from scheduler.weighers import WEIGHERS, Weights, normalised

NEAR = 0.01      # hosts whose weights differ by less (of the sum of multipliers) count as equally good
NAMED = 1000     # most hosts that one selection names, so that an answer stays small


@dataclass(frozen=True, slots=True)
class Options:
    """``hosts``: most hosts in an answer, the first choice and its alternates."""

    filters: tuple[str, ...] = ("ComputeFilter", "AvailabilityZoneFilter")
    multipliers: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(WEIGHERS, 1.0))
    hosts: int = 3


def select(snapshot: Snapshot, specs: Sequence[RequestSpec], options: Options) -> list[Selection]:
    """One selection for each spec, in the same order; an empty ``hosts`` means that no host fits now."""
    selections, zones = [], {number: zone for zone, number in snapshot.zone_numbers.items()}
    for spec in specs:
        passing, rejections = examine(snapshot, spec, options)
        rows = _best(snapshot, spec, passing, options)
        if rows.size:
            hosts = [snapshot.names[row] for row in rows]
            snapshot.take(hosts[0], spec.resources)
            selections.append(Selection(spec.server, hosts, zones={
                snapshot.names[row]: zones[int(snapshot.zones[row])] for row in rows}))
        else:
            selections.append(Selection(spec.server, [], _sentence(snapshot, rejections),
                                        _by_host(snapshot, rejections)))
    return selections


def examine(snapshot: Snapshot, spec: RequestSpec, options: Options) -> tuple[Mask, list[tuple[Check, Mask]]]:
    """The hosts that pass every check, and each check with the hosts that it was the first to reject."""
    passing = np.ones(len(snapshot.names), np.bool_)
    rejections = []
    for check in _checks(snapshot, spec, options):
        rejected = passing & ~check.passes
        if rejected.any():
            rejections.append((check, rejected))
            passing &= check.passes
    return passing, rejections


def _checks(snapshot: Snapshot, spec: RequestSpec, options: Options) -> Iterator[Check]:
    yield from named_hosts(snapshot, spec)
    for name in options.filters:
        yield from FILTERS[name](snapshot, spec)
    yield from resources(snapshot, spec)


def _best(snapshot: Snapshot, spec: RequestSpec, passing: Mask, options: Options) -> Numbers:
    """Rows of the best hosts, best first."""
    rows = np.flatnonzero(passing)
    if not rows.size:
        return rows
    score = np.zeros(rows.size)
    for name, multiplier in options.multipliers.items():
        if multiplier:
            score += multiplier * normalised(WEIGHERS[name](snapshot)[rows])
    spread = NEAR * sum(map(abs, options.multipliers.values())) or NEAR
    score += spread * _lots(snapshot, spec, rows)
    if rows.size > options.hosts:
        best = np.argpartition(-score, options.hosts)[:options.hosts]
        rows, score = rows[best], score[best]
    return rows[np.argsort(-score, kind="stable")]


def _lots(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Weights:
    """A number from 0 to 1 for each host, drawn from the server's id and the host's name."""
    mixed = (snapshot.seeds[rows] ^ np.uint64(seed(spec.server))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2.0 ** 24


def _sentence(snapshot: Snapshot, rejections: list[tuple[Check, Mask]]) -> str:
    """``12 hosts: 7 not in zone az1, 4 short of MEMORY_MB (need 4096, most free 2048), 1 disabled``."""
    total = len(snapshot.names)
    if not total:
        return "There is no host yet."
    counted = sorted(((int(rejected.sum()), check.for_many(rejected)) for check, rejected in rejections),
                     key=lambda item: -item[0])
    return f"{total} host{'s' * (total != 1)}: " + ", ".join(f"{count} {text}" for count, text in counted)


def _by_host(snapshot: Snapshot, rejections: list[tuple[Check, Mask]]) -> dict[str, str]:
    named = ((snapshot.names[row], check.for_one(int(row)))
             for check, rejected in rejections for row in np.flatnonzero(rejected))
    return {name: text for (name, text), _ in zip(named, range(NAMED), strict=False)}
