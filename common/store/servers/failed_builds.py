# SPDX-License-Identifier: Apache-2.0
"""Builds that failed lately, as actions' journals have them: where, of which image, and why.

Asked by conductors when a build has failed, and by the operator's ``kilonova hosts``. Both look
only at servers that changed within the last hour, by an index.
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
    """So many builds of an image ("" when there was none) failed on a host with these words."""

    host: str
    image: str
    cause: str
    builds: int


def recent_failures(tx: Connection) -> list[FailedBuild]:
    """Those of the last hour, by host, most first."""
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
        key=lambda one: (one.host, -one.builds, one.image, one.cause),
    )


def says_something(tx: Connection, action_id: str, host: str, image_id: str | None) -> bool:
    """Does a build that failed say anything of its host? Not when the same image has failed there
    lately and no server that was made of it lately runs: then it is as likely the image."""
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
