# SPDX-License-Identifier: Apache-2.0
"""Choose hosts: who passes, in which order, and why not the others. Pure: the same input gives the
same answer.

Called by ``scheduler.proposals`` with a snapshot that it may use up. Requests that are equal but
for their server are filtered and scored once; then each takes the best host that has room left,
which changes the score of that host alone. Every host that is not a candidate is rejected for
exactly one reason, the first that holds. ``explain`` answers the operator with the same checks and
weighers: who passes, how many more fit and where, why not the others.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter

import numpy as np

from common.domain import numa
from common.domain.hardware import Hardware, hardware
from common.domain.models import Explanation, HardwareAssignment, RequestSpec, Selection
from scheduler.filters import Check, Filters
from scheduler.filters.check import UNLIMITED
from scheduler.snapshot import Mask, Numbers, Snapshot
from scheduler.weighers import Weigher, scores

log = logging.getLogger(__name__)
MAX_NAMED_HOSTS = 1000  # that one selection names, so that an answer stays small
MAX_EXPLAINED_HOSTS = 10  # that an explanation names as candidates
MAX_EXPLAINED_SERVERS = 1000  # of one request that a host is asked for, where counting them costs
#: All that a request asks for, but for the server's name.
_WANTED = attrgetter(*(field.name for field in fields(RequestSpec) if field.name != "server"))


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """hosts: most hosts in an answer, the first choice and its alternates. metrics: those that a
    host must tell."""

    filters: Filters
    weighers: tuple[Weigher, ...]
    hosts: int = 3
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """passing: the hosts that pass every check. room: how many such servers each of them takes.
    removed: each check with the hosts that it was the first to reject. settles: the first server
    placed changes who passes."""

    passing: Mask
    room: Numbers | None
    removed: list[tuple[Check, Mask]]
    settles: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What one server is proposed: the hosts, best first, and which parts it would have of the
    first."""

    selection: Selection
    assignment: HardwareAssignment | None = field(default=None)


def select(
    snapshot: Snapshot, specs: Sequence[RequestSpec], options: SelectionOptions
) -> list[Choice]:
    """One choice for each spec, in the same order; an empty ``hosts`` means that no host fits
    now."""
    choices: dict[int, Choice] = {}
    for numbers in _batches(specs):
        left = list(numbers)
        while left:
            batch = [specs[number] for number in left]
            try:
                made = _choose(snapshot, batch, options)
            except (
                Exception
            ) as problem:  # a filter's or weigher's own mistake holds up nobody else's request
                log.exception("the request for server %s cannot be decided", batch[0].server)
                made = [
                    Choice(
                        Selection(
                            spec.server,
                            [],
                            f"The scheduler could not decide ({type(problem).__name__}); "
                            "its log says more.",
                        )
                    )
                    for spec in batch
                ]
            choices.update(zip(left, made, strict=False))
            left = left[len(made) :]
    return [choices[number] for number in range(len(specs))]


def _batches(specs: Sequence[RequestSpec]) -> list[list[int]]:
    """Positions of requests that are equal but for their server, together."""
    batches: list[tuple[object, list[int]]] = []
    for number, spec in enumerate(specs):
        wanted = _WANTED(spec)
        for known, numbers in reversed(batches):
            if known == wanted:
                numbers.append(number)
                break
        else:
            batches.append((wanted, [number]))
    return [numbers for _, numbers in batches]


def _choose(
    snapshot: Snapshot, batch: Sequence[RequestSpec], options: SelectionOptions
) -> list[Choice]:
    """Choices for the first of these equal requests: for as many as there was room, or for all that
    there is none."""
    spec = batch[0]
    found = examine(snapshot, spec, options, len(batch))
    rows = np.flatnonzero(found.passing)
    if not rows.size:
        reason, by_host = sentence(snapshot, found), named(snapshot, found)
        return [Choice(Selection(one.server, [], reason, by_host)) for one in batch]
    return _place(snapshot, batch[:1] if found.settles else batch, found, rows, options)


def examine(
    snapshot: Snapshot, spec: RequestSpec, options: SelectionOptions, count: int = 1
) -> Examination:
    """Ask all checks of all hosts; ``count`` equal servers are wanted."""
    if snapshot.places_by_project:
        snapshot.places = snapshot.places_by_project.get(spec.project_id, {})
    passing = np.ones(len(snapshot.names), np.bool_)
    left, removed, settles, room = passing.size, [], False, None
    for check in chain(
        options.filters.checks(snapshot, spec, passing, count),
        () if spec.force_host or spec.is_rebuild else _metric_checks(snapshot, options.metrics),
    ):
        still = passing & check.passes
        number = int(np.count_nonzero(still))
        if number < left:
            removed.append((check, passing & ~check.passes))
            passing[:] = still
            left = number
        settles |= check.settles
        if check.room is not None and count > 1:
            room = check.room if room is None else np.minimum(room, check.room)
    return Examination(passing, room, removed, settles)


def _metric_checks(snapshot: Snapshot, metrics: Iterable[str]) -> Iterator[Check]:
    for name in metrics:
        values = snapshot.metrics.get(name)
        yield Check(
            np.zeros(len(snapshot.names), np.bool_) if values is None else ~np.isnan(values),
            f"not telling the metric {name}",
        )


