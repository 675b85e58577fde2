# SPDX-License-Identifier: Apache-2.0
"""The purge of old rows on SQLite, PostgreSQL and MariaDB. All other rows stay."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.context import RequestContext
from common.domain.statuses import GuestState
from common.store import cleanups, schema
from common.store.engine import Store, moment, now
from common.store.hosts import host_actions
from common.store.servers import console_tokens, guests, servers
from common.store.tenants import usage
from common.store.tenants.usage import Period
from deploy.operator.store import purge
from deploy.operator.store.purge import DAY, KINDS
from tests.contract.test_store import Realtime
from tests.workflows.simulator import Cloud

BY_NAME = {kind.name: kind for kind in KINDS}
OF_SERVERS = ("actions", "migrations", "console_tokens", "idempotency_keys", "guests")
ADMIN = RequestContext(user_id="u", project_id="p", roles=("admin",), request_id="req-1")
REFERENCES: dict[str, Callable[[sa.Connection, str], object]] = {
    "a removal": lambda tx, server: guests.add(
        tx, [{"server_id": server, "host": "h1", "fence": 9, "wanted": GuestState.ABSENT}]
    ),
    "a cleanup": lambda tx, server: tx.execute(
        sa.insert(schema.cleanups).values(
            kind=cleanups.PORT,
            target="p",
            place="",
            args={},
            server_id=server,
            project_id="project",
            why="refused",
            created_at=now(),
            due_at=now(),
        )
    ),
    "an action": lambda tx, server: tx.execute(
        sa.update(schema.actions).where(schema.actions.c.server_id == server).values(state="due")
    ),
    "an open migration": lambda tx, server: tx.execute(
        sa.insert(schema.migrations).values(
            uuid=ids.new(),
            server_id=server,
            action_id=ids.new(),
            project_id="project",
            user_id="user",
            type="migration",
            status="migrating",
            old_flavor={},
            new_flavor={},
            was="active",
            created_at=now() - 200 * DAY,
            updated_at=now() - 200 * DAY,
        )
    ),
    "a part of the period": lambda tx, server: tx.execute(
        sa.update(schema.servers).where(schema.servers.c.id == server).values(terminated_at=now())
    ),
}


@pytest.fixture
def cloud(store: Store) -> Cloud:
    cloud = Cloud(store, Realtime())
    cloud.round()
    return cloud


def create_servers(cloud: Cloud, count: int, deleted: bool = True) -> list[str]:
    """Create servers, each with an idempotency key, a console token and a past stop.

    Delete them if ``deleted``.
    """
    server_ids = cloud.create(count, networks=[])
    cloud.settle()
    for server in server_ids:
        cloud.store.write(
            lambda tx, server=server: (
                console_tokens.create(  # type: ignore[misc]
                    tx, server, "novnc", project_id="project", user_id="user", seconds=60
                ),
                servers.remember(
                    tx,
                    [
                        {
                            "project_id": "project",
                            "key": server,
                            "digest": "d",
                            "reservation_id": "r",
                            "server_id": server,
                        }
                    ],
                ),
            )
        )
        cloud.ask(server, "os-stop")
    cloud.settle()
    if deleted:
        for server in server_ids:
            cloud.ask(server, "delete")
        cloud.settle()
    return server_ids


def age(cloud: Cloud, server_ids: Iterable[str], days: int) -> None:
    """Set all times of these servers' rows back by so many days."""
    selected_ids = list(server_ids)
    with cloud.store.begin() as tx:
        for name in ("servers", *OF_SERVERS):
            table = schema.metadata.tables[name]
            column = table.c.id if name == "servers" else table.c.server_id
            times = [
                time_column
                for time_column in table.c
                if time_column.name.endswith("_at") and time_column.name != "due_at"
            ]
            tx.execute(
                sa.update(table)
                .where(column.in_(selected_ids))
                .values({time_column: time_column - days * DAY for time_column in times})
            )


