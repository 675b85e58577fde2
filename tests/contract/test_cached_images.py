# SPDX-License-Identifier: Apache-2.0
"""What is told of images that hosts fetch ahead, on three databases: each host once, when it is
done with all."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain.models import HostInventory, ImageRef
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.engine import Store
from common.store.hosts import aggregates, cached_images, host_images, hosts
from tests.told import read_outbox

EVENT, BOTH = "aggregate.cache_images.", ("i1", "i2")


@pytest.fixture
def number(store: Store) -> int:
    """An aggregate of two hosts."""
    made: int = store.write(lambda tx: aggregates.create(tx, "racks", None)).id
    for host in ("h1", "h2"):
        store.write(
            lambda tx, host=host: hosts.register(  # type: ignore[misc]
                tx, host, "boot", HostInventory("memory", 1, host, 8, 4096, 100)
            )
        )
        store.write(lambda tx, host=host: aggregates.add_host(tx, made, host, "nova"))  # type: ignore[misc]
    store.notify_with(NotificationSettings("api1"))
    return made


def ask(store: Store, number: int, *images: str) -> None:
    store.write(
        lambda tx: cached_images.ask(
            tx, *aggregates.show(tx, number), [ImageRef(name) for name in images]
        )
    )


def says(store: Store, host: str, **cached: str) -> None:
    store.write(lambda tx: host_images.record(tx, host, cached))


def news(store: Store) -> list[tuple[str, Any]]:
    """What the sweep has to tell: the event, and who is done as the how many-th with what."""
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


def left(store: Store) -> list[tuple[str, str]]:
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


def test_each_host_is_told_when_it_has_all_and_then_the_end(store: Store, number: int) -> None:
    ask(store, number, *BOTH)
    assert [row.event for row in read_outbox(store)] == [EVENT + "start"]
    assert read_outbox(store)[0].body["object"]["hosts"] == ["h1", "h2"]
    says(store, "h2", i1="")
    assert news(store) == []
    says(store, "h2", i2="")
    assert news(store) == [("progress", ("h2", 1, 2, ["i1", "i2"], []))]
    assert left(store) == [("h1", "i1"), ("h1", "i2")]
    says(store, "h1", i1="", i2="it broke off")
    assert news(store) == []
    says(store, "h1", i2="")
    assert news(store) == [("progress", ("h1", 2, 2, ["i1", "i2"], [])), ("end", None)]
    assert left(store) == [] and news(store) == []


def test_hosts_that_are_done_together_are_told_in_one_go(store: Store, number: int) -> None:
    ask(store, number, "i1")
    says(store, "h1", i1="")
    says(store, "h2", i1="")
    assert news(store) == [
        ("progress", ("h1", 1, 2, ["i1"], [])),
        ("progress", ("h2", 2, 2, ["i1"], [])),
        ("end", None),
    ]


def test_what_is_given_up_has_failed(store: Store, number: int) -> None:
    ask(store, number, *BOTH)
    says(store, "h1", i1="", i2="it broke off")
    says(store, "h2", i1="", i2="")
    store.write(
        lambda tx: tx.execute(
            sa.update(schema.host_images)
            .where(schema.host_images.c.host == "h1")
            .values(asked_at=0)
        )
    )
    assert news(store) == [
        ("progress", ("h1", 1, 2, ["i1"], ["i2"])),
        ("progress", ("h2", 2, 2, ["i1", "i2"], [])),
        ("end", None),
    ]
    assert left(store) == []


def test_what_is_there_is_not_asked_for_again(store: Store, number: int) -> None:
    ask(store, number, *BOTH)
    store.write(lambda tx: tx.execute(sa.update(schema.heartbeats).values(up=True)))
    says(store, "h1", i1="")
    due = [(row.host, row.image_id) for row in store.read(lambda tx: host_images.due(tx, 10))]
    assert ("h1", "i1") not in due


def test_two_requests_are_told_apart(store: Store, number: int) -> None:
    ask(store, number, "i1")
    ask(store, number, "i2")
    says(store, "h1", i1="", i2="")
    says(store, "h2", i2="")
    told = news(store)
    assert sorted(told, key=str) == sorted(
        [
            ("progress", ("h1", 1, 2, ["i1"], [])),
            ("progress", ("h1", 1, 2, ["i2"], [])),
            ("progress", ("h2", 2, 2, ["i2"], [])),
            ("end", None),
        ],
        key=str,
    )


def test_an_aggregate_without_hosts_is_done_at_once(store: Store) -> None:
    store.notify_with(NotificationSettings("api1"))
    number = store.write(lambda tx: aggregates.create(tx, "empty", None)).id
    ask(store, number, "i1")
    assert [row.event for row in read_outbox(store)][-2:] == [EVENT + "start", EVENT + "end"]


def test_of_an_aggregate_that_is_gone_nothing_is_told(store: Store, number: int) -> None:
    ask(store, number, "i1")
    store.write(lambda tx: tx.execute(sa.delete(schema.aggregate_hosts)))
    store.write(lambda tx: tx.execute(sa.delete(schema.aggregates)))
    says(store, "h1", i1="")
    says(store, "h2", i1="")
    assert news(store) == [] and left(store) == []


def test_where_nothing_is_told_rows_go_at_once(store: Store, number: int) -> None:
    """Also those that a conductor kept that told."""
    ask(store, number, *BOTH)
    says(store, "h1", i1="")
    store.notify_with(None)
    says(store, "h1", i2="")
    assert left(store) == [("h1", "i1"), ("h2", "i1"), ("h2", "i2")]
    assert news(store) == [] and left(store) == [("h2", "i1"), ("h2", "i2")]
