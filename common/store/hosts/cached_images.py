# SPDX-License-Identifier: Apache-2.0
"""What is told of images that hosts fetch ahead for an aggregate: begin, each host that is done
with all of them, end.

A request's rows of ``host_images`` carry a mark beside the image: the request, its aggregate and
how many hosts it is for. While something is told a row stays when its host has the image, until
this module, called by the conductor's sweep, finds all of the host's rows of the request over. A
request that another takes over, image by image, ends with that one.
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
    """The hosts of this aggregate shall have these images."""
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
    """Has a host done something, or was something asked for too long ago?"""
    return tx.execute(_OVER).first() is not None


def settle(tx: Connection) -> list[FailedImage]:
    """Tell of hosts that are done with a request, and forget what is over; returns what was given
    up: host, image_id, error."""
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
    """``left``: hosts that are not done yet. Of an aggregate that is gone nothing is told."""
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
