# SPDX-License-Identifier: Apache-2.0
"""Quotas: limits and usage of projects, and of users in projects.

The API calls this file. Usage is never counted in advance. A transaction that adds counted objects
first locks the project's row (``lock``; for key pairs the user's row), so that such transactions
run one after another. Then it sums the usage (``Account``). Limits can come from elsewhere
(``Numbers``) if they are read before the lock. Limits in this database (``QuotaLimits``) apply in
this order: the user in the project, the project, the class "default" (project '*'), the
configuration. -1 means no limit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, hardware
from common.domain.models import Flavor
from common.domain.statuses import OPEN_MIGRATIONS
from common.domain.wire import from_wire
from common.store.engine import insert_ignore
from common.store.rows import Values
from common.store.schema import migrations, projects, quotas, server_groups, servers

CLASS = "*"
#: Resources that are counted by server, with the API's names.
COUNTED = ("instances", "cores", "ram")


@dataclass(frozen=True, slots=True)
class Size:
    """The amounts of one or more servers that quotas limit.

    ``memory_mb`` is in MiB. classes: resource class -> amount that the servers allocate.
    """

    servers: int
    vcpus: int
    memory_mb: int
    classes: Mapping[str, int] = field(default_factory=dict)


class Numbers(Protocol):
    """The limits of one project by the API's resource names, and the counting of usage."""

    @property
    def by_user(self) -> bool:
        """Return True if users in the project may have limits of their own."""

    def of(self, resource: str, user_id: str = "") -> int:
        """Return the limit of a user in the project, or of the project for "". -1: no limit.

        A user without a limit of their own has the limit of the project.
        """

    def has_own(self, user_id: str, resource: str) -> bool:
        """Return True if the user has a limit of their own, next to the project's limit."""

    def name(self, resource: str) -> str:
        """Return the name of an API resource in the results of ``count`` and ``read_usage``."""

    def count(self, size: Size) -> dict[str, int]:
        """Return resource -> amount for servers of this size, named as in ``read_usage``."""

    def read_usage(self, tx: Connection, project_id: str) -> Mapping[str, Mapping[str, int]]:
        """Return user id -> usage by resource, and the usage of the project under "".

        Users are left out if they have no servers, or if ``by_user`` is False.
        """


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The limits of one project: rows of the database, and the defaults of the configuration."""

    defaults: dict[str, int]
    rows: dict[tuple[str, str, str], int] = field(default_factory=dict)  # (project, user, resource)
    project_id: str = ""
    by_user: bool = True

    def of(self, resource: str, user_id: str = "") -> int:
        """Return the limit of a user in the project, or of the project for "". -1: no limit.

        A missing limit is that of the project, else of the default class, else of the
        configuration.
        """
        for key in (
            (self.project_id, user_id, resource),
            (self.project_id, "", resource),
            (CLASS, "", resource),
        ):
            if key in self.rows:
                return self.rows[key]
        return self.defaults[resource]

    def has_own(self, user_id: str, resource: str) -> bool:
        """Return True if the user has a limit of their own in the project."""
        return bool(user_id) and (self.project_id, user_id, resource) in self.rows

    def name(self, resource: str) -> str:
        return resource

    def count(self, size: Size) -> dict[str, int]:
        """Return the number of servers, their CPUs and their memory (MiB), by the API's names."""
        return {"instances": size.servers, "cores": size.vcpus, "ram": size.memory_mb}

    def read_usage(self, tx: Connection, project_id: str) -> dict[str, dict[str, int]]:
        """Return user id -> usage by resource, and the usage of the project under ""."""
        return {
            user: {name: getattr(found, name) for name in COUNTED}
            for user, found in usage(tx, project_id).items()
        }


@dataclass(slots=True)
class Usage:
    """The usage of servers, CPUs and memory (MiB) by a project, or by a user in the project."""

    instances: int = 0
    cores: int = 0
    ram: int = 0

    def add(self, instances: int, cores: int, ram: int) -> None:
        self.instances += instances
        self.cores += cores
        self.ram += ram


class Account:
    """The limits and the usage of a project, with the amounts that were added to this object.

    The caller has locked the project's row.
    """

    def __init__(self, tx: Connection, project_id: str, limits: Numbers) -> None:
        self.limits = limits
        self._used: dict[str, Counter[str]] = {
            user: Counter(found) for user, found in limits.read_usage(tx, project_id).items()
        }

    def room(self, user_id: str, size: Size, least: int = 1, most: int = 1) -> int:
        """Return how many servers of this size fit into the limits, at most ``most``.

        ``size`` is that of one server. The limits of the project apply, and the user's own limits
        if there are any.

        Raises:
            OverQuota: Fewer than ``least`` servers fit.
        """
        over = {}
        for user in ("", user_id):
            used = self._used.get(user, Counter())
            for resource, need in self.limits.count(size).items():
                limit = self.limits.of(resource, user)
                if limit < 0 or not need or (user and not self.limits.has_own(user, resource)):
                    continue
                room = (limit - used[resource]) // need
                most = min(most, room)
                if room < least:
                    over[resource] = (need * least, used[resource], limit)
        if over:
            raise errors.OverQuota(over)
        return most

    def add(self, user_id: str, size: Size, count: int) -> None:
        """Add ``count`` servers of this size to the usage in this object, which ``room`` compares.

        The usage of the user and of the project grows. Nothing is written.
        """
        for user in ("", user_id):
            used = self._used.setdefault(user, Counter())
            for resource, need in self.limits.count(size).items():
                used[resource] += count * need


