# SPDX-License-Identifier: Apache-2.0
"""What would become of a request, without making anything: who passes, how many more fit and where, why not the others.

Pure; ``scheduler.proposals`` calls it for the operator. It asks the same checks and weighers as ``scheduler.select``.
"""
from __future__ import annotations

import numpy as np

from common.models import Explanation, RequestSpec
from scheduler.filters.check import UNLIMITED
from scheduler.score import scores
from scheduler.select import Found, Options, best, examine, named, sentence
from scheduler.snapshot import Snapshot

BEST = 10           # hosts that an explanation names as candidates
MOST = 1000         # servers of one request that a host is asked for, where counting them costs


def explain(snapshot: Snapshot, spec: RequestSpec, options: Options) -> Explanation:
    """What would become of the request now.

    In ``room`` a host that nothing limits counts for one server; where the first server of a group decides for the
    others, only the best host of each zone counts.
    """
    found = examine(snapshot, spec, options, MOST)
    rows = np.flatnonzero(found.passing)
    hosts = []
    if rows.size:
        score = scores(snapshot, spec, rows, options.weighers).score
        hosts = [snapshot.names[row] for row in rows[best(score, BEST)].tolist()]
    removed = [{"hosts": int(np.count_nonzero(rejected)), "text": check.for_many(rejected)}
               for check, rejected in found.removed]
    return Explanation(len(snapshot.names), int(rows.size), hosts, _room(snapshot, found), removed,
                       sentence(snapshot, found) if removed or not snapshot.names else "", named(snapshot, found))


def _room(snapshot: Snapshot, found: Found) -> dict[str, int]:
    """Zone -> how many such servers fit there, zones with no host that passes included."""
    room = found.passing.astype(np.int64)
    if found.room is not None:
        room = np.where(found.room < UNLIMITED, np.maximum(found.room, 0) * found.passing, room)
    together = np.max if found.settles else np.sum
    return {zone: int(together(room, where=snapshot.zones == number, initial=0))
            for zone, number in sorted(snapshot.zone_numbers.items())}
