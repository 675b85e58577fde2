# SPDX-License-Identifier: Apache-2.0
"""Notifications of image prefetching, on the three databases.

Each host is reported once, when all images are cached or have failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain.models import HostInventory, ImageRef
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.hosts import aggregates, cached_images, host_images, hosts
from tests.outbox_events import read_outbox

EVENT, BOTH = "aggregate.cache_images.", ("i1", "i2")


@pytest.fixture
def number(store: Store) -> int:
    """Return the number of an aggregate of two hosts."""
    number: int = store.write(lambda tx: aggregates.create(tx, "racks", None)).id
    for host in ("h1", "h2"):
        store.write(
            lambda tx, host=host: hosts.register(  # type: ignore[misc]
                tx, host, "boot", HostInventory("memory", 1, host, 8, 4096, 100)
            )
        )
        store.write(lambda tx, host=host: aggregates.add_host(tx, number, host, "nova"))  # type: ignore[misc]
    store.notify_with(NotificationSettings("api1"))
    return number


def request_images(store: Store, number: int, *images: str) -> None:
    store.write(
        lambda tx: cached_images.ask(
            tx, *aggregates.show(tx, number), [ImageRef(name) for name in images]
        )
    )


def record_report(store: Store, host: str, **cached: str) -> None:
    store.write(lambda tx: host_images.record(tx, host, cached))


def sweep_notifications(store: Store) -> list[tuple[str, Any]]:
    """Run the sweep and return the new notifications, reduced to event and progress."""
    before = len(read_outbox(store))
    if store.read(cached_images.is_something_over):
        store.write(cached_images.settle)
    return [
        (
            row.event.removeprefix(EVENT),
            of.get("host")
            and (of["host"], of["index"], of["total"], of["images_cached"], of["images_failed"]),
        )
        for row in read_outbox(store)[before:]
        for of in [row.body["object"]]
    ]


def stored_rows(store: Store) -> list[tuple[str, str]]:
    return [
        tuple(row)
        for row in store.read(
            lambda tx: tx.execute(
                sa.select(schema.host_images.c.host, schema.host_images.c.image_id).order_by(
                    *schema.host_images.primary_key
                )
            ).all()
        )
    ]


def test_prefetch_notifies_each_complete_host_and_then_end(store: Store, number: int) -> None:
    request_images(store, number, *BOTH)
    assert [row.event for row in read_outbox(store)] == [EVENT + "start"]
    assert read_outbox(store)[0].body["object"]["hosts"] == ["h1", "h2"]
    record_report(store, "h2", i1="")
    assert sweep_notifications(store) == []
    record_report(store, "h2", i2="")
    assert sweep_notifications(store) == [("progress", ("h2", 1, 2, ["i1", "i2"], []))]
    assert stored_rows(store) == [("h1", "i1"), ("h1", "i2")]
    record_report(store, "h1", i1="", i2="it broke off")
    assert sweep_notifications(store) == []
    record_report(store, "h1", i2="")
    assert sweep_notifications(store) == [
        ("progress", ("h1", 2, 2, ["i1", "i2"], [])),
        ("end", None),
    ]
    assert stored_rows(store) == [] and sweep_notifications(store) == []


def test_prefetch_notifies_hosts_together_when_both_are_complete(store: Store, number: int) -> None:
    request_images(store, number, "i1")
    record_report(store, "h1", i1="")
    record_report(store, "h2", i1="")
    assert sweep_notifications(store) == [
        ("progress", ("h1", 1, 2, ["i1"], [])),
        ("progress", ("h2", 2, 2, ["i1"], [])),
        ("end", None),
    ]


def test_prefetch_notifies_images_not_cached_in_time_as_failed(store: Store, number: int) -> None:
    request_images(store, number, *BOTH)
    record_report(store, "h1", i1="", i2="it broke off")
    record_report(store, "h2", i1="", i2="")
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.host_images)
            .where(schema.host_images.c.host == "h1")
            .values(asked_at=0)
        )
    )
    assert sweep_notifications(store) == [
        ("progress", ("h1", 1, 2, ["i1"], ["i2"])),
        ("progress", ("h2", 2, 2, ["i1", "i2"], [])),
        ("end", None),
    ]
    assert stored_rows(store) == []


def test_prefetched_image_of_host_is_not_due_again(store: Store, number: int) -> None:
    request_images(store, number, *BOTH)
    store.write(lambda tx: tx.execute(sa.update(schema.heartbeats).values(up=True)))
    record_report(store, "h1", i1="")
    due = [(row.host, row.image_id) for row in store.read(lambda tx: host_images.due(tx, 10))]
    assert ("h1", "i1") not in due


def test_two_prefetch_requests_are_notified_separately(store: Store, number: int) -> None:
    request_images(store, number, "i1")
    request_images(store, number, "i2")
    record_report(store, "h1", i1="", i2="")
    record_report(store, "h2", i2="")
    notifications = sweep_notifications(store)
    assert sorted(notifications, key=str) == sorted(
        [
            ("progress", ("h1", 1, 2, ["i1"], [])),
            ("progress", ("h1", 1, 2, ["i2"], [])),
            ("progress", ("h2", 2, 2, ["i2"], [])),
            ("end", None),
        ],
        key=str,
    )


def test_prefetch_for_aggregate_without_hosts_notifies_start_and_end(store: Store) -> None:
    store.notify_with(NotificationSettings("api1"))
    number = store.write(lambda tx: aggregates.create(tx, "empty", None)).id
    request_images(store, number, "i1")
    assert [row.event for row in read_outbox(store)][-2:] == [EVENT + "start", EVENT + "end"]


def test_prefetch_for_deleted_aggregate_sends_no_notification(store: Store, number: int) -> None:
    request_images(store, number, "i1")
    store.write(lambda tx: tx.execute(sa.delete(schema.aggregate_hosts)))
    store.write(lambda tx: tx.execute(sa.delete(schema.aggregates)))
    record_report(store, "h1", i1="")
    record_report(store, "h2", i1="")
    assert sweep_notifications(store) == [] and stored_rows(store) == []


def test_prefetch_rows_of_cached_images_are_deleted_if_notifications_off(
    store: Store, number: int
) -> None:
    """This includes rows that a conductor kept while notifications were on."""
    request_images(store, number, *BOTH)
    record_report(store, "h1", i1="")
    store.notify_with(None)
    record_report(store, "h1", i2="")
    assert stored_rows(store) == [("h1", "i1"), ("h2", "i1"), ("h2", "i2")]
    assert sweep_notifications(store) == [] and stored_rows(store) == [("h2", "i1"), ("h2", "i2")]
