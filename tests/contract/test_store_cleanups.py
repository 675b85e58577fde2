# SPDX-License-Identifier: Apache-2.0
"""Pending cleanups on SQLite, PostgreSQL and MariaDB: one row for one thing, taken by one
conductor, gone when done."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from common.store import cleanups, schema
from common.store.engine import Store, now
from tests.server_rows import server_row

SERVER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"
KINDS = (cleanups.PORT, cleanups.BINDING)


def add(store: Store, *targets: str, kind: str = cleanups.PORT, place: str = "") -> None:
    store.write(
        lambda tx: cleanups.add(
            tx,
            [
                {
                    "kind": kind,
                    "target": target,
                    "place": place,
                    "args": {"a": 1},
                    "server_id": SERVER,
                    "project_id": "p",
                    "why": "x" * 2000,
                }
                for target in targets
            ],
        )
    )


def take(store: Store, limit: int = 9) -> list[Any]:
    return store.write(lambda tx: cleanups.take(tx, KINDS, limit))


def add_server(store: Store) -> None:
    store.write(
        lambda tx: tx.execute(sa.insert(schema.servers).values(**server_row(SERVER, fence=3)))
    )


def test_one_thing_has_one_row_that_one_conductor_gets(store: Store) -> None:
    add(store, "p1", "p2")
    add(store, "p2", "p3")
    add(store, "p1", kind=cleanups.BINDING, place="h1")
    add(store, "p1", kind="of_a_newer_one")
    assert len(store.read(cleanups.list_all)) == 5
    first = take(store, 3)
    assert (
        len(first) == 3 and len(first[0].why) == cleanups.LONGEST_WHY and first[0].args == {"a": 1}
    )
    assert len(take(store)) == 1
    assert take(store) == []


def test_two_conductors_at_once_take_different_ones(store: Store) -> None:
    add(store, "p1", "p2")
    if store.dialect_name == "sqlite":
        return  # its writers are alone
    with store.begin() as one, store.begin() as other:
        [mine], [theirs] = cleanups.take(one, KINDS, 1), cleanups.take(other, KINDS, 1)
        assert mine.target != theirs.target


def test_the_next_try_is_later_each_time_unless_it_is_hastened(store: Store) -> None:
    add(store, "p1")
    due = []
    for _ in range(3):
        [row] = take(store)
        store.write(lambda tx, row=row: cleanups.postpone(tx, row, "No.", cleanups.REFUSED_AT_MOST))
        assert take(store) == []
        [found] = store.read(cleanups.list_all)
        due.append(round((found.due_at - store.now()) / cleanups.FIRST))
        store.write(
            lambda tx, found=found: tx.execute(sa.update(schema.cleanups).values(due_at=now()))
        )
    assert (due, found.why) == ([1, 2, 4], "No.")
    store.write(lambda tx: cleanups.wait(tx, found))
    assert take(store) == []
    assert store.write(lambda tx: cleanups.hasten(tx, found.id))
    assert len(take(store)) == 1


def test_it_is_struck_unless_its_server_has_changed(store: Store) -> None:
    add(store, "p1", "p2")
    [one, other] = take(store)
    assert store.read(lambda tx: cleanups.server_of(tx, one)) is None
    assert store.write(lambda tx: cleanups.strike(tx, one, None))
    add_server(store)
    assert not store.write(lambda tx: cleanups.strike(tx, other, 2))
    assert store.write(lambda tx: cleanups.strike(tx, other, 3))
    assert store.read(cleanups.list_all) == []


def test_it_can_be_forgotten_and_dropped(store: Store) -> None:
    add(store, "p1", "p2")
    store.write(lambda tx: cleanups.forget(tx, cleanups.PORT, "p1"))
    [left] = store.read(cleanups.list_all)
    assert left.target == "p2"
    assert [store.write(lambda tx: cleanups.drop(tx, left.id)) for _ in range(2)] == [True, False]
    assert not store.write(lambda tx: cleanups.hasten(tx, left.id))
