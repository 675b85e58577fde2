# SPDX-License-Identifier: Apache-2.0
"""A blow in the middle of an action: it falls when a step stands in the action's journal.

Used by test_volume_kills.py and test_tier_two.py. ``at_step`` asks for the action, looks at the
journal every few milliseconds, strikes, and waits for the action's end. What the journal had of the
step just after the blow is told, so that a reader sees whether it fell in the middle or behind it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deploy.one_machine.cloud import lifecycle
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.live import SETTLE, Live
from tests.waiting import await_true

#: Seconds that an action may take in which somebody is killed: longer than a conductor's lease.
ACTION = 180
#: States of an action that nobody goes on with.
OVER = ("done", "failed", "superseded")


@dataclass(frozen=True)
class Struck:
    """What became of an action. ``seen``: the last that the journal had of the step when the blow
    had fallen; ``seconds``: from the blow to the action's end; ``answer``: what who asked for it
    got."""

    action: str
    state: str
    message: str
    seen: str
    seconds: float
    answer: Any


@dataclass(frozen=True)
class Strikes:
    """Blows in actions of one server."""

    live: Live
    server: str

    def at_step(
        self,
        workflow: str,
        step: str,
        blow: Callable[[str | None], object],
        ask: Callable[[], Any],
        known: frozenset[str] | None = None,
    ) -> Struck:
        """Ask for a new action, strike when it is at the step, and wait for its end.

        ``blow`` is given the host that the journal names for the step; ``known`` are actions that
        are not meant, of those that there are: all, unless it is given.
        """
        before = self.actions() if known is None else known
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            action, host = self._await_step(before, workflow, step, asked)
            blow(host)
            began = time.monotonic()
            seen = dict(self.journal(action))[step]
        await_true(
            lambda: self._end(action)[0] in OVER,
            ACTION,
            lambda: f"{workflow} struck at {step}: {self._end(action)} {self.journal(action)}",
        )
        state, message = self._end(action)
        took = time.monotonic() - began
        return Struck(action, state, message, seen, took, asked.result())

    def actions(self) -> frozenset[str]:
        """The ids of all that the server has had."""
        return frozenset(row[0] for row in self._actions())

    def journal(self, action: str) -> list[tuple[str, str]]:
        """Steps and what became of them, in order."""
        return [(row[0], row[1]) for row in self._events(action)]

    def _await_step(
        self, before: frozenset[str], workflow: str, step: str, asked: Future[Any]
    ) -> tuple[str, str | None]:
        """The id of the new action, which is at the step, and the step's host. Who asks raises what
        refuses it."""
        until = time.monotonic() + ACTION
        while time.monotonic() < until:
            for found, its_workflow, state in self._quickly(self._actions):
                if found in before or its_workflow != workflow:
                    continue
                for name, _, host in self._quickly(lambda one=found: self._events(one)):  # type: ignore[misc]  # bound here
                    if name == step:
                        return str(found), host
                assert state not in OVER, f"{workflow} has no {step}: {self._end(found)}"
            if asked.done():
                asked.result()
            time.sleep(0.002)  # steps last for a few milliseconds
        raise AssertionError(f"{workflow} does not come to {step}")

    @staticmethod
    def _quickly(look: Callable[[], list[Any]]) -> list[Any]:
        try:
            return look()
        except sqlite3.OperationalError:
            return []

    def _actions(self) -> list[Any]:
        return self.live.rows(
            "SELECT id, workflow, state FROM actions WHERE server_id = ?", self.server
        )

    def _events(self, action: str) -> list[Any]:
        query = "SELECT step, event, host FROM events WHERE action_id = ? ORDER BY seq"
        return self.live.rows(query, action)

    def _end(self, action: str) -> tuple[str, str]:
        [(state, message)] = self.live.rows(
            "SELECT state, message FROM actions WHERE id = ?", action
        )
        return state, message


def await_back(live: Live, name: str, pid: int | None) -> None:
    """Until the supervisor has started another process in the place of this one; the volume
    service, whose clients do not wait, also answers."""
    await_true(
        lambda: find_process(live.cloud, name) not in (None, pid), 60, lambda: f"{name} is away"
    )
    if name == "volume":
        lifecycle.await_http(live.cloud, name, live.cloud.volume_url)


def await_debts(live: Live, server: str) -> None:
    """Until no host has still to remove what a move that failed has left there: till then it takes
    the server not."""
    await_true(lambda: not live.at_work([server]), SETTLE, lambda: f"debts of {server}")