def rows_of(store: Store, server: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows that refer to a server, by table.

    Events of the server's actions are included.
    """

    def read_rows(tx: sa.Connection) -> dict[str, list[tuple[Any, ...]]]:
        rows_by_table = {}
        for table in schema.metadata.sorted_tables:
            if table.name == "servers":
                condition = table.c.id == server
            elif table.name == "events":
                action_ids = sa.select(schema.actions.c.id).where(
                    schema.actions.c.server_id == server
                )
                condition = table.c.action_id.in_(action_ids)
            elif "server_id" in table.c:
                condition = table.c.server_id == server
            elif "consumer_id" in table.c:
                condition = table.c.consumer_id == server
            else:
                continue
            query = sa.select(table).where(condition).order_by(*table.primary_key.columns)
            if rows := [tuple(row) for row in tx.execute(query)]:
                rows_by_table[table.name] = rows
        return rows_by_table

    return store.read(read_rows)


def purge_all(store: Store, names: Iterable[str] = ()) -> Counter[str]:
    removed: Counter[str] = Counter()
    for kind in purge.chosen(list(names)):
        removed += purge.purge(store, kind, kind.days)
    return removed


def test_purge_removes_old_deleted_servers_with_all_their_rows(cloud: Cloud) -> None:
    old, young = create_servers(cloud, 2)
    age(cloud, [old], 91)
    age(cloud, [young], 20)
    before = rows_of(cloud.store, young)
    expected = Counter({name: len(rows) for name, rows in rows_of(cloud.store, old).items()})
    assert {"servers", "actions", "events", "idempotency_keys"} <= set(expected)
    kind = BY_NAME["servers"]
    assert cloud.store.snapshot(lambda tx: +purge.counts(tx, kind, kind.days)) == expected
    assert +purge.purge(cloud.store, kind, kind.days) == expected
    assert rows_of(cloud.store, old) == {}
    assert rows_of(cloud.store, young) == before
    assert purge.purge(cloud.store, kind, kind.days).total() == 0
    assert cloud.findings() == []


def test_purge_removes_only_requested_history_tables_of_undeleted_server(cloud: Cloud) -> None:
    [server] = create_servers(cloud, 1, deleted=False)
    cloud.move(server, "migrate")
    cloud.settle()
    cloud.close(server, "confirmResize")
    cloud.settle()
    age(cloud, [server], 400)
    # Another test covers rows that expire.
    with cloud.store.begin() as tx:
        for name in ("console_tokens", "idempotency_keys"):
            tx.execute(sa.delete(schema.metadata.tables[name]))
    before = rows_of(cloud.store, server)
    assert {"servers", "actions", "events", "migrations", "guests", "allocations"} <= set(before)
    assert purge_all(cloud.store).total() == 0
    assert rows_of(cloud.store, server) == before
    removed = purge_all(cloud.store, ["migrations", "actions"])
    assert set(+removed) == {"migrations", "actions", "events"}
    assert cloud.findings() == []
    cloud.ask(server, "os-start")
    cloud.settle()
    assert cloud.show(server).vm_state == "active"


@pytest.mark.parametrize("reference", REFERENCES)
def test_purge_keeps_deleted_server_with_open_reference_or_recent_end(
    cloud: Cloud, reference: str
) -> None:
    [server] = create_servers(cloud, 1)
    age(cloud, [server], 200)
    cloud.store.write(lambda tx: REFERENCES[reference](tx, server))
    before = rows_of(cloud.store, server)
    assert purge.purge(cloud.store, BY_NAME["servers"], 90).total() == 0
    assert rows_of(cloud.store, server) == before


def test_purge_keeps_actions_of_unconfirmed_migration_and_busy_server(cloud: Cloud) -> None:
    """The action of an unconfirmed migration and the actions of a busy server stay."""
    [server] = create_servers(cloud, 1, deleted=False)
    cloud.move(server, "migrate")
    cloud.settle()
    age(cloud, [server], 400)
    assert +purge_all(cloud.store, ["migrations"]) == Counter()
    move_action_id = cloud.migration(server).action_id
    purge_all(cloud.store, ["actions"])
    remaining_ids = [row[0] for row in rows_of(cloud.store, server)["actions"]]
    assert [str(action_id) for action_id in remaining_ids] == [str(move_action_id)]
    cloud.ask(server, "delete")
    age(cloud, [server], 400)
    assert purge_all(cloud.store, ["migrations", "actions"]).total() == 0
    cloud.settle()
    assert cloud.findings() == []


def test_purge_does_not_change_usage_of_kept_period(cloud: Cloud) -> None:
    server_ids = create_servers(cloud, 4)
    for server, days in zip(server_ids, (300, 95, 85, 10), strict=True):
        age(cloud, [server], days)
    # Each server has run for twenty days.
    with cloud.store.begin() as tx:
        tx.execute(
            sa.update(schema.servers).values(launched_at=schema.servers.c.launched_at - 20 * DAY)
        )
    end = cloud.store.read(moment)
    period = Period(end - 90 * DAY, end)

    def read_usage() -> list[object]:
        return cloud.store.read(lambda tx: [*usage.of_servers(tx, period), *usage.sums(tx, period)])

    before = read_usage()
    assert len(before) == 3
    assert purge_all(cloud.store)["servers"] == 2
    assert read_usage() == before


def test_purge_runs_in_small_transactions_and_continues_when_killed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a purge is killed between two transactions, the next one removes the rest."""
    monkeypatch.setattr(purge, "ROWS", 4)
    monkeypatch.setattr(purge, "LOOKED_AT", 2)
    server_ids = create_servers(cloud, 3)
    age(cloud, server_ids, 100)
    expected = sum(
        len(rows) for server in server_ids for rows in rows_of(cloud.store, server).values()
    )
    sums: list[int] = []

    def die_after_three(removed: Counter[str]) -> None:
        sums.append(removed.total())
        if len(sums) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge.purge(cloud.store, BY_NAME["servers"], 90, die_after_three)
    assert sums == [4, 8, 12]
    assert cloud.findings() == []
    removed = purge.purge(
        cloud.store, BY_NAME["servers"], 90, lambda removed: sums.append(removed.total())
    )
    assert removed.total() == expected - 12 and removed["servers"] == 3
    steps = [b - a for a, b in itertools.pairwise(sums)]
    assert steps and max(steps) <= 4


def test_purge_skips_locked_server_until_next_purge(cloud: Cloud) -> None:
    if cloud.store.dialect_name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    locked, free = create_servers(cloud, 2)
    age(cloud, [locked, free], 100)
    with cloud.store.begin() as tx:
        tx.execute(sa.select(schema.servers).where(schema.servers.c.id == locked).with_for_update())
        assert purge.purge(cloud.store, BY_NAME["servers"], 90)["servers"] == 1
    assert "servers" in rows_of(cloud.store, locked)
    assert purge.purge(cloud.store, BY_NAME["servers"], 90)["servers"] == 1


def test_purge_removes_expired_tokens_keys_and_old_host_actions(cloud: Cloud) -> None:
    old, young = create_servers(cloud, 2, deleted=False)
    age(cloud, [old], 31)
    action = cloud.store.write(
        lambda tx: host_actions.begin(
            tx, "h1", host_actions.Name.DRAIN, host_actions.Arguments(), ADMIN
        )
    )
    finish = {"state": "done", "open_host": None, "finished_at": now() - 91 * DAY}
    lines = sa.select(sa.func.count()).select_from(schema.host_action_events)
    assert purge_all(cloud.store) == Counter({"console_tokens": 1, "idempotency_keys": 1})
    number = cloud.store.read(lambda tx: tx.scalar(lines))
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.host_actions)
            .where(schema.host_actions.c.id == action.id)
            .values(**finish)
        )
    )
    expected = Counter({"host_actions": 1, "host_action_events": number})
    assert +purge_all(cloud.store) == +expected
    assert {"console_tokens", "idempotency_keys"} <= set(rows_of(cloud.store, young))


def test_purge_pages_through_tables_with_key_of_two_columns(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge, "LOOKED_AT", 2)
    rows = [
        {
            "project_id": project,
            "key": key,
            "digest": "d",
            "reservation_id": "r",
            "server_id": ids.new(),
        }
        for project in ("p", "q")
        for key in ("a", "b", "c")
    ]
    cloud.store.write(lambda tx: servers.remember(tx, rows))
    with cloud.store.begin() as tx:
        keys = schema.idempotency_keys
        tx.execute(sa.update(keys).values(created_at=keys.c.created_at - 40 * DAY))
    assert purge.purge(cloud.store, BY_NAME["idempotency-keys"], 30).total() == 6
