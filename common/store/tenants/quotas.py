# SPDX-License-Identifier: Apache-2.0
"""Quota: how much a project (and a user in it) may have, and has.

Called by the API. Nothing is counted in advance: whoever adds something counted locks the project's
row first (``lock``; of a key pair, the user's), which puts all such changes in one line, and then
adds up what is there (``Account``). The limits may be anybody's (``Numbers``), as long as they are
known before the lock is taken. Those of this database (``QuotaLimits``) are looked for at the user
in the project, the project, the class "default" (project '*'), and then in the configuration; -1 is
no limit.
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
#: What is counted in servers, with the API's names.
COUNTED = ("instances", "cores", "ram")


@dataclass(frozen=True, slots=True)
class Size:
    """What is counted of servers. classes: resource class -> amount, as they will be held of a
    host."""

    servers: int
    vcpus: int
    memory_mb: int
    classes: Mapping[str, int] = field(default_factory=dict)


class Numbers(Protocol):
    """The limits in force in one project, by the API's names of resources, and how they are
    counted."""

    @property
    def by_user(self) -> bool:
        """May a user in the project have limits?"""

    def of(self, resource: str, user_id: str = "") -> int:
        """The limit of a user in the project, or with no user of the project; -1: none."""

    def has_own(self, user_id: str, resource: str) -> bool:
        """Has the user a limit narrower than the project's own?"""

    def name(self, resource: str) -> str:
        """What ``counted`` and ``used`` call a resource of the API."""

    def counted(self, size: Size) -> dict[str, int]:
        """Resource -> amount; the resources are those of ``used``, and ``of`` knows them."""

    def used(self, tx: Connection, project_id: str) -> Mapping[str, Mapping[str, int]]:
        """What the project (under '') and, where they may have limits, each user in it has of each
        resource."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The limits in force in one project; ``of(resource, user)`` asks for one."""

    defaults: dict[str, int]
    rows: dict[tuple[str, str, str], int] = field(default_factory=dict)  # (project, user, resource)
    project_id: str = ""
    by_user: bool = True

    def of(self, resource: str, user_id: str = "") -> int:
        """The limit of a user in the project, or with no user of the project."""
        for key in (
            (self.project_id, user_id, resource),
            (self.project_id, "", resource),
            (CLASS, "", resource),
        ):
            if key in self.rows:
                return self.rows[key]
        return self.defaults[resource]

    def has_own(self, user_id: str, resource: str) -> bool:
        """Has the user a limit narrower than the project's own?"""
        return bool(user_id) and (self.project_id, user_id, resource) in self.rows

    def name(self, resource: str) -> str:
        """The same."""
        return resource

    def counted(self, size: Size) -> dict[str, int]:
        """Servers, and what their flavors say of CPUs and memory."""
        return {"instances": size.servers, "cores": size.vcpus, "ram": size.memory_mb}

    def used(self, tx: Connection, project_id: str) -> dict[str, dict[str, int]]:
        """By user, and under '' of the whole project."""
        return {
            user: {name: getattr(found, name) for name in COUNTED}
            for user, found in usage(tx, project_id).items()
        }


@dataclass(slots=True)
class Usage:
    """What a project, or one user in it, has of each counted resource."""

    instances: int = 0
    cores: int = 0
    ram: int = 0

    def add(self, instances: int, cores: int, ram: int) -> None:
        self.instances += instances
        self.cores += cores
        self.ram += ram


class Account:
    """What a project may have, has, and has been promised since; its row is locked."""

    def __init__(self, tx: Connection, project_id: str, limits: Numbers) -> None:
        self.limits = limits
        self._used: dict[str, Counter[str]] = {
            user: Counter(found) for user, found in limits.used(tx, project_id).items()
        }

    def room(self, user_id: str, size: Size, least: int = 1, most: int = 1) -> int:
        """How many of this size still fit, for the project and for the user; at most ``most``.

        Raises:
            OverQuota: fewer than ``least``.
        """
        over = {}
        for user in ("", user_id):
            used = self._used.get(user, Counter())
            for resource, need in self.limits.counted(size).items():
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
        """Count so many as had."""
        for user in ("", user_id):
            used = self._used.setdefault(user, Counter())
            for resource, need in self.limits.counted(size).items():
                used[resource] += count * need


def lock(tx: Connection, owner_id: str) -> None:
    """Stand in the line of a project, or of a user for what is counted over all projects, until the
    transaction ends; makes the row at its first use."""
    step = (
        sa.update(projects)
        .where(projects.c.id == owner_id)
        .values(quota_seq=projects.c.quota_seq + 1)
    )
    if not tx.execute(step).rowcount:
        insert_ignore(tx, projects, {"id": owner_id, "quota_seq": 0})
        tx.execute(step)


def limits(tx: Connection, project_id: str, defaults: dict[str, int]) -> QuotaLimits:
    """All limits of a project and its users, in one query."""
    found = tx.execute(sa.select(quotas).where(quotas.c.project_id.in_([project_id, CLASS])))
    rows = {(row.project_id, row.user_id, row.resource): row.hard_limit for row in found}
    return QuotaLimits(defaults, rows, project_id)


def usage(tx: Connection, project_id: str) -> dict[str, Usage]:
    """What each user of the project has, and under '' the whole project; one query on a covering
    index."""
    rows = tx.execute(
        sa.select(
            servers.c.user_id,
            sa.func.count(),
            sa.func.sum(servers.c.vcpus),
            sa.func.sum(servers.c.memory_mb),
        )
        .where(servers.c.project_id == project_id, servers.c.deleted == 0)
        .group_by(servers.c.user_id)
    )
    found: dict[str, Usage] = {"": Usage()}
    for user_id, count, vcpus, memory in rows:
        found[user_id] = Usage(int(count), int(vcpus), int(memory))
        found[""].add(int(count), int(vcpus), int(memory))
    return found


def held(tx: Connection, project_id: str) -> Counter[str]:
    """How many servers the project has (under '') and what they were promised of each resource
    class, wherever they are; of one that is being resized the larger of both flavors."""
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
    """What a server of this frozen flavor and image holds of its host; None: it cannot be
    understood any more, which must not hinder the project's other servers."""
    try:
        return Counter(
            hardware.resources_of(from_wire(Flavor, json.loads(flavor)), json.loads(image or "{}"))
        )
    except (ValueError, TypeError, LookupError, AttributeError, errors.BadRequest):
        return None


def server_groups_used(tx: Connection, project_id: str) -> int:
    """How many server groups the project has."""
    return int(
        tx.scalar(
            sa.select(sa.func.count())
            .select_from(server_groups)
            .where(server_groups.c.project_id == project_id)
        )
        or 0
    )


def put(tx: Connection, project_id: str, user_id: str, values: dict[str, int]) -> None:
    """Set limits of a project ('*': of the class), or of a user in it."""
    for resource, limit in values.items():
        key: Values = {"project_id": project_id, "user_id": user_id, "resource": resource}
        same = [quotas.c[name] == value for name, value in key.items()]
        if not tx.execute(sa.update(quotas).where(*same).values(hard_limit=limit)).rowcount:
            insert_ignore(tx, quotas, {**key, "hard_limit": limit})


def forget(tx: Connection, project_id: str, user_id: str = "") -> None:
    """Back to the class's limits: for one user, or without a user for the project and all its
    users."""
    query = sa.delete(quotas).where(quotas.c.project_id == project_id)
    tx.execute(query.where(quotas.c.user_id == user_id) if user_id else query)
