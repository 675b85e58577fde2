# SPDX-License-Identifier: Apache-2.0
"""Who may do what, and when, over HTTP against clouds in memory: conflicts at one instant, locks,
soft deletes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest

from tests.e2e.conftest import KEPT
from tests.e2e.live import SETTLE, Live, Reply, Rest
from tests.waiting import await_true

#: Pairs that exclude each other, whichever is first, and also once the first has ended.
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"os-stop": None}, {"suspend": None}),
    ({"pause": None}, {"rescue": None}),
    ({"os-stop": None}, {"os-stop": None}),
    ({"shelve": None}, {"rescue": None}),
    ({"suspend": None}, {"pause": None}),
)
TRIES = 4


@contextmanager
def making(cloud: Live) -> Iterator[Callable[[], str]]:
    """A function that makes servers and waits until they are ACTIVE; at the end they are deleted,
    kept ones too."""
    rest, admin, made = cloud.rest(), cloud.rest("kilonova-admin"), list[str]()

    def make() -> str:
        made.append(rest.create(image=cloud.image("empty"), flavor=cloud.flavor(), name="rules"))
        rest.await_status(made[-1], "ACTIVE")
        return made[-1]

    try:
        yield make
    finally:
        for server in made:
            admin.insist(
                "POST", f"/servers/{server}/action", {"forceDelete": None}, fine=(202, 404)
            )
        for server in made:
            rest.await_gone(server)


@pytest.fixture
def new(in_memory: Live) -> Iterator[Callable[[], str]]:
    """Makes servers that are ACTIVE, and deletes them."""
    with making(in_memory) as make:
        yield make


def at_once(cloud: Live, server: str, bodies: tuple[dict[str, Any], ...]) -> list[Reply]:
    """Send them by clients of their own, as near to one instant as threads are."""
    rests, start = [cloud.rest() for _ in bodies], Barrier(len(bodies))

    def send(rest: Rest, body: dict[str, Any]) -> Reply:
        rest.server(server)  # the connection is open, the token known
        start.wait(SETTLE)
        return rest.call("POST", f"/servers/{server}/action", body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, rests, bodies))


@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: "-".join(key for body in pair for key in body)
)
def test_one_of_two_actions_at_one_instant_wins(
    in_memory: Live, new: Callable[[], str], pair: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for _ in range(TRIES):
        server = new()
        won, lost = sorted(at_once(in_memory, server, pair), key=lambda reply: reply.status)
        assert (won.status in (200, 202), lost.status) == (True, 409), (won, lost)
        kind, code, message = lost.fault
        assert (kind, code) == ("conflictingRequest", 409)
        assert f"instance {server} while it is in " in message
        assert message.startswith("Cannot '")
        assert any(word in message for word in (" task_state ", " vm_state "))


def test_locked_server_is_not_the_owners_and_an_admins_lock_stays(
    in_memory: Live, new: Callable[[], str]
) -> None:
    owner, admin, server = in_memory.rest(), in_memory.rest("kilonova-admin"), new()
    assert owner.act(server, "lock", {"locked_reason": "mine"}).status == 202
    assert (owner.server(server)["locked"], owner.server(server)["locked_reason"]) == (True, "mine")
    before = len(
        owner.call("GET", f"/servers/{server}/os-instance-actions").body["instanceActions"]
    )
    for key, value in (
        ("os-stop", None),
        ("pause", None),
        ("suspend", None),
        ("shelve", None),
        ("rebuild", {"imageRef": in_memory.image("empty")}),
        ("forceDelete", None),
    ):
        kind, _, message = owner.act(server, key, value).fault
        assert (kind, "locked" in message) == ("conflictingRequest", True), (key, message)
    assert owner.call("DELETE", f"/servers/{server}").status == 409
    assert (
        len(owner.call("GET", f"/servers/{server}/os-instance-actions").body["instanceActions"])
        == before
    )
    assert admin.act(server, "pause").status == 202
    owner.await_status(server, "PAUSED")
    assert owner.act(server, "unlock").status == 202

    assert admin.act(server, "lock").status == 202
    assert owner.act(server, "unlock").status == 403
    assert owner.act(server, "unpause").status == 409
    assert admin.act(server, "unlock").status == 202
    assert owner.act(server, "unpause").status == 202
    owner.await_status(server, "ACTIVE")


def test_repeated_request_is_refused_or_has_its_effect_once(
    in_memory: Live, new: Callable[[], str]
) -> None:
    rest, server = in_memory.rest(), new()
    replies = [rest.act(server, "os-stop").status for _ in range(3)]
    assert (replies[0], set(replies[1:])) == (202, {409})
    rest.await_status(server, "SHUTOFF")
    told = rest.call("GET", f"/servers/{server}/os-instance-actions").body["instanceActions"]
    assert [one["action"] for one in told] == ["stop", "create"]


@pytest.mark.slice("operations")
def test_deleted_server_is_kept_restored_and_at_last_reclaimed(keeping: Live) -> None:
    rest, admin = keeping.rest(), keeping.rest("kilonova-admin")
    with making(keeping) as new:
        server, forced = new(), new()
        assert rest.call("DELETE", f"/servers/{server}").status == 204
        kept = admin.await_status(server, "SOFT_DELETED")
        assert (kept["OS-EXT-STS:vm_state"], kept["OS-EXT-STS:power_state"]) == ("soft-delete", 4)
        assert server not in {one["id"] for one in rest.servers()}
        assert rest.act(server, "os-start").status == 409
        assert rest.act(server, "restore").status == 202
        rest.await_status(server, "ACTIVE")

        assert rest.call("DELETE", f"/servers/{forced}").status == 204
        admin.await_status(forced, "SOFT_DELETED")
        assert rest.act(forced, "forceDelete").status == 202
        rest.await_gone(forced)
        assert keeping.remains(forced) == []

        began = time.monotonic()
        assert rest.call("DELETE", f"/servers/{server}").status == 204
        admin.await_status(server, "SOFT_DELETED")
        rest.await_gone(server, KEPT + SETTLE)
        assert time.monotonic() - began >= KEPT - 1  # the record's clock has its own seconds
        assert keeping.remains(server) == []
        assert rest.act(server, "restore").status == 404
    keeping.judge()


@pytest.mark.slice("operations")
def test_shelved_server_stays_on_its_host_until_it_is_offloaded(keeping: Live) -> None:
    rest, admin = keeping.rest(), keeping.rest("kilonova-admin")
    with making(keeping) as new:
        server = new()
        assert rest.act(server, "shelve").status == 202
        rest.await_status(server, "SHELVED")
        assert keeping.remains(server) != []
        assert rest.act(server, "unshelve").status == 202
        rest.await_status(server, "ACTIVE")
        assert rest.act(server, "shelve").status == 202
        rest.await_status(server, "SHELVED")
        assert admin.act(server, "shelveOffload").status == 202
        rest.await_status(server, "SHELVED_OFFLOADED")
        assert keeping.remains(server) == []
        assert rest.act(server, "unshelve").status == 202
        rest.await_status(server, "ACTIVE")
        await_true(lambda: "rules-shelved" not in keeping.images(), SETTLE, keeping.images)
    keeping.judge()
