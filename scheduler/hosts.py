# SPDX-License-Identifier: Apache-2.0
"""The scheduler's memory of the hosts: read from the store, kept fresh, less what was just
proposed.

``scheduler.proposals`` asks ``Hosts`` for a ``Snapshot`` and hands it to ``scheduler.selection``. A
read happens only when asked and at most every 50 ms: hosts changed since the last read less 5 s (a
change may commit later than another one with a younger time) that are not known as they are there,
and in turn some of the others, so that all are read within a minute without a pause for any
request. A proposal is taken off its host until that provider's generation moves or 5 s pass; it
spreads parallel requests and is never a reason to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from common.domain.clock import SECOND, Clock
from common.domain.models import HardwareAssignment, RequestSpec
from common.store.engine import Connection, Store
from common.store.placement import host_states
from common.store.placement.host_states import GroupRow, Marks
from scheduler.columns import Columns, seed
from scheduler.snapshot import Group, Snapshot

__all__ = ["Hosts", "ReadOptions", "RequestFacts", "seed"]
MIN_READ_INTERVAL_SECONDS = 0.05  #: between two reads
ROUND_SECONDS = 60.0  #: in which every host is read, whatever changed
COUNT_INTERVAL_SECONDS = 1.0  #: between two looks whether hosts are gone
METRICS_INTERVAL_SECONDS = 10.0  #: between two reads of what agents measured
BATCH_SIZE = 2000  #: hosts in one statement when many are read
MAX_HOSTS_IN_TURN = 2000  #: hosts whose turn it is, at most, in one read
OVERLAP_MICROS = 5 * SECOND  #: how much later than its time a change may become visible
PROPOSAL_SECONDS = 5.0  #: that a proposal counts
HINTS = ("same_host", "different_host")  #: hints that name servers


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What of the hosts somebody looks at."""

    default_zone: str = "nova"
    pause: int = 300  #: seconds that a host with failed builds is left out
    metrics: bool = False  #: what agents measure
    images: bool = False  #: the images of the servers there


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What was read for some requests alone: their groups, and by project where servers are that
    their hints name."""

    groups: dict[str, GroupRow]
    places: dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class _Proposal:
    host: str
    generation: int
    resources: dict[str, int]
    group: str | None
    assignment: HardwareAssignment | None
    at: float


class Hosts:
    """The scheduler's memory of the hosts. One thread uses it."""

    def __init__(self, store: Store, clock: Clock, wants: ReadOptions | None = None) -> None:
        self._store = store
        self._clock = clock
        self._wants = wants or ReadOptions()
        self._columns = Columns()
        self._proposals: dict[str, _Proposal] = {}  # by server
        self._marks = Marks(0, 0, 0, 0)
        self._turn = 0  # the provider whose turn was last
        self._measured_at = 0
        self._properties: dict[str, dict[str, str]] = {}  # by image
        self._refreshed = self._counted = self._measured = float("-inf")

    # --- reading ---
    def refresh(self, at_once: bool = False) -> bool:
        """Read what changed, unless the last read is younger than 50 ms and ``at_once`` is false.

        Returns:
            whether it read.
        Raises:
            Unavailable: the database does not answer.
        """
        moment = self._clock.monotonic()
        if not at_once and moment - self._refreshed < MIN_READ_INTERVAL_SECONDS:
            return False
        self._store.read(lambda tx: self._read(tx, moment, at_once))
        self._refreshed = moment
        self._forget_old(moment)
        return True

    def _read(self, tx: Connection, moment: float, at_once: bool) -> None:
        """Each statement's rows are taken in before the next is sent, so memory holds few; repeated
        as a whole it does no harm."""
        columns, before = self._columns, self._marks
        since = before.read_at - OVERLAP_MICROS
        marks = host_states.marks(tx, since)
        moved = self._read_hosts(tx, columns.outdated(marks.changed, before.read_at))
        moved |= self._read_hosts(tx, self._whose_turn(moment))
        if at_once or moment - self._counted >= COUNT_INTERVAL_SECONDS:
            moved |= self._drop_gone(tx)
            self._counted = moment
        known = set() if moved else {aggregate.id for aggregate in columns.base.aggregates}
        if (
            moved
            or not columns.base.zone_numbers
            or marks.newest >= since
            or (marks.number, marks.total) != (before.number, before.total)
        ):
            rows, members = host_states.aggregates_with(tx, known, since)
            columns.fill_aggregates(rows, members, self._wants.default_zone)
        columns.fill_working(host_states.working(tx))
        self._read_extras(tx, moment)
        self._marks = replace(marks, changed=())

    def _read_hosts(self, tx: Connection, ids: Sequence[int]) -> bool:
        """Read all about the hosts of these providers; returns whether rows moved."""
        moved = False
        for start in range(0, len(ids), BATCH_SIZE):
            moved |= self._columns.take_in(
                host_states.read(tx, ids[start : start + BATCH_SIZE], self._wants.images)
            )
        return moved

    def _whose_turn(self, moment: float) -> list[int]:
        """Providers to read although nobody says that they changed: a share of all as large as the
        share of a minute that went by."""
        columns = self._columns
        share = (
            min(1.0, (moment - self._refreshed) / ROUND_SECONDS)
            if self._refreshed > float("-inf")
            else 0.0
        )
        number = min(MAX_HOSTS_IN_TURN, int(share * columns.ids.size))
        if not number:
            return []
        ahead = columns.ids[columns.ids > self._turn][:number]
        if not ahead.size:
            columns.tidy()
        self._turn = int(ahead[-1]) if ahead.size else 0
        return ahead.tolist()  # type: ignore[no-any-return]

    def _drop_gone(self, tx: Connection) -> bool:
        """Hosts are gone when their number is another than is known: look which."""
        columns = self._columns
        if host_states.count(tx) == columns.ids.size:
            return False
        gone = sorted(set(columns.ids.tolist()) - set(host_states.ids(tx)))
        columns.drop(gone)
        return bool(gone)

    def _read_extras(self, tx: Connection, moment: float) -> None:
        """What only some weighers look at."""
        columns = self._columns
        if self._wants.metrics and moment - self._measured >= METRICS_INTERVAL_SECONDS:
            columns.fill_metrics(host_states.metrics(tx, self._measured_at - OVERLAP_MICROS))
            self._measured, self._measured_at = moment, self._marks.read_at
        if self._wants.images and columns.images_moved:
            images = {image for found in columns.images.values() for image in found}
            found = host_states.image_properties(tx, images - self._properties.keys())
            self._properties = {
                image: text
                for image, text in {**self._properties, **found}.items()
                if image in images
            }
            columns.fill_images(self._properties)

    def around(self, specs: Sequence[RequestSpec]) -> RequestFacts:
        """Read what these requests alone name.

        Raises:
            Unavailable: the database does not answer.
        """
        groups = {spec.group for spec in specs if spec.group}
        named: dict[str, set[str]] = {}
        for spec in specs:
            for hint in HINTS:
                hint_value = spec.hints.get(hint)
                servers = (
                    [hint_value]
                    if isinstance(hint_value, str)
                    else hint_value
                    if isinstance(hint_value, list)
                    else []
                )
                named.setdefault(spec.project_id, set()).update(map(str, servers))
        asked = {project: servers for project, servers in named.items() if servers}
        if not groups and not asked:
            return RequestFacts({}, {})
        ours = [spec.server for spec in specs]
        return self._store.read(
            lambda tx: RequestFacts(
                host_states.groups(tx, groups, ours) if groups else {},
                {
                    project: host_states.places(tx, wanted, project)
                    for project, wanted in asked.items()
                },
            )
        )

    # --- what was read ---
    def snapshot(self, around: RequestFacts | None = None, proposals: bool = True) -> Snapshot:
        """The hosts as last read, less the proposals in flight when asked so; the caller's own to
        take from."""
        copy = self._columns.base.copy()
        copy.pause = self._wants.pause
        self._fill_waits(copy)
        for name, group in around.groups.items() if around is not None else ():
            copy.groups[name] = Group(
                group.policy,
                group.most,
                {
                    copy.rows[host]: number
                    for host, number in group.members.items()
                    if host in copy.rows
                },
            )
        copy.places_by_project = around.places if around is not None else {}
        for proposal in self._proposals.values() if proposals else ():
            copy.take(proposal.host, proposal.resources, proposal.group, proposal.assignment)
        return copy

    def _fill_waits(self, copy: Snapshot) -> None:
        if copy.failures.any():
            now = self._marks.read_at + (self._clock.monotonic() - self._refreshed) * SECOND
            left = (self._columns.own["failed_at"] - now) / SECOND + self._wants.pause
            copy.waits = np.where(copy.failures > 0, np.ceil(np.maximum(left, 0)), 0).astype(
                np.int64
            )

    # --- proposals ---
    def propose(
        self, spec: RequestSpec, host: str, assignment: HardwareAssignment | None = None
    ) -> None:
        """Remember that the server was proposed for the host."""
        columns = self._columns
        generation = int(columns.own["generations"][columns.base.rows[host]])
        self._proposals[spec.server] = _Proposal(
            host, generation, spec.resources, spec.group, assignment, self._clock.monotonic()
        )

    def withdraw(self, servers: Iterable[str]) -> None:
        """Forget the proposals for servers that are asked for again: they came to nothing."""
        for server in servers:
            self._proposals.pop(server, None)

    def _forget_old(self, moment: float) -> None:
        columns = self._columns
        for server, proposal in list(self._proposals.items()):
            row = columns.base.rows.get(proposal.host)
            moved = row is None or int(columns.own["generations"][row]) != proposal.generation
            if moved or moment - proposal.at > PROPOSAL_SECONDS:
                del self._proposals[server]
