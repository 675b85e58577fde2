# SPDX-License-Identifier: Apache-2.0
"""Stuck actions, and what is sent again, on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from common.domain import states
from common.store import schema
from common.store.engine import Store
from common.store.servers import actions, guests
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.contract.test_store import Realtime
from tests.workflows.simulator import Cloud

WAYS = {
    "retry": stuck_actions.retry,
    "settle": lambda tx, key: stuck_actions.settle(tx, key, "It was given up."),
    "abort": lambda tx, key: stuck_actions.abort(tx, key, "It was ended.", lambda row: None),
}


@pytest.fixture
def cloud(store: Store) -> Cloud:
    cloud = Cloud(store, Realtime())
    cloud.round()
    return cloud


def row(cloud: Cloud, action: str) -> sa.Row[tuple[object, ...]]:
    found = cloud.store.read(lambda tx: actions.show_by_id(tx, action))
    assert found is not None
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_way_out_of_a_stuck_action(cloud: Cloud, way: str) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    action = cloud.ask(server, "os-stop")
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions)
            .where(schema.actions.c.id == action)
            .values(failures=9, step="renamed")
        )
    )
    cloud.advance()
    assert row(cloud, action).state == "stuck"
    assert [
        (one.id, one.server, bool(one.overdue))
        for one in cloud.store.read(lambda tx: stuck_actions.listed(tx, only_stuck=True))
    ] == [(action, "s", False)]
    assert [finding.invariant for finding in cloud.store.read(doctor.check)] == ["stuck"]
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions).where(schema.actions.c.id == action).values(step="stop")
        )
    )
    cloud.store.write(lambda tx: WAYS[way](tx, action))
    cloud.settle()
    ends = {
        "retry": ("done", states.STOPPED),
        "abort": ("failed", states.ACTIVE),
        "settle": ("failed", states.ERROR),
    }
    assert (row(cloud, action).state, cloud.show(server).vm_state) == ends[way]
    assert cloud.findings() == []


def test_what_is_known_or_in_hand_is_not_sent_again(cloud: Cloud) -> None:
    """Nobody waits for the row that somebody else works on."""
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.lose = lambda kind: kind == "do"
    known, held, lost = sorted(cloud.ask(server, "os-stop") for server in servers)
    cloud.advance()
    with cloud.store.begin() as tx:
        tx.execute(
            sa.select(schema.actions.c.id).where(schema.actions.c.id == held).with_for_update()
        ).all()
        begun = time.monotonic()
        if cloud.store.dialect_name == "sqlite":  # whose writers are alone
            found = actions.outstanding(
                tx, "h1", 0, 2, {(known, "do", "stop", 1), (lost, "do", "stop", 2)}
            )
            assert [one.id for one in found if one.id != held] == [lost]
        else:
            found = cloud.store.write(
                lambda tx: actions.outstanding(
                    tx, "h1", 0, 2, {(known, "do", "stop", 1), (lost, "do", "stop", 2)}
                )
            )
            assert [one.id for one in found] == [lost]
        assert time.monotonic() - begun < 2


def test_known_debts_are_not_sent_again(cloud: Cloud) -> None:
    servers = cloud.create(2, host="h1", forced=True, networks=[])
    cloud.settle()
    with cloud.store.begin() as tx:
        for server in servers:
            guests.add_debt(tx, server, 7)
        found = guests.debts(tx, "h1", 0, 1, {(servers[0], 7), (servers[1], 6)})
    assert [one.server_id for one in found] == [servers[1]]


def test_who_asks_what_is_locked_waits_for_nobody(cloud: Cloud) -> None:
    held, free = cloud.create(2, networks=[])
    assert cloud.store.write(lambda tx: actions.unlocked(tx, [held, free, "gone"])) == {
        held,
        free,
        "gone",
    }
    if cloud.store.dialect_name == "sqlite":
        return  # its writers are alone
    with cloud.store.begin() as tx:
        actions.lock_servers(tx, [held])
        begun = time.monotonic()
        assert cloud.store.write(lambda tx: actions.unlocked(tx, [held, free, "gone"])) == {
            free,
            "gone",
        }
        assert time.monotonic() - begun < 2
