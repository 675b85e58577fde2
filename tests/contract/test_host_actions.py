# SPDX-License-Identifier: Apache-2.0
"""Drains and evacuations in the database: journal, lock and end, on the three databases."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.context import RequestContext
from common.domain.models import HostInventory
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import host_actions, hosts
from common.store.hosts.host_actions import (
    Arguments,
    Event,
    EventName,
    HostAction,
    Name,
    Progress,
    State,
)

ADMIN = RequestContext(user_id="u", project_id="p", roles=("admin",), request_id="req-1")
LINES = [
    Event(EventName.BEGUN, "web leaves h1", "s1", "m1"),
    Event(EventName.NOTE, "a scheduler is silent"),
]


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """Yield a store with one host."""
    store = Store(upgraded_url)
    store.write(
        lambda tx: hosts.register(
            tx, "h1", "boot", HostInventory("QEMU", 7002000, "", 4, 8192, 100)
        )
    )
    yield store
    store.close()


def begin(store: Store, name: Name = Name.DRAIN, host: str = "h1") -> HostAction:
    return store.write(
        lambda tx: host_actions.begin(tx, host, name, Arguments(cold=True, parallel=3), ADMIN)
    )


def take(store: Store, owner: str) -> list[str]:
    return [action.id for action in store.write(lambda tx: host_actions.take(tx, owner))]


def test_begun_host_action_is_open_action_of_host_and_in_its_list(store: Store) -> None:
    action = begin(store)
    assert (action.host, action.name, action.state, action.args) == (
        "h1",
        Name.DRAIN,
        State.RUNNING,
        Arguments(cold=True, parallel=3),
    )
    assert (action.user_id, action.project_id, action.request_id) == ("u", "p", "req-1")
    assert store.read(lambda tx: host_actions.open_of(tx, "h1")) == action
    assert store.read(lambda tx: host_actions.page(tx, "h1", 10)) == [action]
    with pytest.raises(errors.NotFound, match="Host action h9 could not be found"):
        store.read(lambda tx: host_actions.show(tx, "h9"))


def test_begin_host_action_concurrently_succeeds_once_per_host(store: Store) -> None:

    def try_begin(number: int) -> HostAction | None:
        try:
            return begin(store, Name.EVACUATE if number % 2 else Name.DRAIN)
        except errors.Conflict as problem:
            assert "Host h1 has an open" in problem.text
            return None

    with ThreadPoolExecutor(4) as pool:
        created = [action for action in pool.map(try_begin, range(4)) if action is not None]
    assert len(created) == 1
    with pytest.raises(errors.NotFound, match="There is no host h9"):
        begin(store, host="h9")


def test_host_action_is_leased_to_one_conductor(store: Store) -> None:
    action = begin(store)
    assert store.read(host_actions.is_any_open)
    assert take(store, "c1") == [action.id]
    assert (take(store, "c1"), take(store, "c2")) == ([action.id], [])
    with store.begin() as tx:
        tx.execute(sa.update(schema.host_actions).values(locked_until=now() - 1))
    assert take(store, "c2") == [action.id]
    assert not store.write(lambda tx: host_actions.record(tx, action.id, "c1", LINES, Progress(1)))
    assert store.read(lambda tx: host_actions.events(tx, action.id)) == []
    store.write(lambda tx: host_actions.let_go(tx, "c2"))
    assert take(store, "c1") == [action.id]


def test_host_action_record_stores_progress_and_events(store: Store) -> None:
    action = begin(store)
    take(store, "c1")
    for round_ in (1, 2):
        assert store.write(
            lambda tx, moved=round_: host_actions.record(
                tx, action.id, "c1", LINES, Progress(moved, 2, 3, 4.5)
            )
        )
    journal = store.read(lambda tx: host_actions.events(tx, action.id))
    assert [(event.seq, event.event, event.server_id, event.migration) for event in journal] == [
        (1, EventName.BEGUN, "s1", "m1"),
        (2, EventName.NOTE, None, None),
        (3, EventName.BEGUN, "s1", "m1"),
        (4, EventName.NOTE, None, None),
    ]
    assert store.read(lambda tx: host_actions.events(tx, action.id, 3)) == journal[3:]
    assert store.read(lambda tx: host_actions.show(tx, action.id)).progress == Progress(
        2, 2, 3, 4.5
    )


def test_ended_host_action_is_not_changed(store: Store) -> None:
    action = begin(store)
    take(store, "c1")
    assert store.write(lambda tx: host_actions.stop(tx, action.id)).state is State.STOPPING
    assert store.write(
        lambda tx: host_actions.record(
            tx, action.id, "c1", [], Progress(), ended=State.STOPPED, message="stopped"
        )
    )
    stopped_action = store.read(lambda tx: host_actions.show(tx, action.id))
    assert (stopped_action.state, stopped_action.message, stopped_action.is_open) == (
        State.STOPPED,
        "stopped",
        False,
    ) and stopped_action.finished_at
    assert not store.read(host_actions.is_any_open) and take(store, "c1") == []
    assert not store.write(lambda tx: host_actions.record(tx, action.id, "c1", LINES, Progress()))
    with pytest.raises(errors.Conflict, match="has ended already: it is stopped"):
        store.write(lambda tx: host_actions.stop(tx, action.id))
    assert begin(store, Name.EVACUATE).id != action.id
