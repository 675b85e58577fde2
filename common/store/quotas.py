# SPDX-License-Identifier: Apache-2.0
"""Quota: how much a project (and a user in it) may have, and has.

Called by the API. Nothing is counted in advance: whoever adds something counted locks the project's row
first (``lock``; of a key pair, the user's), which puts all such changes in one line, and then adds up what is there.
A limit is looked for at the user in the project, the project, the class "default" (project '*'), and then in
the configuration; -1 is no limit.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.store.engine import insert_ignore
from common.store.schema import projects, quotas, server_groups, servers

CLASS = "*"
#: What is counted in servers, with the API's names.
COUNTED = ("instances", "cores", "ram")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force in one project; ``of(resource, user)`` asks for one."""

    defaults: dict[str, int]
    rows: dict[tuple[str, str, str], int] = field(default_factory=dict)     # (project, user, resource)
    project_id: str = ""

    def of(self, resource: str, user_id: str = "") -> int:
        """The limit of a user in the project, or with no user of the project."""
        for key in ((self.project_id, user_id, resource), (self.project_id, "", resource), (CLASS, "", resource)):
            if key in self.rows:
                return self.rows[key]
        return self.defaults[resource]

    def has_own(self, user_id: str, resource: str) -> bool:
        """Has the user a limit narrower than the project's own?"""
        return bool(user_id) and (self.project_id, user_id, resource) in self.rows


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


def lock(tx: Connection, owner_id: str) -> None:
    """Stand in the line of a project, or of a user for what is counted over all projects, until the transaction ends;
    makes the row at its first use."""
    step = sa.update(projects).where(projects.c.id == owner_id).values(quota_seq=projects.c.quota_seq + 1)
    if not tx.execute(step).rowcount:
        insert_ignore(tx, projects, {"id": owner_id, "quota_seq": 0})
        tx.execute(step)


def limits(tx: Connection, project_id: str, defaults: dict[str, int]) -> Limits:
    """All limits of a project and its users, in one query."""
    found = tx.execute(sa.select(quotas).where(quotas.c.project_id.in_([project_id, CLASS])))
    rows = {(row.project_id, row.user_id, row.resource): row.hard_limit for row in found}
    return Limits(defaults, rows, project_id)


def usage(tx: Connection, project_id: str) -> dict[str, Usage]:
    """What each user of the project has, and under '' the whole project; one query on a covering index."""
    rows = tx.execute(
        sa.select(servers.c.user_id, sa.func.count(), sa.func.sum(servers.c.vcpus), sa.func.sum(servers.c.memory_mb))
        .where(servers.c.project_id == project_id, servers.c.deleted == 0).group_by(servers.c.user_id))
    found: dict[str, Usage] = {"": Usage()}
    for user_id, count, vcpus, memory in rows:
        found[user_id] = Usage(int(count), int(vcpus), int(memory))
        found[""].add(int(count), int(vcpus), int(memory))
    return found


def server_groups_used(tx: Connection, project_id: str) -> int:
    """How many server groups the project has."""
    return int(tx.scalar(sa.select(sa.func.count()).select_from(server_groups)
                         .where(server_groups.c.project_id == project_id)) or 0)


def put(tx: Connection, project_id: str, user_id: str, values: dict[str, int]) -> None:
    """Set limits of a project ('*': of the class), or of a user in it."""
    for resource, limit in values.items():
        key: dict[str, Any] = {"project_id": project_id, "user_id": user_id, "resource": resource}
        same = [quotas.c[name] == value for name, value in key.items()]
        if not tx.execute(sa.update(quotas).where(*same).values(hard_limit=limit)).rowcount:
            insert_ignore(tx, quotas, {**key, "hard_limit": limit})


def forget(tx: Connection, project_id: str, user_id: str = "") -> None:
    """Back to the class's limits: for one user, or without a user for the project and all its users."""
    query = sa.delete(quotas).where(quotas.c.project_id == project_id)
    tx.execute(query.where(quotas.c.user_id == user_id) if user_id else query)
