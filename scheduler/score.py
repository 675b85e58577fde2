# SPDX-License-Identifier: Apache-2.0
"""How good each host is for a request: what all weighers say of it, as one number, and how a server changes it.

Pure; called by ``scheduler.select`` for the hosts that passed. Each weigher is spread over 0 to 1 and multiplied; near
ties are broken by a number drawn from the server's id and the host's name, so that parallel requests spread.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.models import RequestSpec
from scheduler.columns import seed
from scheduler.snapshot import Floats, Numbers, Snapshot
from scheduler.weighers import Weigher

NEAR = 0.01         # hosts whose scores differ by less, of the sum of multipliers, count as equally good
LARGEST = 10.0      # a multiplier beyond it is there to settle all, and blurs no other


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the hosts in the rows asked for: the score, and what each server that is placed adds to it."""

    score: Floats
    step: Floats | float


def scores(snapshot: Snapshot, spec: RequestSpec, rows: Numbers, weighers: Sequence[Weigher]) -> Scores:
    """Score the hosts in these rows."""
    score, steps, spread = np.zeros(rows.size), _Steps(), 0.0
    overridden = _overridden(snapshot, weighers)
    for weigher in weighers:
        multiplier: Floats | float = weigher.multiplier
        if weigher.key in overridden:
            multiplier = overridden[weigher.key][rows]
        elif not weigher.multiplier:
            continue
        weights = weigher.weigh(snapshot, spec, rows)
        if weights is None:
            continue
        low, high = float(weights.min()), float(weights.max())
        step = weigher.step(snapshot, spec)
        if high > low:
            weights -= low
            weights *= multiplier / (high - low)
            score += weights
            spread += min(LARGEST, float(np.abs(multiplier).max()))
        if step:
            steps.add(multiplier * (step / max(high - low, abs(step))))
    score += NEAR * (spread or 1.0) * _lots(snapshot, spec, rows)
    return Scores(score, steps.total)


class _Steps:
    """A sum that stays one number while all its parts are."""

    def __init__(self) -> None:
        self.total: Floats | float = 0.0

    def add(self, part: Floats | float) -> None:
        self.total = self.total + part


def _overridden(snapshot: Snapshot, weighers: Sequence[Weigher]) -> dict[str, Floats]:
    """Multipliers that aggregates set, a number a host: the smallest of several, the option's where none sets it.
    A word that is no number counts for nothing, together with all else that is said for that host."""
    found: dict[str, Floats] = {}
    wrong: dict[str, list[int]] = {}
    options = {weigher.key: weigher.multiplier for weigher in weighers}
    for number, aggregate in enumerate(snapshot.aggregates):
        for key in aggregate.meta.keys() & options.keys():
            least = found.setdefault(key, np.full(len(snapshot.names), np.inf))
            try:
                value = float(aggregate.meta[key])
            except ValueError:
                wrong.setdefault(key, []).append(number)
            else:
                if np.isfinite(value):
                    np.minimum(least, value, out=least, where=aggregate.members)
    for key, least in found.items():
        for number in wrong.get(key, ()):
            least[snapshot.aggregates[number].members] = np.inf
        least[np.isinf(least)] = options[key]
    return found


def _lots(snapshot: Snapshot, spec: RequestSpec, rows: Numbers) -> Floats:
    """A number from 0 to 1 for each host, drawn from the server's id and the host's name."""
    mixed = (snapshot.seeds[rows] ^ np.uint64(seed(spec.server))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2.0 ** 24
