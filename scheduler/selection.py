# SPDX-License-Identifier: Apache-2.0
"""Select hosts for servers: filter, score, and explain rejections.

The functions are pure: the same input gives the same result. ``scheduler.proposals`` calls
``select`` with a snapshot that the call may change. Requests that differ only in their server are
filtered and scored once. Each server of such a batch then takes the best host with room, and only
the score of that host changes.

Invariant: every host that is not a candidate has exactly one reason, from the first check that
rejects the host.

``explain`` answers operators with the same checks and weighers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter

import numpy as np

from common.domain import numa
from common.domain.hardware import Hardware, hardware
from common.domain.models import Explanation, HardwareAssignment, RequestSpec, Selection
from common.service.log import get_logger
from scheduler.filters import Check, Filters
from scheduler.filters.check import UNLIMITED
from scheduler.snapshot import Mask, Numbers, Snapshot
from scheduler.weighers import Weigher, scores

log = get_logger(__name__)
#: Hosts with a reason in one selection. The limit keeps the response small.
MAX_NAMED_HOSTS = 1000
#: Candidates in an explanation.
MAX_EXPLAINED_HOSTS = 10
#: Limit up to which an explanation counts the servers that fit on a host, because counting NUMA and
#: PCI fits is slow.
MAX_EXPLAINED_SERVERS = 1000
#: All fields of a request except the server's id.
_REQUIREMENTS = attrgetter(*(field.name for field in fields(RequestSpec) if field.name != "server"))


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """Options of a selection.

    Attributes:
        filters: The enabled filters.
        weighers: The enabled weighers.
        hosts: Largest number of hosts in an answer: the first choice and its alternates.
        metrics: Metrics that a host must report to be a candidate.
    """

    filters: Filters
    weighers: tuple[Weigher, ...]
    hosts: int = 3
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """Result of all checks of a request.

    Attributes:
        passing: The hosts that pass every check.
        room: How many equal servers fit on each host, or None if no check limits the number.
        removed: Each check that rejected hosts, with the hosts for which it was the first to do so.
        settles: True if the first placed server changes the set of passing hosts.
    """

    passing: Mask
    room: Numbers | None
    removed: list[tuple[Check, Mask]]
    settles: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The proposal for one server.

    Attributes:
        selection: The hosts, best first, or the reasons why no host fits.
        assignment: NUMA nodes, CPUs and devices for the server on the first host, or None if the
            server needs no exclusive hardware.
    """

    selection: Selection
    assignment: HardwareAssignment | None = field(default=None)


def select(
    snapshot: Snapshot, specs: Sequence[RequestSpec], options: SelectionOptions
) -> list[Choice]:
    """Return a choice for each request, in the order of ``specs``.

    If no host fits a request now, ``hosts`` of its selection is empty. Each server with a host is
    counted as placed in ``snapshot``, which is changed. If a filter or weigher raises, the
    exception is logged, and only this request and later equal requests get choices without hosts.
    """
    choices: dict[int, Choice] = {}
    for numbers in _group_equal_requests(specs):
        remaining = list(numbers)
        while remaining:
            batch = [specs[number] for number in remaining]
            try:
                batch_choices = _choose(snapshot, batch, options)
            # A defect in a filter or weigher must not fail the other requests of this call.
            except Exception as problem:
                log.exception("the selection of a host for a server failed", server=batch[0].server)
                batch_choices = [
                    Choice(
                        Selection(
                            spec.server,
                            [],
                            f"The scheduler failed on this request ({type(problem).__name__}); see the "
                            "scheduler's log.",
                        )
                    )
                    for spec in batch
                ]
            choices.update(zip(remaining, batch_choices, strict=False))
            remaining = remaining[len(batch_choices) :]
    return [choices[number] for number in range(len(specs))]


def _group_equal_requests(specs: Sequence[RequestSpec]) -> list[list[int]]:
    """Group the positions of requests that differ only in their server."""
    batches: list[tuple[object, list[int]]] = []
    for number, spec in enumerate(specs):
        requirements = _REQUIREMENTS(spec)
        for batch_requirements, numbers in reversed(batches):
            if batch_requirements == requirements:
                numbers.append(number)
                break
        else:
            batches.append((requirements, [number]))
    return [numbers for _, numbers in batches]


