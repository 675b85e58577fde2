# SPDX-License-Identifier: Apache-2.0
"""Real guests struck in the middle of their actions: by kill -9 of the conductor or of the agent, and by delete.

The guests are shared and nobody waits until they have booted. What was answered 202 must come to its end without
help, and a delete wins over whatever is being done; neither leaves a half-made image or a finding of the oracle.
"""
from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.e2e.live import SETTLE, Live, Rest, await_true

PREFIX = "middle"


class Struck(NamedTuple):
    """An action, the step of it that a host carries out, the status it ends in, and what leads there and back."""

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


def begin(cloud: Live, server: str, action: Struck) -> bool:
    """Ask for the action on a client of its own, and wait until its host is at work; False when it is done before."""
    reply = cloud.rest().act(server, action.key, action.body(cloud))
    assert reply.status in (200, 202), reply

    def seen() -> str | None:
        [(state, step)] = cloud.rows("SELECT state, step FROM actions WHERE server_id = ? ORDER BY created_at DESC, "
                                     "rowid DESC LIMIT 1", server)
        return state if state == "done" or cloud.doing(server, action.step) else None
    return bool(await_true(seen, SETTLE, lambda: cloud.rest().server(server), pause=0.005) != "done")


def whole_images(cloud: Live) -> list[str]:
    """Names of the images that these tests have made; an image that is not whole is a failure."""
    found = {name: status for name, status in cloud.images().items() if name.startswith(PREFIX)}
    assert set(found.values()) <= {"active"}, found
    return sorted(found)


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("victim", ["conductor", "agent"])
def test_killed_in_the_middle(cloud: Live, guests: list[str], victim: str, turn: int,
                              capsys: pytest.CaptureFixture[str]) -> None:
    rest, actions = cloud.rest(), [*KILLED[turn:], *KILLED[:turn]]
    pairs = list(zip(guests, actions, strict=False))
    snapshots = whole_images(cloud)
    all_do(rest, [(server, action.before) for server, action in pairs])
    with ThreadPoolExecutor(len(pairs)) as pool:
        asked = [pool.submit(begin, cloud, server, action) for server, action in pairs]
        for one in asked[:2]:                                   # those that this turn is about
            one.result()
        middle = [action.key for server, action in pairs if cloud.doing(server, action.step)]
        pid = cloud.cloud.kill(victim)
        for one in asked:
            one.result()
    with capsys.disabled():
        print(f"\n{victim} killed in the middle of {', '.join(middle)}")
    assert {action.key for _, action in pairs[:2]} & set(middle), "the actions that this turn is about were over"
    await_true(lambda: cloud.cloud.pid(victim) not in (None, pid), 30, lambda: f"{victim} does not come back")
    for server, action in pairs:
        rest.await_status(server, action.end)
    assert len(whole_images(cloud)) == len(snapshots) + 2       # the snapshot and the shelved one
    cloud.judge()

    all_do(rest, [(server, action.back) for server, action in pairs])
    await_true(lambda: len(whole_images(cloud)) == len(snapshots) + 1, SETTLE, cloud.images)
    assert sorted(set(guests) & set(cloud.domains())) == sorted(guests)


def test_delete_in_the_middle_wins_and_leaves_nothing(cloud: Live, guests: list[str]) -> None:
    rest, before = cloud.rest(), whole_images(cloud)
    pairs = list(zip(guests, DELETED, strict=True))
    all_do(rest, [(server, action.before) for server, action in pairs])

    def struck(server: str, action: Struck) -> int:
        assert begin(cloud, server, action), f"{action.key} was over too soon"
        return cloud.rest().call("DELETE", f"/servers/{server}").status
    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(struck, *zip(*pairs, strict=True))) == [204] * len(pairs)
    for server in guests:
        rest.await_gone(server)
    await_true(lambda: not any(map(cloud.remains, guests)), SETTLE, lambda: list(map(cloud.remains, guests)))
    await_true(lambda: sorted(name for name in cloud.images() if name.startswith(PREFIX)) == before, SETTLE,
               cloud.images)
    for server, action in pairs:
        [(state,)] = cloud.rows("SELECT state FROM actions WHERE server_id = ? AND name = ? ORDER BY created_at DESC, "
                                "rowid DESC LIMIT 1", server, action.key)
        assert state == "superseded", (action.key, state)
    cloud.judge()
