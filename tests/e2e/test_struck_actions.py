# SPDX-License-Identifier: Apache-2.0
"""Actions of guests that are interrupted by kill -9 of the conductor or the agent, or by a delete.

The tests share the guests and do not wait for their boot. Accepted actions complete without help. A
delete supersedes a running action. Neither leaves an incomplete image or a finding of the doctor.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")

PREFIX = "middle"


class InterruptedAction(NamedTuple):
    """An action to interrupt.

    Attributes:
        step: The step that a host executes.
        end: The status after the action.
        before: A preceding action and its status, or None.
        back: An action that restores ACTIVE and its status, or None.
    """

    key: str
    step: str
    end: str
    body: Callable[[Live], Any]
    before: tuple[str, str] | None = None
    back: tuple[str, str] | None = None


def make_image_name(cloud: Live) -> dict[str, str]:
    return {"name": f"{PREFIX}-{uuid.uuid4().hex[:8]}"}


def make_no_body(cloud: Live) -> None:
    """Return None, because most actions need no body."""


#: A paused guest is not shut down before its disk is copied.
PAUSE, UNPAUSE = ("pause", "PAUSED"), ("unpause", "ACTIVE")
SNAPSHOT = InterruptedAction("createImage", "upload", "PAUSED", make_image_name, PAUSE, UNPAUSE)
SHELVE = InterruptedAction(
    "shelve", "upload", "SHELVED_OFFLOADED", make_no_body, PAUSE, ("unshelve", "ACTIVE")
)
REBUILD = InterruptedAction(
    "rebuild", "rebuild", "ACTIVE", lambda cloud: {"imageRef": cloud.image()}
)
SUSPEND = InterruptedAction(
    "suspend", "suspend", "SUSPENDED", make_no_body, None, ("resume", "ACTIVE")
)
RESCUE = InterruptedAction("rescue", "rescue", "RESCUE", make_no_body)
KILL_ACTIONS = (SNAPSHOT, SHELVE, REBUILD, SUSPEND)
DELETE_ACTIONS = (*KILL_ACTIONS, RESCUE)


@pytest.fixture(scope="module")
def guests(cloud: Live) -> Iterator[list[str]]:
    """ACTIVE servers, one for each action. The last test deletes them."""
    rest = cloud.rest()
    server_ids = [
        rest.create(image=cloud.image(), flavor=cloud.flavor(), name=PREFIX) for _ in DELETE_ACTIONS
    ]
    for server in server_ids:
        rest.await_status(server, "ACTIVE")
    yield server_ids
    for server in server_ids:
        rest.insist("DELETE", f"/servers/{server}", expected=(204, 404))
    for server in server_ids:
        rest.await_gone(server)
    for image in cloud.seed.demo.image.images(visibility="private"):
        if image.name.startswith(PREFIX):
            cloud.seed.demo.image.delete_image(image)
    cloud.assert_healthy()


def run_and_await(rest: Rest, actions: list[tuple[str, tuple[str, str] | None]]) -> None:
    """Send the action of each server, and wait for the statuses. None is no action."""
    pending = [(server, *action) for server, action in actions if action is not None]
    for server, key, _ in pending:
        reply = rest.insist("POST", f"/servers/{server}/action", {key: None}, expected=(202,))
        assert reply.status == 202, reply
    for server, _, status in pending:
        rest.await_status(server, status)


def start_action(cloud: Live, server: str, action: InterruptedAction) -> None:
    """Send the action with a new client, and check that it is accepted."""
    reply = cloud.rest().act(server, action.key, action.body(cloud))
    assert reply.status in (200, 202), reply


def read_stage(cloud: Live, server: str, action: InterruptedAction) -> str:
    """Return the stage of the server's last action.

    Returns:
        "" before the host executes the step, "doing" during the step, and "done" afterwards.
    """
    [(state,)] = cloud.rows(
        "SELECT state FROM actions WHERE server_id = ? ORDER BY created_at DESC, rowid DESC "
        "LIMIT 1",
        server,
    )
    return "doing" if cloud.is_at_step(server, action.step) else "done" if state == "done" else ""


class FrozenConductor:
    """Freezes the conductor with SIGSTOP while at least one thread is in the with block.

    Hosts continue, and the conductor does not process their reports. The conductor is frozen
    outside its transactions, because an open transaction would block other writers.
    """

    def __init__(self, cloud: Live) -> None:
        self._cloud, self._lock, self._inside = cloud, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                await_true(
                    self._hold, 10, lambda: "the conductor is always in a transaction", pause=0.005
                )
            self._inside += 1

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                process_control.kill(self._cloud.cloud, "conductor", signal.SIGCONT)

    def _hold(self) -> bool:
        pid, is_held = process_control.kill(self._cloud.cloud, "conductor", signal.SIGSTOP), False
        try:
            await_true(lambda: is_stopped(pid), 5, lambda: "the conductor goes on", pause=0.001)
            is_held = self._cloud.is_writable()
        finally:
            if not is_held:
                process_control.kill(self._cloud.cloud, "conductor", signal.SIGCONT)
        return is_held


def is_stopped(pid: int) -> bool:
    """Return whether all threads of the process are stopped.

    A thread that waits for the disk stops later.
    """
    try:
        return all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for thread in Path(f"/proc/{pid}/task").iterdir()
        )
    # A thread has ended.
    except OSError:
        return False


def list_images(cloud: Live) -> list[str]:
    """Return the names of the images of these tests, and check that all are complete."""
    statuses = {name: status for name, status in cloud.images().items() if name.startswith(PREFIX)}
    assert set(statuses.values()) <= {"active"}, statuses
    return sorted(statuses)


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("victim", ["conductor", "agent"])
def test_interrupted_actions_complete_after_kill_of_conductor_or_agent(
    cloud: Live, guests: list[str], victim: str, turn: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rest, actions = cloud.rest(), [*KILL_ACTIONS[turn:], *KILL_ACTIONS[:turn]]
    pairs = list(zip(guests, actions, strict=False))
    snapshots = list_images(cloud)
    run_and_await(rest, [(server, action.before) for server, action in pairs])
    seen_servers: set[str] = set()

    def all_seen() -> bool:
        seen_servers.update(
            server for server, action in pairs[:2] if read_stage(cloud, server, action)
        )
        return len(seen_servers) == 2

    with ThreadPoolExecutor(len(pairs)) as pool:
        requests = [pool.submit(start_action, cloud, server, action) for server, action in pairs]
        # The first two requests are for the actions to interrupt.
        for request in requests[:2]:
            request.result()
        await_true(all_seen, SETTLE, rest.servers, pause=0.005)
        pid = process_control.kill(cloud.cloud, victim, signal.SIGSTOP)
        try:
            interrupted = [
                action.key for server, action in pairs if cloud.is_at_step(server, action.step)
            ]
        finally:
            process_control.kill(cloud.cloud, victim)
        for request in requests:
            request.result()
    with capsys.disabled():
        print(f"\n{victim} killed in the middle of {', '.join(interrupted)}")
    assert {action.key for _, action in pairs[:2]} & set(interrupted), (
        "the actions that this turn is about were over"
    )
    await_true(
        lambda: find_process(cloud.cloud, victim) not in (None, pid),
        30,
        lambda: f"{victim} does not come back",
    )
    for server, action in pairs:
        rest.await_status(server, action.end)
    # The new images are the snapshot and the image of the shelved server.
    assert len(list_images(cloud)) == len(snapshots) + 2
    cloud.assert_healthy()

    run_and_await(rest, [(server, action.back) for server, action in pairs])
    await_true(lambda: len(list_images(cloud)) == len(snapshots) + 1, SETTLE, cloud.images)
    assert sorted(set(guests) & set(cloud.domains())) == sorted(guests)


def test_delete_supersedes_running_action_and_leaves_no_image(
    cloud: Live, guests: list[str]
) -> None:
    rest, frozen_conductor, before = cloud.rest(), FrozenConductor(cloud), list_images(cloud)
    pairs = list(zip(guests, DELETE_ACTIONS, strict=True))
    run_and_await(rest, [(server, action.before) for server, action in pairs])

    def delete_during_action(server: str, action: InterruptedAction) -> int:
        own_rest = cloud.rest()
        start_action(cloud, server, action)
        await_true(
            lambda: read_stage(cloud, server, action),
            SETTLE,
            lambda: own_rest.server(server),
            pause=0.005,
        )
        with frozen_conductor:
            assert read_stage(cloud, server, action) == "doing", f"{action.key} was over too soon"
            return own_rest.call("DELETE", f"/servers/{server}").status

    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(delete_during_action, *zip(*pairs, strict=True))) == [204] * len(pairs)
    for server in guests:
        rest.await_gone(server)
    await_true(
        lambda: not any(map(cloud.leftovers, guests)),
        SETTLE,
        lambda: list(map(cloud.leftovers, guests)),
    )
    await_true(
        lambda: sorted(name for name in cloud.images() if name.startswith(PREFIX)) == before,
        SETTLE,
        cloud.images,
    )
    for server, action in pairs:
        [(state,)] = cloud.rows(
            "SELECT state FROM actions WHERE server_id = ? AND name = ? ORDER BY created_at DESC, "
            "rowid DESC LIMIT 1",
            server,
            action.key,
        )
        assert state == "superseded", (action.key, state)
    cloud.assert_healthy()