def _choose(
    snapshot: Snapshot, batch: Sequence[RequestSpec], options: SelectionOptions
) -> list[Choice]:
    """Choose hosts for equal requests, from the first on, and count the servers as placed.

    Returns:
        Choices for as many requests as hosts have room for, at least one. Only one choice, if the
        first placed server changes the set of passing hosts. If no host passes, every request gets
        a choice without hosts.
    """
    spec = batch[0]
    examination = examine(snapshot, spec, options, len(batch))
    rows = np.flatnonzero(examination.passing)
    if not rows.size:
        reason, by_host = (
            summarize(snapshot, examination),
            describe_rejections(snapshot, examination),
        )
        return [Choice(Selection(request.server, [], reason, by_host)) for request in batch]
    return _place(snapshot, batch[:1] if examination.settles else batch, examination, rows, options)


def examine(
    snapshot: Snapshot, spec: RequestSpec, options: SelectionOptions, count: int = 1
) -> Examination:
    """Apply all checks of the request to all hosts, and return the result.

    This may change ``snapshot.places``, but places no server. Requests with ``force_host`` and
    rebuilds have no check of metrics.

    Args:
        snapshot: The hosts.
        spec: The request.
        options: The filters and required metrics.
        count: Number of equal servers. ``room`` is only computed if this is more than 1.
    """
    if snapshot.places_by_project:
        snapshot.places = snapshot.places_by_project.get(spec.project_id, {})
    passing = np.ones(len(snapshot.names), np.bool_)
    remaining, removed, settles, room = passing.size, [], False, None
    for check in chain(
        options.filters.checks(snapshot, spec, passing, count),
        () if spec.force_host or spec.is_rebuild else _check_metrics(snapshot, options.metrics),
    ):
        still_passing = passing & check.passes
        passing_number = int(np.count_nonzero(still_passing))
        if passing_number < remaining:
            removed.append((check, passing & ~check.passes))
            passing[:] = still_passing
            remaining = passing_number
        settles |= check.settles
        if check.room is not None and count > 1:
            room = check.room if room is None else np.minimum(room, check.room)
    return Examination(passing, room, removed, settles)


def _check_metrics(snapshot: Snapshot, metrics: Iterable[str]) -> Iterator[Check]:
    for name in metrics:
        values = snapshot.metrics.get(name)
        yield Check(
            np.zeros(len(snapshot.names), np.bool_) if values is None else ~np.isnan(values),
            f"without the metric {name}",
        )


