# SPDX-License-Identifier: Apache-2.0
"""Conflicting actions at the same time, locks, and soft deletes.

The requests go over HTTP to clouds with memory hypervisors.
"""

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

#: Pairs of actions that exclude each other in either order, also after the end of the first.
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"os-stop": None}, {"suspend": None}),
    ({"pause": None}, {"rescue": None}),
    ({"os-stop": None}, {"os-stop": None}),
    ({"shelve": None}, {"rescue": None}),
    ({"suspend": None}, {"pause": None}),
)
TRIES = 4


@contextmanager
def server_maker(cloud: Live) -> Iterator[Callable[[], str]]:
    """Yield a function that creates an ACTIVE server. All servers are deleted at the end."""
    rest, admin, server_ids = cloud.rest(), cloud.rest("kilonova-admin"), list[str]()

    def make_server() -> str:
        server_ids.append(
            rest.create(image=cloud.image("empty"), flavor=cloud.flavor(), name="rules")
        )
        rest.await_status(server_ids[-1], "ACTIVE")
        return server_ids[-1]

    try:
        yield make_server
    finally:
        for server in server_ids:
            admin.insist(
                "POST", f"/servers/{server}/action", {"forceDelete": None}, expected=(202, 404)
            )
        for server in server_ids:
            rest.await_gone(server)


@pytest.fixture
def make_server(in_memory: Live) -> Iterator[Callable[[], str]]:
    """Yield a function that creates an ACTIVE server. All servers are deleted at the end."""
    with server_maker(in_memory) as make:
        yield make


def send_at_once(cloud: Live, server: str, bodies: tuple[dict[str, Any], ...]) -> list[Reply]:
    """Send the actions at the same time, each from a thread with its own client."""
    rests, start = [cloud.rest() for _ in bodies], Barrier(len(bodies))

    def send(rest: Rest, body: dict[str, Any]) -> Reply:
        # After this request the connection is open and the token validated.
        rest.server(server)
        start.wait(SETTLE)
        return rest.call("POST", f"/servers/{server}/action", body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, rests, bodies))


@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: "-".join(key for body in pair for key in body)
)
def test_conflicting_actions_sent_at_once_return_one_success_and_one_409(
    in_memory: Live, make_server: Callable[[], str], pair: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for _ in range(TRIES):
        server = make_server()
        won, lost = sorted(send_at_once(in_memory, server, pair), key=lambda reply: reply.status)
        assert (won.status in (200, 202), lost.status) == (True, 409), (won, lost)
        kind, code, message = lost.fault
        assert (kind, code) == ("conflictingRequest", 409)
        assert f"instance {server} while it is in " in message
        assert message.startswith("Cannot '")
        assert any(word in message for word in (" task_state ", " vm_state "))


def test_lock_refuses_actions_of_owner_and_only_admin_ends_admin_lock(
    in_memory: Live, make_server: Callable[[], str]
) -> None:
    owner, admin, server = in_memory.rest(), in_memory.rest("kilonova-admin"), make_server()
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


def test_repeated_stop_returns_409_and_is_done_once(
    in_memory: Live, make_server: Callable[[], str]
) -> None:
    rest, server = in_memory.rest(), make_server()
    replies = [rest.act(server, "os-stop").status for _ in range(3)]
    assert (replies[0], set(replies[1:])) == (202, {409})
    rest.await_status(server, "SHUTOFF")
    actions = rest.call("GET", f"/servers/{server}/os-instance-actions").body["instanceActions"]
    assert [action["action"] for action in actions] == ["stop", "create"]


@pytest.mark.slice("operations")
def test_soft_deleted_server_is_restored_and_later_reclaimed(keeping: Live) -> None:
    rest, admin = keeping.rest(), keeping.rest("kilonova-admin")
    with server_maker(keeping) as make_server:
        server, forced = make_server(), make_server()
        assert rest.call("DELETE", f"/servers/{server}").status == 204
        restorable = admin.await_status(server, "SOFT_DELETED")
        assert (restorable["OS-EXT-STS:vm_state"], restorable["OS-EXT-STS:power_state"]) == (
            "soft-delete",
            4,
        )
        assert server not in {server_record["id"] for server_record in rest.servers()}
        assert rest.act(server, "os-start").status == 409
        assert rest.act(server, "restore").status == 202
        rest.await_status(server, "ACTIVE")

        assert rest.call("DELETE", f"/servers/{forced}").status == 204
        admin.await_status(forced, "SOFT_DELETED")
        assert rest.act(forced, "forceDelete").status == 202
        rest.await_gone(forced)
        assert keeping.leftovers(forced) == []

        began = time.monotonic()
        assert rest.call("DELETE", f"/servers/{server}").status == 204
        admin.await_status(server, "SOFT_DELETED")
        rest.await_gone(server, KEPT + SETTLE)
        # The database's clock may differ by a second.
        assert time.monotonic() - began >= KEPT - 1
        assert keeping.leftovers(server) == []
        assert rest.act(server, "restore").status == 404
    keeping.assert_healthy()


@pytest.mark.slice("operations")
def test_shelved_server_stays_on_host_until_shelve_offload(keeping: Live) -> None:
    rest, admin = keeping.rest(), keeping.rest("kilonova-admin")
    with server_maker(keeping) as make_server:
        server = make_server()
        assert rest.act(server, "shelve").status == 202
        rest.await_status(server, "SHELVED")
        assert keeping.leftovers(server) != []
        assert rest.act(server, "unshelve").status == 202
        rest.await_status(server, "ACTIVE")
        assert rest.act(server, "shelve").status == 202
        rest.await_status(server, "SHELVED")
        assert admin.act(server, "shelveOffload").status == 202
        rest.await_status(server, "SHELVED_OFFLOADED")
        assert keeping.leftovers(server) == []
        assert rest.act(server, "unshelve").status == 202
        rest.await_status(server, "ACTIVE")
        await_true(lambda: "rules-shelved" not in keeping.images(), SETTLE, keeping.images)
    keeping.assert_healthy()