def lock(tx: Connection, owner_id: str) -> None:
    """Lock the quota row of a project until the end of the transaction. Create a missing row.

    For key pairs, whose usage counts over all projects, ``owner_id`` is the id of a user.
    """
    owner = {"owner": owner_id}
    if not tx.execute(_COUNT_UP, owner).rowcount:
        insert_ignore(tx, projects, {"id": owner_id, "quota_seq": 0})
        tx.execute(_COUNT_UP, owner)


_COUNT_UP = (
    sa.update(projects)
    .where(projects.c.id == sa.bindparam("owner"))
    .values(quota_seq=projects.c.quota_seq + 1)
)


def limits(tx: Connection, project_id: str, defaults: dict[str, int]) -> QuotaLimits:
    """Return all limits of a project and its users, in one statement.

    ``defaults`` are the limits of the configuration: resource -> limit.
    """
    found = tx.execute(_LIMITS, {"project": project_id})
    rows = {(row.project_id, row.user_id, row.resource): row.hard_limit for row in found}
    return QuotaLimits(defaults, rows, project_id)


_PROJECT: sa.BindParameter[str] = sa.bindparam("project")
_LIMITS = sa.select(quotas).where(quotas.c.project_id.in_([_PROJECT, CLASS]))


def usage(tx: Connection, project_id: str) -> dict[str, Usage]:
    """Return the usage of each user with servers, and of the project (key "").

    This is one statement by an index.
    """
    found: dict[str, Usage] = {"": Usage()}
    for user_id, count, vcpus, memory in tx.execute(_USAGE, {"project": project_id}):
        found[user_id] = Usage(int(count), int(vcpus), int(memory))
        found[""].add(int(count), int(vcpus), int(memory))
    return found


_USAGE = (
    sa.select(
        servers.c.user_id,
        sa.func.count(),
        sa.func.sum(servers.c.vcpus),
        sa.func.sum(servers.c.memory_mb),
    )
    .where(servers.c.project_id == _PROJECT, servers.c.deleted == 0)
    .group_by(servers.c.user_id)
)


def count_resources(tx: Connection, project_id: str) -> Counter[str]:
    """Return the number of the project's servers (key "") and their resources by class.

    A server with an open migration counts with the larger amount of both flavors in each class. A
    damaged flavor or image counts by the server's columns of CPUs, memory and disk.
    """
    mine = sa.and_(servers.c.project_id == project_id, servers.c.deleted == 0)
    moving: dict[str, set[str]] = {}
    for row in tx.execute(
        sa.select(
            servers.c.id,
            *(
                sa.type_coerce(migrations.c[name], sa.Text).label(name)
                for name in ("old_flavor", "new_flavor")
            ),
        )
        .join(servers, servers.c.id == migrations.c.server_id)
        .where(migrations.c.status.in_(OPEN_MIGRATIONS), mine)
    ):
        moving.setdefault(row.id, set()).update((row.old_flavor, row.new_flavor))
    texts = (sa.type_coerce(servers.c[name], sa.Text).label(name) for name in ("flavor", "image"))
    alike: Counter[tuple[Any, ...]] = Counter()  # most servers of a project are
    for server_id, *columns in tx.execute(
        sa.select(
            servers.c.id, *texts, servers.c.vcpus, servers.c.memory_mb, servers.c.disk_gb
        ).where(mine)
    ):
        alike[(*columns, *sorted(moving.get(server_id, ())))] += 1
    total: Counter[str] = Counter()
    for (flavor, image, vcpus, memory_mb, disk_gb, *flavors), number in alike.items():
        found: Counter[str] = Counter()
        for text in {flavor, *flavors}:
            found |= _classes(text, image) or Counter(
                VCPU=vcpus, MEMORY_MB=memory_mb, DISK_GB=disk_gb
            )
        total.update({"": number, **{name: number * amount for name, amount in found.items()}})
    return total


@lru_cache(1024)
def _classes(flavor: str, image: str | None) -> Counter[str] | None:
    """Return the resources of a server with this flavor and image (JSON texts) by resource class.

    Returns None for damaged data, so that the project's other servers can be counted.
    """
    try:
        return Counter(
            hardware.resources_of(from_wire(Flavor, json.loads(flavor)), json.loads(image or "{}"))
        )
    except (ValueError, TypeError, LookupError, AttributeError, errors.BadRequest):
        return None


def server_groups_used(tx: Connection, project_id: str) -> int:
    """Return the number of the project's server groups."""
    return int(
        tx.scalar(
            sa.select(sa.func.count())
            .select_from(server_groups)
            .where(server_groups.c.project_id == project_id)
        )
        or 0
    )


def put(tx: Connection, project_id: str, user_id: str, values: dict[str, int]) -> None:
    """Set limits (resource -> limit) of a project, or of a user in the project if not "".

    The project '*' is the class "default". -1 means no limit.
    """
    for resource, limit in values.items():
        key: Values = {"project_id": project_id, "user_id": user_id, "resource": resource}
        same = [quotas.c[name] == value for name, value in key.items()]
        if not tx.execute(sa.update(quotas).where(*same).values(hard_limit=limit)).rowcount:
            insert_ignore(tx, quotas, {**key, "hard_limit": limit})


def forget(tx: Connection, project_id: str, user_id: str = "") -> None:
    """Delete the limits of one user in the project, or for "" of the project and all its users."""
    query = sa.delete(quotas).where(quotas.c.project_id == project_id)
    tx.execute(query.where(quotas.c.user_id == user_id) if user_id else query)
