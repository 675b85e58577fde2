# SPDX-License-Identifier: Apache-2.0
"""Images that hosts were asked to fetch ahead: a row until its host says that the image is there.

The API asks, the conductor's sweep tells the hosts that are up and repeats it, with longer and
longer pauses, until they say so; what is not done after a day is given up. Nothing depends on it: a
host that has not fetched an image does it when the first server needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain.clock import SECOND
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import ImageRef
from common.domain.service_binaries import Binary
from common.domain.wire import to_wire
from common.store.engine import for_update, insert_many, notification_settings, now
from common.store.rows import AskedImage, FailedImage
from common.store.schema import heartbeats, host_images, services

PAUSE = 60 * SECOND  #: the shortest time after which a host is told again
GIVEN_UP_AFTER = 24 * 3600 * SECOND
ERROR_LIMIT = 1000  #: characters that a host may say about what went wrong
_C = host_images.c


def ask(
    tx: Connection,
    hosts: Sequence[str],
    images: Sequence[ImageRef],
    mark: JsonMapping | None = None,
) -> None:
    """These hosts shall have these images; one that was asked before is told again at once.
    ``mark``: what is kept beside each image, for ``cached_images``."""
    wanted = [image.id for image in images]
    if hosts and wanted:
        tx.execute(sa.delete(host_images).where(_C.host.in_(hosts), _C.image_id.in_(wanted)))
        insert_many(
            tx,
            host_images,
            [
                {"host": host, "image_id": image.id, "image": {**to_wire(image), **(mark or {})}}
                for host in hosts
                for image in images
            ],
            "asked_at",
            ignore=True,
        )


def due(tx: Connection, limit: int) -> list[AskedImage]:
    """Rows whose hosts are up and should be told now: host, image_id, image; the oldest first."""
    return list(tx.execute(_due(), {"most": limit}))


@cache
def _due() -> sa.Select[Any]:
    """The statement of ``due``, built once because each conductor runs it every few seconds."""
    beats = sa.and_(
        heartbeats.c.host == _C.host,
        heartbeats.c.binary == Binary.COMPUTE,
        heartbeats.c.up.is_(True),
    )
    up = sa.and_(
        services.c.host == _C.host,
        services.c.binary == Binary.COMPUTE,
        services.c.forced_down.is_(False),
    )
    return (
        sa.select(_C.host, _C.image_id, _C.image)
        .select_from(host_images.join(heartbeats, beats).join(services, up))
        .where(_is_due())
        .order_by(_C.asked_at, _C.host, _C.image_id)
        .limit(sa.bindparam("most", type_=sa.Integer))
    )


def _is_due() -> sa.ColumnElement[bool]:
    """Never told, or long ago: the pause grows with the time that it has taken so far."""
    waited = now() - _C.sent_at
    late = sa.or_(
        _C.sent_at.is_(None), sa.and_(waited >= PAUSE, 2 * waited >= _C.sent_at - _C.asked_at)
    )
    return sa.and_(late, sa.or_(_C.error.is_(None), _C.error != ""))


def take(tx: Connection, rows: Sequence[AskedImage]) -> dict[str, list[JsonObject]]:
    """Mark those of these rows as told that nobody else has told meanwhile; host -> images, as
    records of the wire."""
    here = sa.tuple_(_C.host, _C.image_id).in_([(row.host, row.image_id) for row in rows])
    taken = tx.execute(
        for_update(
            sa.select(_C.host, _C.image_id, _C.image)
            .where(here, _is_due())
            .order_by(_C.host, _C.image_id)
        )
    ).all()
    found: dict[str, list[JsonObject]] = {}
    for row in taken:
        found.setdefault(row.host, []).append(row.image)
    tx.execute(
        sa.update(host_images)
        .where(sa.tuple_(_C.host, _C.image_id).in_([(row.host, row.image_id) for row in taken]))
        .values(sent_at=now())
    )
    return found


def record(tx: Connection, host: str, cached: Mapping[str, str]) -> None:
    """What a host says became of images: '' is there, and done with, but for what ``cached_images``
    has to tell of it; anything else is kept beside the row."""
    there = [image for image, error in cached.items() if not error]
    if there:
        those = (_C.host == host, _C.image_id.in_(there))
        tx.execute(
            sa.delete(host_images).where(*those)
            if notification_settings(tx) is None
            else sa.update(host_images).where(*those).values(error="")
        )
    for image, error in cached.items():
        if error:
            tx.execute(
                sa.update(host_images)
                .where(_C.host == host, _C.image_id == image)
                .values(error=error[:ERROR_LIMIT].replace("\x00", ""))
            )


def give_up(tx: Connection) -> list[FailedImage]:
    """Remove what was asked for too long ago; returns it: host, image_id, error."""
    rows: list[FailedImage] = list(
        tx.execute(
            for_update(
                sa.select(_C.host, _C.image_id, _C.error)
                .where(is_late())
                .order_by(_C.host, _C.image_id)
            )
        )
    )
    if rows:
        tx.execute(
            sa.delete(host_images).where(
                sa.tuple_(_C.host, _C.image_id).in_([(row.host, row.image_id) for row in rows])
            )
        )
    return rows


def is_late() -> sa.ColumnElement[bool]:
    """Was it asked for too long ago?"""
    return _C.asked_at < now() - GIVEN_UP_AFTER