def _place(
    snapshot: Snapshot,
    batch: Sequence[RequestSpec],
    found: Examination,
    rows: Numbers,
    options: SelectionOptions,
) -> list[Choice]:
    """Give each server in turn the best host that has room; those after it in the order are its
    alternates.

    Only the best ``len(batch) + options.hosts`` hosts can ever be asked: a placement changes one
    host's score and room.
    """
    spec = batch[0]
    scored = scores(snapshot, spec, rows, options.weighers)
    order = best(scored.score, len(batch) + options.hosts)
    steps = np.broadcast_to(scored.step, rows.shape)[order].tolist()
    chosen = rows[order].tolist()
    room = [UNLIMITED] * len(chosen) if found.room is None else found.room[rows[order]].tolist()
    # sorted, so a heap
    heap = [(-score, place) for place, score in enumerate(scored.score[order].tolist())]
    zones = {number: zone for zone, number in snapshot.zone_numbers.items()}
    wanted = _fitted(snapshot, spec)
    choices = []
    for one in batch:
        top = [heapq.heappop(heap) for _ in range(min(options.hosts, len(heap)))]
        if not top:
            break
        score, place = top[0]
        assignment = _take(snapshot, one, chosen[place], wanted)
        taken = [chosen[other] for _, other in top]
        choices.append(
            Choice(
                Selection(
                    one.server,
                    [snapshot.names[row] for row in taken],
                    zones={
                        snapshot.names[row]: zones.get(int(snapshot.zones[row]), "")
                        for row in taken
                    },
                ),
                assignment,
            )
        )
        room[place] -= 1
        for key, other in top[1:]:
            heapq.heappush(heap, (key, other))
        if room[place] > 0:
            heapq.heappush(heap, (score - steps[place], place))
    return choices


def best(score: np.ndarray[tuple[int], np.dtype[np.float64]], number: int) -> Numbers:
    """Positions of the best, best first; of equals the one that comes first."""
    if score.size <= number:
        return np.argsort(-score, kind="stable")
    limit = np.partition(score, score.size - number)[score.size - number]
    above = np.flatnonzero(score >= limit)
    return above[np.argsort(-score[above], kind="stable")[:number]]


def _fitted(snapshot: Snapshot, spec: RequestSpec) -> Hardware | None:
    """What the server wants of its host piece by piece; None when nothing."""
    if spec.flavor is None or spec.is_rebuild or not snapshot.parts:
        return None
    wanted = hardware(spec.flavor, spec.image_properties)
    return wanted if wanted.needs_assignment else None


def _take(
    snapshot: Snapshot, spec: RequestSpec, row: int, wanted: Hardware | None
) -> HardwareAssignment | None:
    """Count the server as placed on the host."""
    assignment = None
    if wanted is not None and row in snapshot.parts:
        parts = snapshot.parts[row]
        assignment = numa.fit(parts.numa_nodes, parts.devices, parts.held, wanted)
    snapshot.take(
        snapshot.names[row], {} if spec.is_rebuild else spec.resources, spec.group, assignment
    )
    return assignment


# --- why not the others ---
def sentence(snapshot: Snapshot, found: Examination) -> str:
    """``12 hosts: 7 not in zone az1, 4 short of MEMORY_MB (need 4096, most free 2048), 1
    disabled``."""
    total = len(snapshot.names)
    if not total:
        return "There is no host yet."
    counted = sorted(
        (
            (int(np.count_nonzero(rejected)), check.for_many(rejected))
            for check, rejected in found.removed
        ),
        key=lambda item: -item[0],
    )
    return f"{total} host{'s' * (total != 1)}: " + ", ".join(
        f"{count} {text}" for count, text in counted
    )


def named(snapshot: Snapshot, found: Examination) -> dict[str, str]:
    """Each rejected host and why, so many that an answer stays small."""
    texts = (
        (snapshot.names[row], check.for_one(row))
        for check, rejected in found.removed
        for row in np.flatnonzero(rejected).tolist()
    )
    return {name: text for (name, text), _ in zip(texts, range(MAX_NAMED_HOSTS), strict=False)}


# --- for the operator ---
def explain(snapshot: Snapshot, spec: RequestSpec, options: SelectionOptions) -> Explanation:
    """What would become of the request now.

    In ``room`` a host that nothing limits counts for one server; where the first server of a group
    decides for the others, only the best host of each zone counts.
    """
    found = examine(snapshot, spec, options, MAX_EXPLAINED_SERVERS)
    rows = np.flatnonzero(found.passing)
    hosts = []
    if rows.size:
        score = scores(snapshot, spec, rows, options.weighers).score
        hosts = [snapshot.names[row] for row in rows[best(score, MAX_EXPLAINED_HOSTS)].tolist()]
    removed = [
        {"hosts": int(np.count_nonzero(rejected)), "text": check.for_many(rejected)}
        for check, rejected in found.removed
    ]
    return Explanation(
        len(snapshot.names),
        int(rows.size),
        hosts,
        _room(snapshot, found),
        removed,
        sentence(snapshot, found) if removed or not snapshot.names else "",
        named(snapshot, found),
    )


def _room(snapshot: Snapshot, found: Examination) -> dict[str, int]:
    """Zone -> how many such servers fit there, zones with no host that passes included."""
    room = found.passing.astype(np.int64)
    if found.room is not None:
        room = np.where(found.room < UNLIMITED, np.maximum(found.room, 0) * found.passing, room)
    together = np.max if found.settles else np.sum
    return {
        zone: int(together(room, where=snapshot.zones == number, initial=0))
        for zone, number in sorted(snapshot.zone_numbers.items())
    }
