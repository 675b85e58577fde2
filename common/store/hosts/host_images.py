# SPDX-License-Identifier: Apache-2.0
"""Images that hosts fetch ahead: a row until the host reports the image as cached.

The API inserts the rows. The conductor's sweep notifies the hosts that are up, with growing pauses,
until they report success. After a day a row is deleted. This is only an optimization: a host
without the image fetches it for the first server.
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

#: Shortest interval of repetitions.
PAUSE = 60 * SECOND
GIVEN_UP_AFTER = 24 * 3600 * SECOND
#: Limit of the stored error text.
ERROR_LIMIT = 1000
_C = host_images.c


def ask(
    tx: Connection,
    hosts: Sequence[str],
    images: Sequence[ImageRef],
    mark: JsonMapping | None = None,
) -> None:
    """Record that these hosts should cache these images. The conductor's sweep sends the requests.

    A new row replaces the existing row of the same host and image.

    Args:
        tx: The transaction.
        hosts: The hosts.
        images: The images.
        mark: Data stored with each image, for ``cached_images``. None: no data.
    """
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
    """Return up to ``limit`` requests that must be sent, oldest first.

    These are the requests of images that are not cached, and that were not sent lately
    (``_is_due``). Requests to hosts that are down or forced down are left out.
    """
    return list(tx.execute(_due(), {"most": limit}))


@cache
def _due() -> sa.Select[Any]:
    """Return the statement of ``due``. Cached, because each conductor runs it every few seconds."""
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
    """Return the condition that an image is not cached, and its request must be sent (again).

    After a send, the pause is half of the request's age at that send, but at least ``PAUSE``.
    """
    waited = now() - _C.sent_at
    late = sa.or_(
        _C.sent_at.is_(None), sa.and_(waited >= PAUSE, 2 * waited >= _C.sent_at - _C.asked_at)
    )
    return sa.and_(late, sa.or_(_C.error.is_(None), _C.error != ""))


def take(tx: Connection, rows: Sequence[AskedImage]) -> dict[str, list[JsonObject]]:
    """Mark the rows that are still due as sent, and return host -> images to request.

    The caller then sends the requests. ``rows`` is a result of ``due``.
    """
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
    """Record the results of a host's prefetch: image id -> error, or "" if the image is cached.

    The row of a cached image is deleted. With notifications on, the row stays until
    ``cached_images.settle`` has written the notification. A failed image keeps its row and is
    requested again, until the row is too old (``is_late``). Images without a row are ignored.
    """
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
    """Delete the requests that are too old, and return their host, image_id and last error.

    The error is None if the host has reported no result, and "" if the image is cached.
    """
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
    """Return the condition that a request is older than ``GIVEN_UP_AFTER``."""
    return _C.asked_at < now() - GIVEN_UP_AFTER
