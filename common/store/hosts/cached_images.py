# SPDX-License-Identifier: Apache-2.0
"""Notifications about images that the hosts of an aggregate fetch ahead.

There is one notification at the start, one per complete host, and one at the end. The rows of
``host_images`` contain a mark with the request, its aggregate and the number of hosts. With
notifications on, a row of a cached image stays until all rows of that host and request are
complete. The conductor's sweep calls ``settle``. If a later request replaces all images of a
request, the earlier one has no further notifications.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids
from common.domain.json_types import JsonMapping
from common.domain.models import ImageRef
from common.notifications.events import Notice
from common.store.engine import for_update, notification_settings
from common.store.hosts import aggregates, host_images
from common.store.notifications import outbox
from common.store.rows import AggregateRow, FailedImage, MarkedImage
from common.store.schema import host_images as table

MARK, EVENT = "asked_for", "aggregate.cache_images"
_C = table.c
_DONE = _C.error == ""
_OVER = sa.select(_C.host).where(sa.or_(_DONE, host_images.is_late())).limit(1)
_ALL = sa.select(
    _C.host, _C.image_id, _C.image, _C.error, host_images.is_late().label("late")
).order_by(_C.host, _C.image_id)
Pair = tuple[str, str]


def ask(
    tx: Connection, aggregate: AggregateRow, hosts: Sequence[str], images: Sequence[ImageRef]
) -> None:
    """Record that these hosts of the aggregate should cache these images, and notify of the start.

    A new request of an image replaces the host's earlier request of the same image. Without hosts
    or images, the end is notified at once.
    """
    mark = {MARK: {"request": ids.new(), "aggregate": aggregate.id, "hosts": len(hosts)}}
    picture = {**aggregate._mapping, "hosts": list(hosts)}
    outbox.tell(
        tx,
        str(aggregate.id),
        picture,
        f"{EVENT}.start",
        *([] if hosts and images else [f"{EVENT}.end"]),
    )
    host_images.ask(tx, hosts, images, mark if notification_settings(tx) else {})


def is_something_over(tx: Connection) -> bool:
    """Return True if ``settle`` may have work: an image is cached, or a row is too old."""
    return tx.execute(_OVER).first() is not None


def settle(tx: Connection) -> list[FailedImage]:
    """Delete the rows of cached images, and the rows that are too old (``host_images.is_late``).

    With notifications on, now and at the request, the row of a cached image stays until all images
    that the same request demands of the host are cached or too old. Then a notice about the
    host is written, and after the last host a notice about the end.

    Returns:
        The deleted rows that were too old. The error of such a row is "" if the image is cached.
    """
    if notification_settings(tx) is None:
        tx.execute(sa.delete(table).where(_DONE))
    else:
        _tell(tx)
    return host_images.give_up(tx)


def _tell(tx: Connection) -> None:
    requests: dict[str, dict[str, list[MarkedImage]]] = defaultdict(lambda: defaultdict(list))
    marks: dict[str, JsonMapping] = {}
    gone: list[Pair] = []
    for row in tx.execute(for_update(_ALL)):
        mark = row.image.get(MARK)
        if mark is not None:
            requests[mark["request"]][row.host].append(row)
            marks[mark["request"]] = mark
        elif row.error == "":
            gone.append((row.host, row.image_id))
    for request, by_host in requests.items():
        over = {
            host: rows
            for host, rows in by_host.items()
            if all(row.error == "" or row.late for row in rows)
        }
        if over:
            outbox.add(tx, _notices(tx, marks[request], over, len(by_host) - len(over)))
        gone += [
            (host, row.image_id) for host, rows in over.items() for row in rows if not row.late
        ]
    if gone:
        tx.execute(sa.delete(table).where(sa.tuple_(_C.host, _C.image_id).in_(gone)))


def _notices(
    tx: Connection, mark: JsonMapping, over: Mapping[str, list[MarkedImage]], left: int
) -> list[Notice]:
    """Return a notice for each host in ``over``, and the notice of the end if no host is left.

    Returns [] if the aggregate is deleted.

    Args:
        tx: The transaction.
        mark: The request's mark: request, aggregate and number of hosts.
        over: Host -> the request's rows, for hosts whose images are all cached or too old by now.
        left: Number of the request's other hosts, which still have to cache images.
    """
    try:
        row, hosts = aggregates.show(tx, mark["aggregate"])
    except errors.NotFound:
        return []
    key, found = str(row.id), []
    for index, (host, rows) in enumerate(over.items(), mark["hosts"] - left - len(over) + 1):
        about = {
            "host": host,
            "index": index,
            "total": mark["hosts"],
            "images_cached": [one.image_id for one in rows if one.error == ""],
            "images_failed": [one.image_id for one in rows if one.error != ""],
        }
        found.append(Notice(f"{EVENT}.progress", key, about={"object": {**row._mapping, **about}}))
    if not left:
        found.append(
            Notice(f"{EVENT}.end", key, about={"object": {**row._mapping, "hosts": hosts}})
        )
    return found
