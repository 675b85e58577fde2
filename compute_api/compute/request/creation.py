# SPDX-License-Identifier: Apache-2.0
"""Create servers: one transaction for all create requests that are ready at the same moment.

The thread of a request that arrives while no transaction runs commits its request. Threads that
arrive meanwhile wait. When the transaction ends, the first of them commits the next batch: all
waiting requests, at most ``max_batch``. So many requests share the cost of the project lock and of
the disk flush, and a request that arrives alone does not wait. This needs no additional thread.

Invariant: one bad request does not make others fail. A request over its quota fails alone. If a
transaction with several requests fails, they are committed one by one, for example because the row
of one project is locked. Only if the database does not answer, all requests of the batch fail.

If the database does not answer a COMMIT, a later read checks for the servers. Because the ids are
created once for each POST, a retry cannot create servers twice.

Order in the transaction: lock each project, limits, usage, Idempotency-Keys, lock of groups,
servers, actions, keys, group members.
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
    """Return the error for an Idempotency-Key that an earlier request used with another body."""
    return errors.Conflict(
        "This Idempotency-Key was used before with another request; use a new key."
    )


def _no_volumes(count: int) -> list[JsonObject]:
    return []


@dataclass(frozen=True)
class Creation:
    """The input of one POST /servers, for ``min_count`` to ``max_count`` similar servers."""

    project_id: str
    user_id: str
    #: vCPUs and memory of one server.
    vcpus: int
    memory_mb: int
    min_count: int
    max_count: int
    reservation_id: str
    #: Builds the rows of this many servers and of their actions, with the same ids in every call.
    rows: Callable[[int], tuple[list[JsonObject], list[JsonObject]]]
    #: The Idempotency-Key, or None.
    key: str | None = None
    #: Digest of the body, if there is a key.
    digest: str = ""
    #: Digests of the same body with older secret keys of the cloud.
    older_digests: Sequence[str] = ()
    #: The server group of the servers, or None.
    group: str | None = None
    #: Reads the project's limits in the transaction. None means the limits in the database.
    limits: Callable[[Connection], quotas.Numbers] | None = None
    #: Resource class -> amount for one server.
    classes: Mapping[str, int] = field(default_factory=dict)
    #: Builds the rows of the volumes of this many servers.
    volumes: Callable[[int], list[JsonObject]] = _no_volumes

    @property
    def size(self) -> quotas.Size:
        """The amounts that quotas count for one server."""
        return quotas.Size(1, self.vcpus, self.memory_mb, self.classes)


@dataclass(frozen=True, slots=True)
class Created:
    """The result of a create request."""

    #: Id of the first server.
    server_id: str
    reservation_id: str
    #: True if an earlier request with the same Idempotency-Key created the servers.
    repeated: bool = False
    #: Number of new servers.
    count: int = 0
    #: If repeated, the digest of the body that the earlier request stored.
    digest: str = ""


@dataclass(eq=False)
class _Ticket:
    creation: Creation
    turn: threading.Event = field(default_factory=threading.Event)
    outcome: Created | BaseException | None = None


Outcomes = list[tuple[_Ticket, Created | BaseException]]


def _is_committed(tx: Connection, outcomes: Outcomes) -> bool:
    """Return whether the transaction with these outcomes was committed.

    All new servers of a transaction exist together or not at all, so the first one is enough. A
    transaction without new servers counts as committed.
    """
    server_ids = [
        outcome.server_id
        for _, outcome in outcomes
        if isinstance(outcome, Created) and not outcome.repeated
    ]
    return not server_ids or servers.is_there(tx, server_ids[0])


class Creator:
    """Creates the servers of all create requests that this process receives.

    Args:
        store: The database.
        defaults: Limits for resources without a limit of the project or the quota class.
        max_batch: Maximum number of requests in one transaction.
    """

    def __init__(self, store: Store, defaults: Mapping[str, int], max_batch: int = 64) -> None:
        self._store, self._defaults, self._max_batch = store, dict(defaults), max_batch
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._has_leader = False

    @property
    def waiting(self) -> int:
        """The number of requests that wait for the end of the running transaction."""
        with self._lock:
            return len(self._waiting)

    def create(self, creation: Creation) -> Created:
        """Create the servers of one request, in a transaction that other requests may share.

        A request whose Idempotency-Key was used before with the same body creates no servers. The
        result then has the ids of the first request, and ``repeated`` is True.

        Raises:
            OverQuota: The quota allows fewer than ``min_count`` servers.
            Conflict: An earlier request used the Idempotency-Key with another body.
            BadRequest: The server group does not exist any more.
            Unavailable: The database does not answer or is too busy, or the API is stopping.
            Problem: ``creation.rows`` or ``creation.volumes`` refuses the request.
        """
        ticket = _Ticket(creation)
        with self._lock:
            self._waiting.append(ticket)
            leads, self._has_leader = not self._has_leader, True
        if not leads:
            ticket.turn.wait()
        if ticket.outcome is None:
            self._lead()
        if isinstance(ticket.outcome, BaseException):
            raise ticket.outcome
        assert ticket.outcome is not None
        return ticket.outcome

    def _lead(self) -> None:
        """Commit the oldest waiting requests, at most ``max_batch``, and wake their threads.

        An error becomes the outcome of the requests of the batch. If other requests wait, also wake
        the thread that commits the next batch.
        """
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
                self._has_leader = follower is not None
            for ticket in batch:
                # A missing outcome means that this thread is being stopped.
                if ticket.outcome is None:
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
        except Exception as problem:  # noqa: BLE001 - the other requests are tried one by one
            if len(batch) == 1 or isinstance(problem, errors.NoStore):
                for ticket in batch:
                    ticket.outcome = problem
                return
            for ticket in batch:
                self._commit([ticket])

    def _work(self, tx: Connection, batch: list[_Ticket]) -> Outcomes:
        """Insert the rows of a batch, and return the outcome of each request.

        Invariant: this changes only the database, because the store may repeat the transaction.

        Raises:
            Problem: ``creation.rows`` or ``creation.volumes`` refuses a request. Then the whole
                transaction is rolled back.
        """
        by_project: dict[str, list[_Ticket]] = {}
        for ticket in batch:
            by_project.setdefault(ticket.creation.project_id, []).append(ticket)
        for project_id in sorted(by_project):
            quotas.lock(tx, project_id)
        new = _NewRows()
        outcomes: Outcomes = []
        for project_id in sorted(by_project):
            usage = _ProjectUsage(
                tx,
                project_id,
                self._defaults,
                [ticket.creation for ticket in by_project[project_id]],
            )
            outcomes += [
                (ticket, _admit(usage, ticket.creation, new)) for ticket in by_project[project_id]
            ]
        new.write(tx)
        return outcomes


@dataclass
class _NewRows:
    """The rows that the transaction inserts, with one statement per table."""

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


class _ProjectUsage:
    """Limits and usage of one project, including servers admitted earlier in this transaction."""

    def __init__(
        self,
        tx: Connection,
        project_id: str,
        defaults: dict[str, int],
        creations: Sequence[Creation],
    ) -> None:
        read_limits = creations[-1].limits
        limits = (
            read_limits(tx) if read_limits is not None else quotas.limits(tx, project_id, defaults)
        )
        self.account = quotas.Account(tx, project_id, limits)
        keys = [creation.key for creation in creations if creation.key is not None]
        key_rows = servers.idempotent(tx, project_id, keys) if keys else {}
        self.earlier_requests = {
            key: (row.digest, row.server_id, row.reservation_id) for key, row in key_rows.items()
        }
        groups = {creation.group for creation in creations if creation.group is not None}
        locked_groups = server_groups.lock(tx, groups) if groups else set()
        self.members = (
            {group: len(ids) for group, ids in server_groups.members(tx, locked_groups).items()}
            if locked_groups
            else {}
        )

    def servers_in_quota(self, creation: Creation) -> int:
        """Return the number of servers that the quotas allow, at most ``max_count``.

        Raises:
            OverQuota: The quotas allow fewer than ``min_count`` servers.
            BadRequest: The server group does not exist any more.
        """
        count = self.account.room(
            creation.user_id, creation.size, creation.min_count, creation.max_count
        )
        if creation.group is not None:
            if creation.group not in self.members:
                raise errors.BadRequest(f"Instance group {creation.group} could not be found.")
            limit, members = (
                self.account.limits.of("server_group_members"),
                self.members[creation.group],
            )
            if 0 <= limit < members + creation.min_count:
                raise errors.OverQuota(
                    {"server_group_members": (creation.min_count, members, limit)}
                )
            count = min(count, limit - members) if limit >= 0 else count
        return count

    def promise(self, creation: Creation, count: int) -> None:
        """Count ``count`` new servers as used, for the checks of later requests in the batch."""
        self.account.add(creation.user_id, creation.size, count)
        if creation.group is not None:
            self.members[creation.group] += count


def _admit(usage: _ProjectUsage, creation: Creation, new: _NewRows) -> Created | BaseException:
    """Return the outcome of one request, and add the rows of its servers to ``new``.

    A repeated request gets the earlier result. A request over quota, without an existing server
    group, or with a used Idempotency-Key and another body gets the error as outcome. Errors of
    ``creation.rows`` and ``creation.volumes`` are raised.
    """
    if creation.key in usage.earlier_requests:
        digest, server_id, reservation_id = usage.earlier_requests[creation.key]
        if digest not in (creation.digest, *creation.older_digests):
            return idempotency_conflict()
        return Created(server_id, reservation_id, repeated=True, digest=digest)
    try:
        count = usage.servers_in_quota(creation)
    except (errors.OverQuota, errors.BadRequest) as problem:
        return problem
    server_rows, action_rows = creation.rows(count)
    first = server_rows[0]["id"]
    new.servers += server_rows
    new.actions += action_rows
    new.volumes += creation.volumes(count)
    usage.promise(creation, count)
    if creation.group is not None:
        new.members += [{"group_id": creation.group, "server_id": row["id"]} for row in server_rows]
    if creation.key is not None:
        usage.earlier_requests[creation.key] = (creation.digest, first, creation.reservation_id)
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
