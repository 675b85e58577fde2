# SPDX-License-Identifier: Apache-2.0
"""The scheduler's copy of the hosts, less recent proposals.

``scheduler.proposals`` refreshes ``Hosts`` and passes a ``Snapshot`` to ``scheduler.selection``.
The store is read only on request and at most every 50 ms. A read covers:

* hosts that changed since the last read. The window begins 5 s earlier, because a transaction may
  commit after another transaction with a later timestamp.
* a share of the other hosts, so that all are read within a minute and no request waits long.

A proposal is subtracted from its host until the provider's generation changes or 5 s pass. This
spreads parallel requests over the hosts. A proposal is never a reason to reject a request.
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
MIN_READ_INTERVAL_SECONDS = 0.05
#: Time in which every host is read again, changed or not.
ROUND_SECONDS = 60.0
#: Time between two checks for removed hosts.
COUNT_INTERVAL_SECONDS = 1.0
METRICS_INTERVAL_SECONDS = 10.0
#: Hosts per SQL statement.
BATCH_SIZE = 2000
#: Largest number of unchanged hosts in one read.
MAX_HOSTS_IN_TURN = 2000
#: Longest time between the timestamp of a change and its commit.
OVERLAP_MICROS = 5 * SECOND
#: Lifetime of a proposal.
PROPOSAL_SECONDS = 5.0
#: Scheduler hints with ids of servers.
HINTS = ("same_host", "different_host")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The data about hosts that the enabled filters and weighers need.

    Attributes:
        default_zone: Zone of hosts in no aggregate with a zone.
        pause: Seconds between two tries of a host with failed builds.
        metrics: Read the metrics that agents report.
        images: Read the images of the servers on each host.
    """

    default_zone: str = "nova"
    pause: int = 300
    metrics: bool = False
    images: bool = False


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Data that were read for particular requests.

    Attributes:
        groups: The server groups of the requests, by id.
        places: Project id -> server id -> host, for the servers in the requests' hints.
    """

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
    """The scheduler's copy of the hosts. Not thread-safe."""

    def __init__(self, store: Store, clock: Clock, wants: ReadOptions | None = None) -> None:
        self._store = store
        self._clock = clock
        self._wants = wants or ReadOptions()
        self._columns = Columns()
        #: By server.
        self._proposals: dict[str, _Proposal] = {}
        self._marks = Marks(0, 0, 0, 0)
        #: The last provider that was read in turn.
        self._turn = 0
        self._measured_at = 0
        #: By image.
        self._properties: dict[str, dict[str, str]] = {}
        self._refreshed = self._chosen = self._counted = self._measured = float("-inf")

    # --- Reading ---
    def refresh(self, at_once: bool = False) -> bool:
        """Read changes from the store, unless the last read is less than 50 ms old.

        A read also drops proposals that are older than 5 s or whose host has changed.

        Args:
            at_once: Read in any case, and check for removed hosts. Other reads check for removed
                hosts at most once per second.

        Returns:
            True if the store was read.

        Raises:
            Unavailable: The database does not answer.
        """
        moment = self._clock.monotonic()
        if not at_once and moment - self._refreshed < MIN_READ_INTERVAL_SECONDS:
            return False
        self._store.read(lambda tx: self._read(tx, moment, at_once))
        self._refreshed = moment
        self._drop_expired_proposals(moment)
        return True

    def _read(self, tx: Connection, moment: float, at_once: bool) -> None:
        """Update the columns with the data of hosts, aggregates, running disk copies and extras.

        The hosts are the changed hosts and the hosts of ``_choose_next``. They are read and copied
        in batches, which limits the memory.

        Removed hosts are dropped at most once per second, or with ``at_once``. Aggregates are read
        if they may have changed or rows have moved.

        The store may repeat the whole function after a conflict.
        """
        columns, last_marks = self._columns, self._marks
        since = last_marks.read_at - OVERLAP_MICROS
        marks = host_states.marks(tx, since)
        rows_moved = self._read_hosts(tx, columns.find_outdated(marks.changed, last_marks.read_at))
        rows_moved |= self._read_hosts(tx, self._choose_next(moment))
        if at_once or moment - self._counted >= COUNT_INTERVAL_SECONDS:
            rows_moved |= self._drop_removed(tx)
            self._counted = moment
        unchanged_aggregates = (
            set() if rows_moved else {aggregate.id for aggregate in columns.base.aggregates}
        )
        if (
            rows_moved
            or not columns.base.zone_numbers
            or marks.newest >= since
            or (marks.number, marks.total) != (last_marks.number, last_marks.total)
        ):
            rows, members = host_states.aggregates_with(tx, unchanged_aggregates, since)
            columns.fill_aggregates(rows, members, self._wants.default_zone)
        columns.fill_working(host_states.working(tx))
        self._read_extras(tx, moment)
        self._marks = replace(marks, changed=())

    def _read_hosts(self, tx: Connection, ids: Sequence[int]) -> bool:
        """Read all data about these providers, and return True if new hosts may have moved rows."""
        rows_moved = False
        for start in range(0, len(ids), BATCH_SIZE):
            rows_moved |= self._columns.update_hosts(
                host_states.read(tx, ids[start : start + BATCH_SIZE], self._wants.images)
            )
        return rows_moved

    def _choose_next(self, moment: float) -> list[int]:
        """Return the ids of the next providers to read again although no change was reported.

        Their share of all providers is the share of ``ROUND_SECONDS`` since the last call that
        returned ids, up to ``MAX_HOSTS_IN_TURN`` providers. The first call returns no ids. After
        the last provider, one call returns no ids and drops unused values (``Columns.tidy``), and
        the next call begins again with the first provider.
        """
        columns = self._columns
        if self._chosen == float("-inf"):
            self._chosen = moment
        share = min(1.0, (moment - self._chosen) / ROUND_SECONDS)
        number = min(MAX_HOSTS_IN_TURN, int(share * columns.ids.size))
        if not number:
            return []
        self._chosen = moment
        next_ids = columns.ids[columns.ids > self._turn][:number]
        if not next_ids.size:
            columns.tidy()
        self._turn = int(next_ids[-1]) if next_ids.size else 0
        return next_ids.tolist()  # type: ignore[no-any-return]

    def _drop_removed(self, tx: Connection) -> bool:
        """Drop hosts that are not in the store any more, and return True if there were any.

        The ids are only read if the store has another number of hosts than this copy.
        """
        columns = self._columns
        if host_states.count(tx) == columns.ids.size:
            return False
        removed_ids = sorted(set(columns.ids.tolist()) - set(host_states.ids(tx)))
        columns.drop(removed_ids)
        return bool(removed_ids)

    def _read_extras(self, tx: Connection, moment: float) -> None:
        """Read the metrics and image properties that ``ReadOptions`` requires.

        Metrics are read at most every ``METRICS_INTERVAL_SECONDS``. Properties are read for new
        images, after the images on hosts have changed.
        """
        columns = self._columns
        if self._wants.metrics and moment - self._measured >= METRICS_INTERVAL_SECONDS:
            columns.fill_metrics(host_states.metrics(tx, self._measured_at - OVERLAP_MICROS))
            self._measured, self._measured_at = moment, self._marks.read_at
        if self._wants.images and columns.images_moved:
            images = {image for counts in columns.images.values() for image in counts}
            new_properties = host_states.image_properties(tx, images - self._properties.keys())
            self._properties = {
                image: text
                for image, text in {**self._properties, **new_properties}.items()
                if image in images
            }
            columns.fill_images(self._properties)

    def read_request_facts(self, specs: Sequence[RequestSpec]) -> RequestFacts:
        """Read the groups of these requests, and the hosts of the servers in their hints.

        The servers of the requests do not count as members of the groups. Only servers of the
        request's project are read for hints.

        Without groups and hints the store is not read, and the result is empty.

        Raises:
            Unavailable: The database does not answer.
        """
        groups = {spec.group for spec in specs if spec.group}
        hinted_servers: dict[str, set[str]] = {}
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
                hinted_servers.setdefault(spec.project_id, set()).update(map(str, servers))
        servers_by_project = {
            project: servers for project, servers in hinted_servers.items() if servers
        }
        if not groups and not servers_by_project:
            return RequestFacts({}, {})
        request_servers = [spec.server for spec in specs]
        return self._store.read(
            lambda tx: RequestFacts(
                host_states.groups(tx, groups, request_servers) if groups else {},
                {
                    project: host_states.places(tx, project_servers, project)
                    for project, project_servers in servers_by_project.items()
                },
            )
        )

    # --- Snapshots ---
    def snapshot(self, facts: RequestFacts | None = None, proposals: bool = True) -> Snapshot:
        """Return a copy of the hosts as last read, which ``Snapshot.take`` may change.

        Args:
            facts: Data of the requests, or None for a snapshot without groups and hints.
            proposals: True to count the servers of recorded proposals as placed.
        """
        copy = self._columns.base.copy()
        copy.pause = self._wants.pause
        self._fill_waits(copy)
        for name, group in facts.groups.items() if facts is not None else ():
            copy.groups[name] = Group(
                group.policy,
                group.most,
                {
                    copy.rows[host]: number
                    for host, number in group.members.items()
                    if host in copy.rows
                },
            )
        copy.places_by_project = facts.places if facts is not None else {}
        for proposal in self._proposals.values() if proposals else ():
            copy.take(proposal.host, proposal.resources, proposal.group, proposal.assignment)
        return copy

    def _fill_waits(self, copy: Snapshot) -> None:
        if copy.failures.any():
            now = self._marks.read_at + (self._clock.monotonic() - self._refreshed) * SECOND
            seconds_left = (self._columns.own["failed_at"] - now) / SECOND + self._wants.pause
            copy.waits = np.where(
                copy.failures > 0, np.ceil(np.maximum(seconds_left, 0)), 0
            ).astype(np.int64)

    # --- Proposals ---
    def propose(
        self, spec: RequestSpec, host: str, assignment: HardwareAssignment | None = None
    ) -> None:
        """Record the proposal of a host for the server, so that later snapshots count it as placed.

        Args:
            spec: The request of the server.
            host: Name of a host of the last snapshot.
            assignment: Hardware that only this server would use, or None.

        Raises:
            KeyError: The host is unknown.
        """
        columns = self._columns
        generation = int(columns.own["generations"][columns.base.rows[host]])
        self._proposals[spec.server] = _Proposal(
            host, generation, spec.resources, spec.group, assignment, self._clock.monotonic()
        )

    def withdraw(self, servers: Iterable[str]) -> None:
        """Drop the proposals for these servers, because a repeated request means a failed claim."""
        for server in servers:
            self._proposals.pop(server, None)

    def _drop_expired_proposals(self, moment: float) -> None:
        columns = self._columns
        for server, proposal in list(self._proposals.items()):
            row = columns.base.rows.get(proposal.host)
            has_changed = row is None or int(columns.own["generations"][row]) != proposal.generation
            if has_changed or moment - proposal.at > PROPOSAL_SECONDS:
                del self._proposals[server]