def _place(
    snapshot: Snapshot,
    batch: Sequence[RequestSpec],
    examination: Examination,
    rows: Numbers,
    options: SelectionOptions,
) -> list[Choice]:
    """Place each server on the best host with room, and return the choices with alternates.

    The servers are counted as placed in ``snapshot``. The alternates are the next hosts with room.
    If the room ends, the last servers get no choice, and the result is shorter than ``batch``.

    Only the best ``len(batch) + options.hosts`` hosts can be chosen, because each placement changes
    the score and the room of one host.
    """
    spec = batch[0]
    host_scores = scores(snapshot, spec, rows, options.weighers)
    order = best(host_scores.score, len(batch) + options.hosts)
    steps = np.broadcast_to(host_scores.step, rows.shape)[order].tolist()
    candidate_rows = rows[order].tolist()
    room = (
        [UNLIMITED] * len(candidate_rows)
        if examination.room is None
        else examination.room[rows[order]].tolist()
    )
    # The list is sorted, so it is a valid heap.
    heap = [(-score, place) for place, score in enumerate(host_scores.score[order].tolist())]
    zones = {number: zone for zone, number in snapshot.zone_numbers.items()}
    needed_hardware = _read_hardware(snapshot, spec)
    choices = []
    for request in batch:
        top = [heapq.heappop(heap) for _ in range(min(options.hosts, len(heap)))]
        if not top:
            break
        score, place = top[0]
        assignment = _take(snapshot, request, candidate_rows[place], needed_hardware)
        proposed_rows = [candidate_rows[other] for _, other in top]
        choices.append(
            Choice(
                Selection(
                    request.server,
                    [snapshot.names[row] for row in proposed_rows],
                    zones={
                        snapshot.names[row]: zones.get(int(snapshot.zones[row]), "")
                        for row in proposed_rows
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
    """Return the positions of the ``number`` highest scores, best first, or of all if fewer.

    Equal scores keep their order.
    """
    if score.size <= number:
        return np.argsort(-score, kind="stable")
    limit = np.partition(score, score.size - number)[score.size - number]
    above = np.flatnonzero(score >= limit)
    return above[np.argsort(-score[above], kind="stable")[:number]]


def _read_hardware(snapshot: Snapshot, spec: RequestSpec) -> Hardware | None:
    """Return the server's requirements for exclusive hardware.

    Returns:
        None for a server without such requirements, for a request without a flavor, for a rebuild,
        and if no host has NUMA nodes or devices.
    """
    if spec.flavor is None or spec.is_rebuild or not snapshot.parts:
        return None
    required = hardware(spec.flavor, spec.image_properties)
    return required if required.needs_assignment else None


def _take(
    snapshot: Snapshot, spec: RequestSpec, row: int, needed_hardware: Hardware | None
) -> HardwareAssignment | None:
    """Count the server as placed on the host, and return its hardware assignment.

    A rebuild counts without resources.

    Returns:
        None if the server needs no exclusive hardware, or if the host has no fit for it.
    """
    assignment = None
    if needed_hardware is not None and row in snapshot.parts:
        parts = snapshot.parts[row]
        assignment = numa.fit(parts.numa_nodes, parts.devices, parts.held, needed_hardware)
    snapshot.take(
        snapshot.names[row], {} if spec.is_rebuild else spec.resources, spec.group, assignment
    )
    return assignment


# --- Reasons of rejected hosts ---
def summarize(snapshot: Snapshot, examination: Examination) -> str:
    """Return a summary of all rejections, most frequent first, or a sentence if no host exists.

    For example, ``12 hosts: 7 not in zone az1, 4 short of MEMORY_MB (need 4096, most free 2048), 1
    disabled``.
    """
    total = len(snapshot.names)
    if not total:
        return "There is no host yet."
    reasons = sorted(
        (
            (int(np.count_nonzero(rejected)), check.for_many(rejected))
            for check, rejected in examination.removed
        ),
        key=lambda item: -item[0],
    )
    return f"{total} host{'s' * (total != 1)}: " + ", ".join(
        f"{count} {text}" for count, text in reasons
    )


def describe_rejections(snapshot: Snapshot, examination: Examination) -> dict[str, str]:
    """Return host name -> reason for the rejected hosts, at most ``MAX_NAMED_HOSTS``."""
    texts = (
        (snapshot.names[row], check.for_one(row))
        for check, rejected in examination.removed
        for row in np.flatnonzero(rejected).tolist()
    )
    return {name: text for (name, text), _ in zip(texts, range(MAX_NAMED_HOSTS), strict=False)}


# --- Explanations for operators ---
def explain(snapshot: Snapshot, spec: RequestSpec, options: SelectionOptions) -> Explanation:
    """Explain how the scheduler would answer the request now, without placing a server.

    In ``room``, the number of servers that fit in each zone, a host counts as one server if no
    check limits the number of servers there. If the first server of an affinity group decides the
    host for the others, the room of a zone is that of its roomiest host. Fits of NUMA nodes and PCI
    devices are counted up to ``MAX_EXPLAINED_SERVERS``.
    """
    examination = examine(snapshot, spec, options, MAX_EXPLAINED_SERVERS)
    rows = np.flatnonzero(examination.passing)
    hosts = []
    if rows.size:
        score = scores(snapshot, spec, rows, options.weighers).score
        hosts = [snapshot.names[row] for row in rows[best(score, MAX_EXPLAINED_HOSTS)].tolist()]
    removed = [
        {"hosts": int(np.count_nonzero(rejected)), "text": check.for_many(rejected)}
        for check, rejected in examination.removed
    ]
    return Explanation(
        len(snapshot.names),
        int(rows.size),
        hosts,
        _count_room_by_zone(snapshot, examination),
        removed,
        summarize(snapshot, examination) if removed or not snapshot.names else "",
        describe_rejections(snapshot, examination),
    )


def _count_room_by_zone(snapshot: Snapshot, examination: Examination) -> dict[str, int]:
    """Return how many such servers fit in each zone, as in ``explain``.

    Zones without a passing host are included, with 0.
    """
    room = examination.passing.astype(np.int64)
    if examination.room is not None:
        room = np.where(
            examination.room < UNLIMITED,
            np.maximum(examination.room, 0) * examination.passing,
            room,
        )
    combine = np.max if examination.settles else np.sum
    return {
        zone: int(combine(room, where=snapshot.zones == number, initial=0))
        for zone, number in sorted(snapshot.zone_numbers.items())
    }
