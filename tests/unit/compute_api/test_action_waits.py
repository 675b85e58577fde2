# SPDX-License-Identifier: Apache-2.0
"""Waiting for a step of an action: success, definite failure, and time that is over."""

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
    """A clock that only ``pause`` moves; things happen at given times."""

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
    made = Store(f"sqlite:///{tmp_path}/w.db")
    upgrade(made)
    made.write(
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
    yield made
    made.close()


def event(store: Store, kind: str, message: str | None = None) -> None:
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


def test_it_sees_the_step_succeed_and_polls_ever_more_rarely(store: Store) -> None:
    time = Time()
    time.plan = [(0.05, lambda: event(store, "started")), (1.0, lambda: event(store, "succeeded"))]
    found = action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause)
    assert found is not None
    assert found.event == "succeeded"
    assert time.pauses[0] == 0.02
    assert time.pauses == sorted(time.pauses)
    assert max(time.pauses) == 0.2
    assert time.at < 1.3


def test_a_definite_failure_becomes_the_request_s_error(store: Store) -> None:
    time = Time()
    time.plan = [
        (0.1, lambda: event(store, "failed", "No image service")),
        (0.5, lambda: end(store, "failed")),
    ]
    with pytest.raises(errors.Forbidden, match="No image service"):
        action_waits.for_step(
            store, "a", "reserve", failure=errors.Forbidden, clock=time, pause=time.pause
        )
    assert time.at >= 0.5, "a step that failed may be tried again while its action lives"


def test_an_action_that_was_superseded_will_not_get_there(store: Store) -> None:
    end(store, "superseded", "Superseded by a later action.")
    with pytest.raises(errors.Conflict, match="Superseded"):
        action_waits.for_step(store, "a", "reserve", clock=Time(), pause=Time().pause)


def test_an_action_that_ends_while_it_is_looked_at_has_succeeded(store: Store) -> None:
    """Each statement of a read sees what was committed before it, so the last commit may fall
    between any two."""
    ended = []

    def looked(*_: object) -> None:
        if not ended:
            ended.append(True)
            event(store, "succeeded")
            end(store, "done")

    sa.event.listen(store.engine, "after_cursor_execute", looked)
    time = Time()
    found = action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause)
    assert ended and found is not None and found.event == "succeeded"


def test_after_its_patience_nothing_is_known(store: Store) -> None:
    time = Time()
    event(store, "started")
    assert action_waits.for_step(store, "a", "reserve", clock=time, pause=time.pause) is None
    assert 29.5 < time.at <= 30
