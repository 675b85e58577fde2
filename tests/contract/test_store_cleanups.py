# SPDX-License-Identifier: Apache-2.0
"""Rows of pending cleanups on SQLite, PostgreSQL and MariaDB.

The tests add, take, postpone and remove them.
"""

from __future__ import annotations

from typing import Any

import pytest
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


def test_cleanups_add_keeps_one_row_per_target_and_take_returns_it_once(store: Store) -> None:
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


def test_cleanups_take_by_two_conductors_returns_different_rows(store: Store) -> None:
    add(store, "p1", "p2")
    if store.dialect_name == "sqlite":
        # SQLite has a single writer.
        return
    with store.begin() as first, store.begin() as second:
        [first_row], [second_row] = cleanups.take(first, KINDS, 1), cleanups.take(second, KINDS, 1)
        assert first_row.target != second_row.target


def test_cleanup_delay_doubles_with_each_postpone_until_hasten(store: Store) -> None:
    add(store, "p1")
    due = []
    for _ in range(3):
        [row] = take(store)
        store.write(lambda tx, row=row: cleanups.postpone(tx, row, "No.", cleanups.REFUSED_AT_MOST))
        assert take(store) == []
        [cleanup] = store.read(cleanups.list_all)
        due.append(round((cleanup.due_at - store.now()) / cleanups.FIRST))
        store.write(
            lambda tx, cleanup=cleanup: tx.execute(sa.update(schema.cleanups).values(due_at=now()))
        )
    assert (due, cleanup.why) == ([1, 2, 4], "No.")
    store.write(lambda tx: cleanups.wait(tx, cleanup))
    assert take(store) == []
    assert store.write(lambda tx: cleanups.hasten(tx, cleanup.id))
    assert len(take(store)) == 1


def test_late_attachment_cleanup_added_again_postpones_only_untaken_row(store: Store) -> None:
    """A row that a conductor has taken keeps its longer reservation."""

    def read_due() -> dict[str, int]:
        return {row.place: row.due_at - store.now() for row in store.read(cleanups.list_all)}

    kind = cleanups.LATE_ATTACHMENTS
    add(store, SERVER, kind=kind, place="v1")
    add(store, SERVER, kind=kind, place="v2")
    store.write(lambda tx: tx.execute(sa.update(schema.cleanups).values(due_at=now())))
    add(store, SERVER, kind=kind, place="v2")
    assert read_due()["v1"] <= 0 < read_due()["v2"] <= cleanups.LATE_CALL
    [taken] = store.write(lambda tx: cleanups.take(tx, [kind], 9))
    assert taken.place == "v1"
    add(store, SERVER, kind=kind, place="v1")
    assert read_due()["v1"] > cleanups.LATE_CALL


@pytest.mark.parametrize("kind", cleanups.LATE)
def test_late_cleanup_hasten_keeps_time_until_call_has_ended(store: Store, kind: str) -> None:
    """Before that time the search would find nothing, and the result of the call would remain."""
    add(store, SERVER, kind=kind)
    [cleanup] = store.read(cleanups.list_all)
    assert store.write(lambda tx: cleanups.hasten(tx, cleanup.id))
    assert store.write(lambda tx: cleanups.take(tx, [kind], 9)) == []
    later = {"due_at": now() + 2 * cleanups.LATE_CALL}
    store.write(lambda tx: tx.execute(sa.update(schema.cleanups).values(later)))
    assert store.write(lambda tx: cleanups.hasten(tx, cleanup.id))
    [cleanup] = store.read(cleanups.list_all)
    assert 0 < cleanup.due_at - store.now() <= cleanups.LATE_CALL


def test_cleanups_strike_keeps_cleanup_when_fence_of_server_has_changed(store: Store) -> None:
    add(store, "p1", "p2")
    [first, second] = take(store)
    assert store.read(lambda tx: cleanups.server_of(tx, first)) is None
    assert store.write(lambda tx: cleanups.strike(tx, first, None))
    add_server(store)
    assert not store.write(lambda tx: cleanups.strike(tx, second, 2))
    assert store.write(lambda tx: cleanups.strike(tx, second, 3))
    assert store.read(cleanups.list_all) == []


def test_cleanups_forget_by_target_and_cancel_by_id_remove_row(store: Store) -> None:
    add(store, "p1", "p2")
    store.write(lambda tx: cleanups.forget(tx, cleanups.PORT, "p1"))
    [cleanup] = store.read(cleanups.list_all)
    assert cleanup.target == "p2"
    assert [store.write(lambda tx: cleanups.cancel(tx, cleanup.id)) for _ in range(2)] == [
        True,
        False,
    ]
    assert not store.write(lambda tx: cleanups.hasten(tx, cleanup.id))
