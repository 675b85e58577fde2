# SPDX-License-Identifier: Apache-2.0
"""A connection that breaks at COMMIT, on SQLite, PostgreSQL and MariaDB: what was asked is done
once, and its asker is told so."""

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
def committed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def count(store: Store, table: sa.Table) -> int:
    return store.read(lambda tx: tx.scalar(sa.select(sa.func.count()).select_from(table))) or 0


def test_what_is_there_is_not_made_again(store: Store, committed: bool) -> None:
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

    with lose_commit_answer(store, committed=committed) as lost:
        assert store.write(work, is_there) == ("p0" if committed else "p1")
    assert lost and count(store, schema.projects) == 1


def test_who_cannot_look_is_told_that_nothing_is_known(store: Store, committed: bool) -> None:
    with (
        lose_commit_answer(store, committed=committed),
        pytest.raises(errors.Unsure, match="look before you ask again"),
    ):
        store.write(lambda tx: insert_ignore(tx, schema.projects, {"id": "p", "quota_seq": 0}))
    assert count(store, schema.projects) == committed


def test_creates_of_one_transaction_are_made_once(store: Store, committed: bool) -> None:
    """Two POSTs that wait behind a third go into one transaction."""
    creator, made = Creator(store, LIMITS), {}
    creations = {name: creation(name) for name in ("a", "b")}
    creator._has_leader = True

    def post(name: str) -> None:
        made[name] = creator.create(creations[name])

    posts = [threading.Thread(target=post, args=(name,)) for name in creations]
    for one in posts:
        one.start()
    await_true(lambda: creator.waiting == 2)
    with lose_commit_answer(store, committed=committed):
        creator._lead()
        for one in posts:
            one.join(10)
    rows = store.read(
        lambda tx: {row.name: row.id for row in tx.execute(sa.select(schema.servers))}
    )
    assert {name: one.server_id for name, one in made.items()} == rows
    assert count(store, schema.servers) == count(store, schema.actions) == 2


def test_a_create_with_a_key_is_made_once(store: Store, committed: bool) -> None:
    creator, asked = Creator(store, LIMITS), creation(key="k")
    with lose_commit_answer(store, committed=committed):
        made = creator.create(asked)
    assert creator.create(asked) == Created(
        made.server_id, made.reservation_id, repeated=True, digest=asked.digest
    )
    assert count(store, schema.servers) == 1


def test_an_action_is_begun_once(store: Store, committed: bool) -> None:
    server, stop = active_server(store), states.row("os-stop")
    with lose_commit_answer(store, committed=committed):
        action = store.write(
            lambda tx: actions.begin(tx, stop, server, context=USER),
            lambda tx, begun: actions.is_begun(tx, begun, server),
        )
    rows = store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions.c.id).where(schema.actions.c.name == stop.name)
        ).all()
    )
    assert [row.id for row in rows] == [action]


def _flavor(tx: sa.Connection) -> Any:
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


#: Table -> what makes a row of it, and what looks whether it did.
MADE = {
    schema.flavors: (_flavor, flavors.is_made),
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


@pytest.mark.parametrize("table", MADE, ids=str)
def test_a_row_is_made_once(store: Store, committed: bool, table: sa.Table) -> None:
    make, is_made = MADE[table]
    with lose_commit_answer(store, committed=committed):
        made = store.write(make, is_made)
    assert store.read(lambda tx: list(tx.scalars(sa.select(table.c.id)))) == [made.id]


def test_a_console_s_token_can_be_used(store: Store, committed: bool) -> None:
    server = active_server(store)
    with lose_commit_answer(store, committed=committed):
        token = store.write(
            lambda tx: console_tokens.create(
                tx, server, "novnc", project_id="p", user_id="u", seconds=60
            ),
            console_tokens.is_created,
        )
    assert store.read(lambda tx: console_tokens.find(tx, token)) is not None


@pytest.fixture(params=["postgresql", "mariadb"])
def wire(request: pytest.FixtureRequest, upgraded_database: Any) -> Iterator[Wire]:
    made = Wire(upgraded_database(request.param))
    yield made
    made.close()


def test_a_real_connection_cut_after_commit(wire: Wire) -> None:
    store, creator = Store(wire.url), None
    creator = Creator(store, LIMITS)
    assert store.now()
    wire.cut_at = b"COMMIT"
    made = creator.create(creation())
    assert wire.cut_at is None, "no connection was cut"
    assert store.read(lambda tx: list(tx.scalars(sa.select(schema.servers.c.id)))) == [
        made.server_id
    ]
    store.close()


def test_a_connection_that_broke_while_it_was_idle_fails_nobody(wire: Wire) -> None:
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
