# SPDX-License-Identifier: Apache-2.0
"""Usage of projects: the servers that ran in a period, and for how long.

A server counts from launch to termination, with the current or last flavor. Servers that were never
launched do not count. Times are in µs of the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import Flavor
from common.domain.wire import from_wire
from common.service.log import get_logger
from common.store.schema import servers

log = get_logger(__name__)

C = servers.c


@dataclass(frozen=True, slots=True)
class Period:
    """A period between two times in µs."""

    since: int
    until: int

    def micros(self, launched: int, terminated: int | None) -> int:
        """Return how long a server ran in the period, in µs. ``terminated`` None: it still runs."""
        return max(0, min(terminated or self.until, self.until) - max(launched, self.since))


@dataclass(frozen=True, slots=True)
class Used:
    """The usage of one server in a period, or the sum of a project's servers with one flavor.

    ``micros`` is the time for which the server ran, or the sum. A sum has the id "".
    """

    project_id: str
    flavor: Flavor
    micros: int
    id: str = ""
    name: str = ""
    vm_state: str = ""
    launched_at: int = 0
    terminated_at: int | None = None


def _ran(period: Period, project_id: str | None) -> list[sa.ColumnElement[bool]]:
    conditions = [
        C.launched_at < period.until,
        sa.or_(C.terminated_at.is_(None), C.terminated_at > period.since),
    ]
    return conditions if project_id is None else [C.project_id == project_id, *conditions]


def of_servers(
    tx: Connection,
    period: Period,
    project_id: str | None = None,
    marker: str | None = None,
    limit: int | None = None,
) -> Iterator[Used]:
    """Yield the usage of each server that ran in the period, by project and id.

    Servers with damaged times are logged and left out. Further servers then fill the page, because
    callers take a page with fewer servers for the last page.

    Args:
        tx: The transaction.
        period: The period.
        project_id: Only servers of this project. None: all projects.
        marker: Id of the last server of the previous page. None: the first page.
        limit: Most servers to yield. None: all.

    Raises:
        BadRequest: The marker is not the id of a server. Raised when iteration starts.
    """
    query = (
        sa.select(C.project_id, C.flavor, C.id, C.name, C.vm_state, C.launched_at, C.terminated_at)
        .where(*_ran(period, project_id))
        .order_by(C.project_id, C.id)
    )
    if limit is not None:
        query = query.limit(limit)
    if marker is not None:
        last = tx.scalar(sa.select(C.project_id).where(C.id == marker))
        if last is None:
            raise errors.BadRequest(f"marker [{marker[:80]}] not found")
        query = query.where(
            sa.or_(C.project_id > last, sa.and_(C.project_id == last, C.id > marker))
        )
    left_out = 0
    for row in tx.execute(query):
        if not all(isinstance(at, int | None) for at in (row.launched_at, row.terminated_at)):
            log.error(
                "the times of a server are damaged, so its usage is not counted", server=row.id
            )
            left_out += 1
            continue
        yield Used(
            row.project_id,
            _flavor(row.flavor),
            period.micros(row.launched_at, row.terminated_at),
            row.id,
            row.name,
            row.vm_state,
            row.launched_at,
            row.terminated_at,
        )
    if limit is not None and left_out:
        yield from of_servers(tx, period, project_id, row.id, left_out)


def sums(tx: Connection, period: Period, project_id: str | None = None) -> Iterator[Used]:
    """Yield the sums of usage in the period by project and flavor, computed by the database."""
    began = sa.case((C.launched_at > period.since, C.launched_at), else_=period.since)
    ended = sa.case((C.terminated_at < period.until, C.terminated_at), else_=period.until)
    query = (
        sa.select(C.project_id, C.flavor, sa.func.sum(ended - began).label("micros"))
        .where(*_ran(period, project_id))
        .group_by(C.project_id, C.flavor)
        .order_by(C.project_id)
    )
    for row in tx.execute(query):
        yield Used(row.project_id, _flavor(row.flavor), int(row.micros))


def _flavor(frozen: JsonObject) -> Flavor:
    """Return the flavor of a server from JSON. A damaged flavor is logged and has the size 0."""
    try:
        return from_wire(Flavor, frozen)
    except TypeError:
        log.exception("the flavor of a server is damaged, so only the server's hours are counted")
        return Flavor("unknown", "unknown", 0, 0, 0)
