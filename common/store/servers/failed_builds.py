# SPDX-License-Identifier: Apache-2.0
"""Recently failed builds from the journals of actions: host, image and reason.

Conductors use this after a failed build, and operators with ``kilonova hosts``. Both read only
servers that changed within the last hour, by an index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.domain.statuses import StepEvent
from common.store.engine import moment
from common.store.schema import actions, events, servers

RECENT_MICROSECONDS = 3600 * SECOND
STEP = "build"


class FailedBuild(NamedTuple):
    """The number of builds of an image that failed on a host with the same message ``cause``.

    ``image`` is the image's id, or "" for servers without an image.
    """

    host: str
    image: str
    cause: str
    builds: int


def recent_failures(tx: Connection) -> list[FailedBuild]:
    """Return the numbers of failed builds in the last hour by host, image and message.

    They are sorted by host, and for each host the most frequent comes first.
    """
    count = sa.func.count()
    query = (
        sa.select(events.c.host, servers.c.image_id, events.c.message, count.label("builds"))
        .select_from(_journals())
        .where(*_is_recent(tx), events.c.host.is_not(None))
        .group_by(events.c.host, servers.c.image_id, events.c.message)
    )
    return sorted(
        (
            FailedBuild(row.host, row.image_id or "", row.message or "", row.builds)
            for row in tx.execute(query)
        ),
        key=lambda build: (build.host, -build.builds, build.image, build.cause),
    )


def counts_against_host(tx: Connection, action_id: str, host: str, image_id: str | None) -> bool:
    """Return True if a failed build counts against its host.

    It does not count if, within the last hour, another build of the same image failed on the host
    and no server of the image was launched on any host. Then the image may be the cause. Without an
    image, a failed build always counts.
    """
    if image_id is None:
        return True
    since = moment(tx) - RECENT_MICROSECONDS
    works = sa.exists().where(
        servers.c.updated_at > since, servers.c.image_id == image_id, servers.c.launched_at > since
    )
    before = (
        sa.select(events.c.seq)
        .select_from(_journals())
        .where(
            *_is_recent(tx),
            servers.c.image_id == image_id,
            events.c.host == host,
            actions.c.id != action_id,
        )
        .exists()
    )
    return bool(tx.scalar(sa.select(sa.or_(works, sa.not_(before)))))


def _journals() -> Any:
    return servers.join(actions, actions.c.server_id == servers.c.id).join(
        events, events.c.action_id == actions.c.id
    )


def _is_recent(tx: Connection) -> tuple[Any, ...]:
    since = moment(tx) - RECENT_MICROSECONDS
    return (
        servers.c.updated_at > since,
        events.c.step == STEP,
        events.c.event == StepEvent.FAILED,
        events.c.at > since,
    )
