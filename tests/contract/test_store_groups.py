# SPDX-License-Identifier: Apache-2.0
"""Server groups on SQLite, PostgreSQL and MariaDB when creates and deletes run in parallel."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from common.store.engine import Connection, Store
from common.store.tenants import server_groups

ROUNDS, MAX_ROUNDS = 25, 250


def new_group(store: Store) -> str:
    return str(
        store.write(
            lambda tx: server_groups.create(
                tx,
                {
                    "project_id": "project",
                    "user_id": "user",
                    "name": "g",
                    "policy": "affinity",
                    "rules": {},
                },
            )
        ).id
    )


def join(tx: Connection, group: str) -> bool:
    """Lock the group and add a member if the group exists, as a create does."""
    exists = group in server_groups.lock(tx, [group])
    server_groups.join(tx, [{"group_id": group, "server_id": ids.new()}] if exists else [])
    return exists


def test_group_delete_during_parallel_joins_leaves_no_members(store: Store) -> None:
    joined = rounds = 0
    while rounds < ROUNDS or (joined in (0, 3 * rounds) and rounds < MAX_ROUNDS):
        rounds += 1
        group, start = new_group(store), threading.Barrier(4)

        def join_or_delete(
            number: int, group: str = group, start: threading.Barrier = start
        ) -> bool:
            start.wait(10)
            if number:
                return store.write(lambda tx: join(tx, group))
            store.write(lambda tx: server_groups.delete(tx, group))
            return False

        with ThreadPoolExecutor(4) as pool:
            joined += sum(pool.map(join_or_delete, range(4)))
    assert (
        store.read(
            lambda tx: tx.scalar(
                sa.select(sa.func.count()).select_from(schema.server_group_members)
            )
        )
        == 0
    )
    assert 0 < joined < 3 * rounds, "the race was none"


def test_group_delete_waits_for_transaction_of_join(store: Store) -> None:
    group, locked = new_group(store), threading.Event()

    def delete() -> None:
        locked.wait(10)
        store.write(lambda tx: server_groups.delete(tx, group))

    with ThreadPoolExecutor(1) as pool, store.begin() as tx:
        waiting = pool.submit(delete)
        assert join(tx, group)
        locked.set()
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        tx.commit()
        waiting.result(20)
    assert store.read(lambda tx: server_groups.members(tx, [group])) == {group: []}
    assert store.read(lambda tx: list(tx.execute(sa.select(schema.server_group_members)))) == []
