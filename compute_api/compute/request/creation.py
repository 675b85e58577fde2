# SPDX-License-Identifier: Apache-2.0
"""New servers: one transaction for all the creates that are ready at the same moment.

A thread that brings a create while no transaction runs commits all that wait, its own first.
Threads that come meanwhile wait, and the first of them commits the next batch: the project lock and
the flush of the disk are paid once for many, and a create alone waits for nobody. There is no
thread of our own. A create over its quota fails alone. When a transaction of several fails, they
are committed one by one, so that one bad create, or one project whose row is locked, fails no
other. Whether a transaction was committed whose COMMIT was not answered is looked up: ids are made
once for each POST, so that nothing is made twice. In the transaction, in this order: lock each
project, limits, usage, Idempotency-Keys, the lock of groups, servers, actions, keys, group members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection, Store
from common.store.servers import actions, servers, volumes
from common.store.tenants import quotas, server_groups


def idempotency_conflict() -> errors.Conflict:
    """The 409 for an Idempotency-Key that came with another body before."""
    return errors.Conflict(
        "This Idempotency-Key was used before with another request; use a new key."
    )


def _no_volumes(count: int) -> list[JsonObject]:
    return []


@dataclass(frozen=True)
class Creation:
    """One POST: from ``min_count`` to ``max_count`` servers alike."""

    project_id: str
    user_id: str
    vcpus: int  #: of one server
    memory_mb: int  #: of one server
    min_count: int
    max_count: int
    reservation_id: str
    #: rows of servers and of actions for this many; the same ids at every call
    rows: Callable[[int], tuple[list[JsonObject], list[JsonObject]]]
    key: str | None = None  #: the Idempotency-Key
    digest: str = ""  #: of the body that came with the key
    #: digests that the same body has under older secret keys of the cloud
    older_digests: Sequence[str] = ()
    group: str | None = None  #: the server group that they join
    #: the project's limits, read in the transaction; None: those of the database
    limits: Callable[[Connection], quotas.Numbers] | None = None
    #: resource class -> amount of one server
    classes: Mapping[str, int] = field(default_factory=dict)
    #: rows of the volumes of this many servers
    volumes: Callable[[int], list[JsonObject]] = _no_volumes

    @property
    def size(self) -> quotas.Size:
        """What is counted of one server."""
        return quotas.Size(1, self.vcpus, self.memory_mb, self.classes)


@dataclass(frozen=True, slots=True)
class Created:
    """What came of it: the first server's id; ``repeated``: it was there already, by its
    Idempotency-Key."""

    server_id: str
    reservation_id: str
    repeated: bool = False
    count: int = 0  #: of servers that were made
    digest: str = ""  #: the stored one of the body, if it is repeated


@dataclass(eq=False)
class _Ticket:
    creation: Creation
    turn: threading.Event = field(default_factory=threading.Event)
    outcome: Created | BaseException | None = None


Outcomes = list[tuple[_Ticket, Created | BaseException]]


def _is_committed(tx: Connection, outcomes: Outcomes) -> bool:
    """Was the transaction committed that had these outcomes? Its servers are there together or not
    at all."""
    made = [
        outcome.server_id
        for _, outcome in outcomes
        if isinstance(outcome, Created) and not outcome.repeated
    ]
    return not made or servers.is_there(tx, made[0])


class Creator:
    """Makes all new servers of this process.

    Args:
        defaults: limits where neither project nor class has one.
        at_most: how many creates one transaction takes.
    """

    def __init__(self, store: Store, defaults: Mapping[str, int], max_batch: int = 64) -> None:
        self._store, self._defaults, self._max_batch = store, dict(defaults), max_batch
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._led = False

    @property
    def waiting(self) -> int:
        """How many creates wait for the transaction in hand to end."""
        with self._lock:
            return len(self._waiting)

    def create(self, creation: Creation) -> Created:
        """Commit it, alone or with others.

        Raises:
            OverQuota: fewer than ``min_count`` fit. Conflict: the Idempotency-Key came with another
            body before.
            Unavailable: the database does not let it through.
        """
        ticket = _Ticket(creation)
        with self._lock:
            self._waiting.append(ticket)
            leads, self._led = not self._led, True
        if not leads:
            ticket.turn.wait()
        if ticket.outcome is None:
            self._lead()
        if isinstance(ticket.outcome, BaseException):
            raise ticket.outcome
        assert ticket.outcome is not None
        return ticket.outcome

    def _lead(self) -> None:
        """Commit what waits; then let the first of those who came meanwhile lead."""
        with self._lock:
            batch, self._waiting = (
                self._waiting[: self._max_batch],
                self._waiting[self._max_batch :],
            )
        try:
            self._commit(batch)
        finally:
            with self._lock:
                follower = self._waiting[0] if self._waiting else None
                self._led = follower is not None
            for ticket in batch:
                if ticket.outcome is None:  # only when this thread is being torn down
                    ticket.outcome = errors.Unavailable("The API is stopping; try again.")
                ticket.turn.set()
            if follower is not None:
                follower.turn.set()

    def _commit(self, batch: list[_Ticket]) -> None:
        try:
            for ticket, outcome in self._store.write(
                lambda tx: self._work(tx, batch), _is_committed, alone=len(batch) == 1
            ):
                ticket.outcome = outcome
        except Exception as problem:  # noqa: BLE001  # whatever one of them did, the others get their own turn
            if len(batch) == 1 or isinstance(problem, errors.NoStore):
                for ticket in batch:
                    ticket.outcome = problem
                return
            for ticket in batch:
                self._commit([ticket])

    def _work(self, tx: Connection, batch: list[_Ticket]) -> Outcomes:
        """The whole transaction; may run again after a deadlock, so it changes nothing but the
        database."""
        by_project: dict[str, list[_Ticket]] = {}
        for ticket in batch:
            by_project.setdefault(ticket.creation.project_id, []).append(ticket)
        for project_id in sorted(by_project):
            quotas.lock(tx, project_id)
        new = _New()
        outcomes: Outcomes = []
        for project_id in sorted(by_project):
            book = _Book(
                tx,
                project_id,
                self._defaults,
                [ticket.creation for ticket in by_project[project_id]],
            )
            outcomes += [
                (ticket, _admit(book, ticket.creation, new)) for ticket in by_project[project_id]
            ]
        new.write(tx)
        return outcomes


@dataclass
class _New:
    """The rows that the transaction will insert, a statement a table."""

    servers: list[JsonObject] = field(default_factory=list)
    actions: list[JsonObject] = field(default_factory=list)
    volumes: list[JsonObject] = field(default_factory=list)
    keys: list[dict[str, str]] = field(default_factory=list)
    members: list[dict[str, str]] = field(default_factory=list)

    def write(self, tx: Connection) -> None:
        if self.servers:
            servers.insert(tx, self.servers)
            actions.insert(tx, self.actions)
            volumes.insert(tx, self.volumes)
        if self.keys:
            servers.remember(tx, self.keys)
        server_groups.join(tx, self.members)


class _Book:
    """What one project may have, has, and has been promised earlier in this transaction."""

    def __init__(
        self,
        tx: Connection,
        project_id: str,
        defaults: dict[str, int],
        creations: Sequence[Creation],
    ) -> None:
        newest = creations[-1].limits
        limits = newest(tx) if newest is not None else quotas.limits(tx, project_id, defaults)
        self.account = quotas.Account(tx, project_id, limits)
        keys = [creation.key for creation in creations if creation.key is not None]
        found = servers.idempotent(tx, project_id, keys) if keys else {}
        self.known = {
            key: (row.digest, row.server_id, row.reservation_id) for key, row in found.items()
        }
        groups = {creation.group for creation in creations if creation.group is not None}
        there = server_groups.lock(tx, groups) if groups else set()
        self.members = (
            {group: len(ids) for group, ids in server_groups.members(tx, there).items()}
            if there
            else {}
        )

    def servers_in_quota(self, creation: Creation) -> int:
        """How many of the servers fit; raises OverQuota when too few, BadRequest when their group
        is gone."""
        count = self.account.room(
            creation.user_id, creation.size, creation.min_count, creation.max_count
        )
        if creation.group is not None:
            if creation.group not in self.members:
                raise errors.BadRequest(f"Instance group {creation.group} could not be found.")
            limit, there = (
                self.account.limits.of("server_group_members"),
                self.members[creation.group],
            )
            if 0 <= limit < there + creation.min_count:
                raise errors.OverQuota({"server_group_members": (creation.min_count, there, limit)})
            count = min(count, limit - there) if limit >= 0 else count
        return count

    def promise(self, creation: Creation, count: int) -> None:
        """Count them as had."""
        self.account.add(creation.user_id, creation.size, count)
        if creation.group is not None:
            self.members[creation.group] += count


def _admit(book: _Book, creation: Creation, new: _New) -> Created | BaseException:
    """One create within the transaction: known already, refused, or its rows added to ``new``."""
    if creation.key in book.known:
        digest, server_id, reservation_id = book.known[creation.key]
        if digest not in (creation.digest, *creation.older_digests):
            return idempotency_conflict()
        return Created(server_id, reservation_id, repeated=True, digest=digest)
    try:
        count = book.servers_in_quota(creation)
    except (errors.OverQuota, errors.BadRequest) as problem:
        return problem
    server_rows, action_rows = creation.rows(count)
    first = server_rows[0]["id"]
    new.servers += server_rows
    new.actions += action_rows
    new.volumes += creation.volumes(count)
    book.promise(creation, count)
    if creation.group is not None:
        new.members += [{"group_id": creation.group, "server_id": row["id"]} for row in server_rows]
    if creation.key is not None:
        book.known[creation.key] = (creation.digest, first, creation.reservation_id)
        new.keys.append(
            {
                "project_id": creation.project_id,
                "key": creation.key,
                "digest": creation.digest,
                "reservation_id": creation.reservation_id,
                "server_id": first,
            }
        )
    return Created(first, creation.reservation_id, count=count)
