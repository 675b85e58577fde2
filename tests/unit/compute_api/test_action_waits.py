# SPDX-License-Identifier: Apache-2.0
"""Waits for a step of an action: success, failure and timeout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.clock import Clock
from common.store import schema
from common.store.engine import Store
from common.store.servers import actions
from compute_api.compute.request import action_waits
from tests.schemas import upgrade


class Time(Clock):
    """A clock that only ``pause`` moves. Planned calls run at their times."""

    def __init__(self) -> None:
        self.at = 0.0
        self.pauses: list[float] = []
        self.plan: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.at

    def pause(self, seconds: float) -> None:
        self.at += seconds
        self.pauses.append(seconds)
        while self.plan and self.plan[0][0] <= self.at:
            self.plan.pop(0)[1]()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/w.db")
    upgrade(store)
    store.write(
        lambda tx: actions.insert(
            tx,
            [
                {
                    "id": "a",
                    "server_id": "s",
                    "project_id": "p",
                    "user_id": "u",
                    "request_id": "r",
                    "name": "createImage",
                    "workflow": "snapshot",
                    "fence": 1,
                }
            ],
        )
    )
    yield store
    store.close()


def add_event(store: Store, kind: str, message: str | None = None) -> None:
    store.write(
        lambda tx: actions.append(
            tx,
            [
                {
                    "action_id": "a",
                    "seq": {"started": 1}.get(kind, 2),
                    "step": "reserve",
                    "attempt": 1,
                    "event": kind,
                    "message": message,
                }
            ],
        )
    )


def end(store: Store, state: str, message: str | None = None) -> None:
    with store.begin() as tx:
        tx.execute(sa.update(schema.actions).values(state=state, message=message))


def test_wait_for_step_returns_succeeded_event_and_lengthens_poll_pauses(store: Store) -> None:
    time = Time()
    time.plan = [
        (0.05, lambda: add_event(store, "started")),
        (1.0, lambda: add_event(store, "succeeded")),
    ]
    step_event = action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause)
    assert step_event is not None
    assert step_event.event == "succeeded"
    assert time.pauses[0] == 0.02
    assert time.pauses == sorted(time.pauses)
    assert max(time.pauses) == 0.2
    assert time.at < 1.3


def test_wait_for_step_raises_given_error_only_after_whole_action_failed(store: Store) -> None:
    time = Time()
    time.plan = [
        (0.1, lambda: add_event(store, "failed", "No image service")),
        (0.5, lambda: end(store, "failed")),
    ]
    with pytest.raises(errors.Forbidden, match="No image service"):
        action_waits.for_step(
            store, "a", "reserve", failure=errors.Forbidden, clock=time, pause=time.pause
        )
    assert time.at >= 0.5, "a step that failed may be tried again while its action lives"


def test_wait_for_step_raises_conflict_when_action_is_superseded(store: Store) -> None:
    end(store, "superseded", "Superseded by a later action.")
    with pytest.raises(errors.Conflict, match="Superseded"):
        action_waits.for_step(store, "a", "reserve", clock=Time(), pause=Time().pause)


def test_wait_for_step_returns_success_when_action_ends_during_read(store: Store) -> None:
    """The last commit may occur between any two statements of a read.

    Each statement of a read sees all earlier commits.
    """
    end_calls = []

    def end_action(*_: object) -> None:
        if not end_calls:
            end_calls.append(True)
            add_event(store, "succeeded")
            end(store, "done")

    sa.event.listen(store.engine, "after_cursor_execute", end_action)
    time = Time()
    step_event = action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause)
    assert end_calls and step_event is not None and step_event.event == "succeeded"


def test_wait_for_step_returns_none_after_timeout(store: Store) -> None:
    time = Time()
    add_event(store, "started")
    assert action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause) is None
    assert 29.5 < time.at <= 30
