# SPDX-License-Identifier: Apache-2.0
"""Connections that break at COMMIT, on the three databases.

Each request takes effect once, and the caller learns the outcome.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.store import schema
from common.store.engine import Store, insert_ignore
from common.store.hosts import aggregates
from common.store.placement import providers
from common.store.servers import actions, console_tokens
from common.store.tenants import flavors, keypairs, server_groups
from compute_api.compute.request.creation import Created, Creator
from tests.contract.test_store import USER, active_server
from tests.contract.test_store_servers import LIMITS, creation
from tests.faults import Wire, lose_commit_answer
from tests.waiting import await_true


@pytest.fixture(params=[True, False], ids=["committed", "lost"])
def is_committed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def count(store: Store, table: sa.Table) -> int:
    return store.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(table))) or 0


def test_store_write_with_check_repeats_work_only_if_commit_was_lost(
    store: Store, is_committed: bool
) -> None:
    runs: list[str] = []

    def work(tx: sa.Connection) -> str:
        runs.append(f"p{len(runs)}")
        insert_ignore(tx, schema.projects, {"id": runs[-1], "quota_seq": 0})
        return runs[-1]

    def is_there(tx: sa.Connection, name: str) -> bool:
        return (
            tx.scalar(sa.select(schema.projects.c.id).where(schema.projects.c.id == name))
            is not None
        )

    with lose_commit_answer(store, committed=is_committed) as lost:
        assert store.write(work, is_there) == ("p0" if is_committed else "p1")
    assert lost and count(store, schema.projects) == 1


def test_store_write_without_check_raises_unsure_when_commit_is_unknown(
    store: Store, is_committed: bool
) -> None:
    with (
        lose_commit_answer(store, committed=is_committed),
        pytest.raises(errors.Unsure, match="check before you repeat the request"),
    ):
        store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": "p", "quota_seq": 0}))
    assert count(store, schema.projects) == is_committed


def test_batched_server_creates_happen_once_when_commit_is_unknown(
    store: Store, is_committed: bool
) -> None:
    """Two POST requests that queue behind a third go into one transaction."""
    creator, created = Creator(store, LIMITS), {}
    creations = {name: creation(name) for name in ("a", "b")}
    creator._has_leader = True

    def post(name: str) -> None:
        created[name] = creator.create(creations[name])

    posts = [threading.Thread(target=post, args=(name,)) for name in creations]
    for thread in posts:
        thread.start()
    await_true(lambda: creator.waiting == 2)
    with lose_commit_answer(store, committed=is_committed):
        creator._lead()
        for thread in posts:
            thread.join(10)
    rows = store.read(
        lambda tx: {row.name: row.id for row in tx.execute(sa.select(schema.servers))}
    )
    assert {name: thread.server_id for name, thread in created.items()} == rows
    assert count(store, schema.servers) == count(store, schema.actions) == 2


def test_create_server_with_idempotency_key_happens_once_if_commit_unknown(
    store: Store, is_committed: bool
) -> None:
    creator, request = Creator(store, LIMITS), creation(key="k")
    with lose_commit_answer(store, committed=is_committed):
        created = creator.create(request)
    assert creator.create(request) == Created(
        created.server_id, created.reservation_id, repeated=True, digest=request.digest
    )
    assert count(store, schema.servers) == 1


def test_begin_action_happens_once_when_commit_is_unknown(store: Store, is_committed: bool) -> None:
    server, stop = active_server(store), states.row("os-stop")
    with lose_commit_answer(store, committed=is_committed):
        action = store.write(
            lambda tx: actions.begin(tx, stop, server, context=USER),
            lambda tx, action_id: actions.is_begun(tx, action_id, server),
        )
    rows = store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions.c.id).where(schema.actions.c.name == stop.name)
        ).all()
    )
    assert [row.id for row in rows] == [action]


def create_flavor(tx: sa.Connection) -> Any:
    return flavors.create(
        tx,
        {
            "flavorid": "f",
            "name": "f",
            "vcpus": 1,
            "memory_mb": 1,
            "root_gb": 1,
            "ephemeral_gb": 0,
            "swap_mb": 0,
            "rxtx_factor": 1.0,
            "is_public": True,
        },
    )


#: Table -> function that creates a row, and function that checks whether the row exists.
CREATE_AND_CHECK = {
    schema.flavors: (create_flavor, flavors.is_made),
    schema.keypairs: (
        lambda tx: keypairs.create(
            tx, {"user_id": "u", "name": "k", "type": "ssh", "fingerprint": "f", "public_key": "p"}
        ),
        keypairs.is_made,
    ),
    schema.aggregates: (lambda tx: aggregates.create(tx, "a", None), aggregates.is_made),
    schema.server_groups: (
        lambda tx: server_groups.create(
            tx, {"project_id": "p", "user_id": "u", "name": "g", "policy": "affinity", "rules": {}}
        ),
        server_groups.is_made,
    ),
    schema.providers: (lambda tx: providers.create(tx, "p"), providers.is_made),
}


@pytest.mark.parametrize("table", CREATE_AND_CHECK, ids=str)
def test_row_of_each_table_is_created_once_when_commit_is_unknown(
    store: Store, is_committed: bool, table: sa.Table
) -> None:
    make, is_made = CREATE_AND_CHECK[table]
    with lose_commit_answer(store, committed=is_committed):
        row = store.write(make, is_made)
    assert store.read(lambda tx: list(tx.scalars(sa.select(table.c.id)))) == [row.id]


def test_create_console_token_is_valid_when_commit_is_unknown(
    store: Store, is_committed: bool
) -> None:
    server = active_server(store)
    with lose_commit_answer(store, committed=is_committed):
        token = store.write(
            lambda tx: console_tokens.create(
                tx, server, "novnc", project_id="p", user_id="u", seconds=60
            ),
            console_tokens.is_created,
        )
    assert store.read(lambda tx: console_tokens.find(tx, token)) is not None


@pytest.fixture(params=["postgresql", "mariadb"])
def wire(request: pytest.FixtureRequest, upgraded_database: Any) -> Iterator[Wire]:
    wire = Wire(upgraded_database(request.param))
    yield wire
    wire.close()


def test_create_server_succeeds_once_when_connection_is_cut_at_commit(wire: Wire) -> None:
    store, creator = Store(wire.url), None
    creator = Creator(store, LIMITS)
    assert store.now()
    wire.cut_at = b"COMMIT"
    created = creator.create(creation())
    assert wire.cut_at is None, "no connection was cut"
    assert store.read(lambda tx: list(tx.scalars(sa.select(schema.servers.c.id)))) == [
        created.server_id
    ]
    store.close()


def test_store_reconnects_after_idle_connection_broke(wire: Wire) -> None:
    store, name = Store(wire.url), ids.new()
    for work in (
        lambda: store.now(),
        lambda: store.write(
            lambda tx: insert_ignore(tx, schema.projects, {"id": name, "quota_seq": 0})
        ),
    ):
        store.now()
        wire.cut()
        work()
    assert count(store, schema.projects) == 1
    store.close()
