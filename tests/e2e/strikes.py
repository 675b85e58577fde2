# SPDX-License-Identifier: Apache-2.0
"""Strikes in the middle of an action: a fault as soon as the action's journal contains a step.

Used by test_volume_kills.py and test_tier_two.py. ``at_step`` requests the action, polls the
journal every few milliseconds, strikes, and waits for the action's end. The result contains the
step's event just after the strike, which shows whether the strike came during or after the step.
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

#: Time limit of an action in which a process is killed, in seconds. A conductor's lease is shorter.
ACTION = 180
#: Final states of an action.
OVER = ("done", "failed", "superseded")


@dataclass(frozen=True)
class StrikeOutcome:
    """The outcome of an action with a strike.

    Attributes:
        action: Id of the action.
        state: Final state of the action.
        message: Error message of the action.
        last_event: Last event of the step in the journal, just after the strike.
        seconds: Time from the strike to the action's end.
        answer: Return value of the function that requested the action.
    """

    action: str
    state: str
    message: str
    last_event: str
    seconds: float
    answer: Any


@dataclass(frozen=True)
class Strikes:
    """Strikes in actions of one server."""

    live: Live
    server: str

    def at_step(
        self,
        workflow: str,
        step: str,
        strike: Callable[[str | None], object],
        request: Callable[[], Any],
        known: frozenset[str] | None = None,
    ) -> StrikeOutcome:
        """Request a new action, strike when the action is at the step, and wait for its end.

        Args:
            workflow: Workflow of the action.
            step: Step at which to strike.
            strike: Called with the host of the step from the journal, or None.
            request: Requests the action. Runs in a thread.
            known: Ids of older actions of the server, by default those that exist now.
        """
        before = self.actions() if known is None else known
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(request)
            action, host = self._await_step(before, workflow, step, answer)
            strike(host)
            began = time.monotonic()
            last_event = dict(self.journal(action))[step]
        await_true(
            lambda: self._end(action)[0] in OVER,
            ACTION,
            lambda: f"{workflow} struck at {step}: {self._end(action)} {self.journal(action)}",
        )
        state, message = self._end(action)
        took = time.monotonic() - began
        return StrikeOutcome(action, state, message, last_event, took, answer.result())

    def actions(self) -> frozenset[str]:
        """Return the ids of all actions of the server."""
        return frozenset(row[0] for row in self._actions())

    def journal(self, action: str) -> list[tuple[str, str]]:
        """Return the step and the event of each entry of the journal, in order."""
        return [(row[0], row[1]) for row in self._events(action)]

    def _await_step(
        self, before: frozenset[str], workflow: str, step: str, answer: Future[Any]
    ) -> tuple[str, str | None]:
        """Wait until a new action is at the step, and return the action's id and the step's host.

        An exception of the request is raised here.
        """
        until = time.monotonic() + ACTION
        while time.monotonic() < until:
            for action, its_workflow, state in self._read_or_empty(self._actions):
                if action in before or its_workflow != workflow:
                    continue
                for name, _, host in self._read_or_empty(lambda key=action: self._events(key)):  # type: ignore[misc]  # bound here
                    if name == step:
                        return str(action), host
                assert state not in OVER, f"{workflow} has no {step}: {self._end(action)}"
            if answer.done():
                answer.result()
            # A step lasts a few milliseconds.
            time.sleep(0.002)
        raise AssertionError(f"{workflow} does not come to {step}")

    @staticmethod
    def _read_or_empty(read: Callable[[], list[Any]]) -> list[Any]:
        """Return the rows, or no rows while the database is locked."""
        try:
            return read()
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
    """Wait until the supervisor has replaced the process with this pid.

    For the volume service, wait also until it answers, because its clients do not retry.
    """
    await_true(
        lambda: find_process(live.cloud, name) not in (None, pid), 60, lambda: f"{name} is away"
    )
    if name == "volume":
        lifecycle.await_http(live.cloud, name, live.cloud.volume_url)


def await_cleanups(live: Live, server: str) -> None:
    """Wait until no host has a pending cleanup of the server's guest after a failed move.

    Why: a host with a pending cleanup does not accept the server.
    """
    await_true(
        lambda: not live.awaits_hosts([server]), SETTLE, lambda: f"pending cleanups of {server}"
    )
