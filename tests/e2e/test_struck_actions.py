# SPDX-License-Identifier: Apache-2.0
"""Real guests struck in the middle of their actions: by kill -9 of the conductor or of the agent,
and by delete.

The guests are shared and nobody waits until they have booted. What was answered 202 must come to
its end without help, and a delete wins over whatever is being done; neither leaves a half-made
image or a finding of the oracle.
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


class Struck(NamedTuple):
    """An action, the step of it that a host carries out, the status it ends in, and what leads
    there and back."""

    key: str
    step: str
    end: str
    body: Callable[[Live], Any]
    before: tuple[str, str] | None = None
    back: tuple[str, str] | None = None


def named(cloud: Live) -> dict[str, str]:
    return {"name": f"{PREFIX}-{uuid.uuid4().hex[:8]}"}


def no_body(cloud: Live) -> None:
    """Most actions need no words."""


#: A guest that is paused need not be asked to power off before its disk is copied.
PAUSE, UNPAUSE = ("pause", "PAUSED"), ("unpause", "ACTIVE")
SNAPSHOT = Struck("createImage", "upload", "PAUSED", named, PAUSE, UNPAUSE)
SHELVE = Struck("shelve", "upload", "SHELVED_OFFLOADED", no_body, PAUSE, ("unshelve", "ACTIVE"))
REBUILD = Struck("rebuild", "rebuild", "ACTIVE", lambda cloud: {"imageRef": cloud.image()})
SUSPEND = Struck("suspend", "suspend", "SUSPENDED", no_body, None, ("resume", "ACTIVE"))
RESCUE = Struck("rescue", "rescue", "RESCUE", no_body)
KILLED = (SNAPSHOT, SHELVE, REBUILD, SUSPEND)
DELETED = (*KILLED, RESCUE)


@pytest.fixture(scope="module")
def guests(cloud: Live) -> Iterator[list[str]]:
    """As many as there are actions, all ACTIVE; the last test deletes them."""
    rest = cloud.rest()
    made = [rest.create(image=cloud.image(), flavor=cloud.flavor(), name=PREFIX) for _ in DELETED]
    for server in made:
        rest.await_status(server, "ACTIVE")
    yield made
    for server in made:
        rest.insist("DELETE", f"/servers/{server}", fine=(204, 404))
    for server in made:
        rest.await_gone(server)
    for image in cloud.seed.demo.image.images(visibility="private"):
        if image.name.startswith(PREFIX):
            cloud.seed.demo.image.delete_image(image)
    cloud.judge()


def all_do(rest: Rest, doing: list[tuple[str, tuple[str, str] | None]]) -> None:
    """Ask each server for its action, and await the status it leads to."""
    wanted = [(server, *what) for server, what in doing if what is not None]
    for server, key, _ in wanted:
        reply = rest.insist("POST", f"/servers/{server}/action", {key: None}, fine=(202,))
        assert reply.status == 202, reply
    for server, _, status in wanted:
        rest.await_status(server, status)


def ask(cloud: Live, server: str, action: Struck) -> None:
    """Ask for the action on a client of its own."""
    reply = cloud.rest().act(server, action.key, action.body(cloud))
    assert reply.status in (200, 202), reply


def stage(cloud: Live, server: str, action: Struck) -> str:
    """Of the action that was asked for: "doing" while its host is at work, "done" after that, ""
    before."""
    [(state,)] = cloud.rows(
        "SELECT state FROM actions WHERE server_id = ? ORDER BY created_at DESC, rowid DESC "
        "LIMIT 1",
        server,
    )
    return "doing" if cloud.doing(server, action.step) else "done" if state == "done" else ""


class Still:
    """The conductor is held (SIGSTOP) while somebody is in the block: hosts work on, and nothing
    they tell is taken in. It is held outside of its transactions: in one it would let nobody else
    write."""

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
        pid, held = process_control.kill(self._cloud.cloud, "conductor", signal.SIGSTOP), False
        try:
            await_true(lambda: stands_still(pid), 5, lambda: "the conductor goes on", pause=0.001)
            held = self._cloud.is_writable()
        finally:
            if not held:
                process_control.kill(self._cloud.cloud, "conductor", signal.SIGCONT)
        return held


def stands_still(pid: int) -> bool:
    """Are all its threads stopped? One that waits for the disk comes to it later."""
    try:
        return all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for thread in Path(f"/proc/{pid}/task").iterdir()
        )
    except OSError:  # one has ended
        return False


def whole_images(cloud: Live) -> list[str]:
    """Names of the images that these tests have made; an image that is not whole is a failure."""
    found = {name: status for name, status in cloud.images().items() if name.startswith(PREFIX)}
    assert set(found.values()) <= {"active"}, found
    return sorted(found)


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("victim", ["conductor", "agent"])
def test_killed_in_the_middle(
    cloud: Live, guests: list[str], victim: str, turn: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rest, actions = cloud.rest(), [*KILLED[turn:], *KILLED[:turn]]
    pairs = list(zip(guests, actions, strict=False))
    snapshots = whole_images(cloud)
    all_do(rest, [(server, action.before) for server, action in pairs])
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(server for server, action in pairs[:2] if stage(cloud, server, action))
        return len(seen) == 2

    with ThreadPoolExecutor(len(pairs)) as pool:
        asked = [pool.submit(ask, cloud, server, action) for server, action in pairs]
        for one in asked[:2]:  # those that this turn is about
            one.result()
        await_true(all_seen, SETTLE, rest.servers, pause=0.005)
        pid = process_control.kill(cloud.cloud, victim, signal.SIGSTOP)
        try:
            middle = [action.key for server, action in pairs if cloud.doing(server, action.step)]
        finally:
            process_control.kill(cloud.cloud, victim)
        for one in asked:
            one.result()
    with capsys.disabled():
        print(f"\n{victim} killed in the middle of {', '.join(middle)}")
    assert {action.key for _, action in pairs[:2]} & set(middle), (
        "the actions that this turn is about were over"
    )
    await_true(
        lambda: find_process(cloud.cloud, victim) not in (None, pid),
        30,
        lambda: f"{victim} does not come back",
    )
    for server, action in pairs:
        rest.await_status(server, action.end)
    assert len(whole_images(cloud)) == len(snapshots) + 2  # the snapshot and the shelved one
    cloud.judge()

    all_do(rest, [(server, action.back) for server, action in pairs])
    await_true(lambda: len(whole_images(cloud)) == len(snapshots) + 1, SETTLE, cloud.images)
    assert sorted(set(guests) & set(cloud.domains())) == sorted(guests)


def test_delete_in_the_middle_wins_and_leaves_nothing(cloud: Live, guests: list[str]) -> None:
    rest, still, before = cloud.rest(), Still(cloud), whole_images(cloud)
    pairs = list(zip(guests, DELETED, strict=True))
    all_do(rest, [(server, action.before) for server, action in pairs])

    def struck(server: str, action: Struck) -> int:
        mine = cloud.rest()
        ask(cloud, server, action)
        await_true(
            lambda: stage(cloud, server, action), SETTLE, lambda: mine.server(server), pause=0.005
        )
        with still:
            assert stage(cloud, server, action) == "doing", f"{action.key} was over too soon"
            return mine.call("DELETE", f"/servers/{server}").status

    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(struck, *zip(*pairs, strict=True))) == [204] * len(pairs)
    for server in guests:
        rest.await_gone(server)
    await_true(
        lambda: not any(map(cloud.remains, guests)),
        SETTLE,
        lambda: list(map(cloud.remains, guests)),
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
    cloud.judge()
