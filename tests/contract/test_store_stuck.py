# SPDX-License-Identifier: Apache-2.0
"""Stuck actions, and the selection of commands to send again, on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, states
from common.domain.clock import SECOND
from common.store import schema
from common.store.engine import Store, now
from common.store.servers import actions, guests
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.contract.test_store import Realtime
from tests.workflows.simulator import Cloud

REMEDIES = {
    "retry": stuck_actions.retry,
    "settle": lambda tx, key: stuck_actions.fail(tx, key, "It was given up."),
    "abort": lambda tx, key: stuck_actions.abort(tx, key, "It was ended.", lambda row: None),
}


@pytest.fixture
def cloud(store: Store) -> Cloud:
    cloud = Cloud(store, Realtime())
    cloud.round()
    return cloud


def read_action(cloud: Cloud, action: str) -> sa.Row[tuple[object, ...]]:
    action_row = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
    assert action_row is not None
    return action_row


def update_action(cloud: Cloud, action: str, **values: object) -> None:
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions).where(schema.actions.c.id == action).values(**values)
        )
    )


@pytest.mark.parametrize("remedy", REMEDIES)
def test_stuck_action_is_done_after_retry_and_failed_after_settle_or_abort(
    cloud: Cloud, remedy: str
) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    action = cloud.ask(server, "os-stop")
    update_action(cloud, action, failures=9, step="renamed")
    cloud.advance()
    assert read_action(cloud, action).state == "stuck"
    assert [
        (stuck_action.id, stuck_action.server, bool(stuck_action.overdue))
        for stuck_action in cloud.store.read(lambda tx: stuck_actions.listed(tx, only_stuck=True))
    ] == [(action, "s", False)]
    assert [finding.invariant for finding in cloud.store.read(doctor.check)] == ["stuck"]
    update_action(cloud, action, step="stop")
    cloud.store.write(lambda tx: REMEDIES[remedy](tx, action))
    cloud.settle()
    expected = {
        "retry": ("done", states.STOPPED),
        "abort": ("failed", states.ACTIVE),
        "settle": ("failed", states.ERROR),
    }
    assert (read_action(cloud, action).state, cloud.show(server).vm_state) == expected[remedy]
    assert cloud.findings() == []


def test_outstanding_commands_omit_commands_known_to_host_or_locked(cloud: Cloud) -> None:
    """The read does not wait for a row that another transaction has locked."""
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.lose = lambda kind: kind == "do"
    known_action, locked_action, lost_action = sorted(
        cloud.ask(server, "os-stop") for server in servers
    )
    cloud.advance()
    with cloud.store.begin() as tx:
        tx.execute(
            sa.select(schema.actions.c.id)
            .where(schema.actions.c.id == locked_action)
            .with_for_update()
        ).all()
        start = time.monotonic()
        # SQLite has a single writer.
        if cloud.store.dialect_name == "sqlite":
            commands = actions.outstanding(
                tx, "h1", 0, 2, {(known_action, "do", "stop", 1), (lost_action, "do", "stop", 2)}
            )
            assert [command.id for command in commands if command.id != locked_action] == [
                lost_action
            ]
        else:
            commands = cloud.store.write(
                lambda tx: actions.outstanding(
                    tx,
                    "h1",
                    0,
                    2,
                    {(known_action, "do", "stop", 1), (lost_action, "do", "stop", 2)},
                )
            )
            assert [command.id for command in commands] == [lost_action]
        assert time.monotonic() - start < 2


def test_pending_guest_removals_omit_removals_known_to_host(cloud: Cloud) -> None:
    servers = cloud.create(2, host="h1", forced=True, networks=[])
    cloud.settle()
    with cloud.store.begin() as tx:
        for server in servers:
            guests.add_removal(tx, server, 7)
        removals = guests.removals(tx, "h1", 0, 1, {(servers[0], 7), (servers[1], 6)})
    assert [removal.server_id for removal in removals] == [servers[1]]


def test_find_unlocked_omits_locked_servers_without_waiting(cloud: Cloud) -> None:
    locked, free = cloud.create(2, networks=[])
    assert cloud.store.write(lambda tx: actions.find_unlocked(tx, [locked, free, "gone"])) == {
        locked,
        free,
        "gone",
    }
    if cloud.store.dialect_name == "sqlite":
        # SQLite has a single writer.
        return
    with cloud.store.begin() as tx:
        actions.lock_servers(tx, [locked])
        start = time.monotonic()
        assert cloud.store.write(lambda tx: actions.find_unlocked(tx, [locked, free, "gone"])) == {
            free,
            "gone",
        }
        assert time.monotonic() - start < 2


def test_fail_of_overdue_action_is_refused_when_conductor_takes_action_before_lock(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    action = cloud.ask(server, "os-stop")
    update_action(cloud, action, due_at=schema.actions.c.due_at - 2 * stuck_actions.OVERDUE)

    def lock_after_conductor(tx: Connection, servers: Collection[str]) -> dict[str, Any]:
        in_a_minute = now() + 60 * SECOND
        tx.execute(
            sa.update(schema.actions)
            .where(schema.actions.c.id == action)
            .values(lease_until=in_a_minute)
        )
        return actions.lock_servers(tx, servers)

    with monkeypatch.context() as patch:
        patch.setattr(stuck_actions, "lock_servers", lock_after_conductor)
        with pytest.raises(errors.Conflict, match=f"Action {action} is due, not stuck"):
            cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "It was given up."))
    cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "It was given up."))
    assert read_action(cloud, action).state == "failed"
