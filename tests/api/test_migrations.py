# SPDX-License-Identifier: Apache-2.0
"""Migrations: lists, the migrations of a server, abort and force complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.clock import SECOND
from common.domain.command_key import CommandKey, CommandKind
from common.domain.models import Control
from common.domain.verbs import control_command
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.engine import now
from common.store.hosts import hosts
from conductor.engine import lost_commands
from conductor.workflows import WORKFLOWS
from tests.api.conftest import OTHER, PROJECT, Cloud
from tests.api.moves import (
    act,
    find_action_and_migration,
    add_host2_and_large_flavor,
    create_resting_server,
)
from tests.told import all_told

OLD = {"id": "2", "name": "m1.small", "number": 2}
NEW = {"id": "large", "name": "m1.large", "number": 7}
# fmt: off
FIRST_FIELDS = {"id", "status", "source_compute", "source_node", "dest_compute", "dest_host", "dest_node", "created_at",
                "updated_at", "instance_uuid", "old_instance_type_id", "new_instance_type_id"}
# fmt: on
HOST_FIELDS = ("source_compute", "source_node", "dest_compute", "dest_host", "dest_node")
UNKNOWN = "00000000-0000-4000-8000-000000000000"
BYTES = {
    f"{kind}_{count}_bytes"
    for kind in ("memory", "disk")
    for count in ("total", "processed", "remaining")
}


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    return make_cloud(add_host2_and_large_flavor, max_limit=5)


def add_migration(
    cloud: Cloud, kind: str = "resize", status: str = "finished", at: int = 1, **values: Any
) -> str:
    """Insert a migration that was created ``at`` seconds after 1970, and return its uuid."""
    row = {
        "uuid": ids.new(),
        "server_id": ids.new(),
        "action_id": ids.new(),
        "project_id": PROJECT,
        "user_id": "u1",
        "type": kind,
        "status": status,
        "source_host": "host1",
        "dest_host": "host2",
        "old_flavor": OLD,
        "new_flavor": NEW,
        "was": "active",
        "created_at": at * SECOND,
        "updated_at": at * SECOND,
        **values,
    }
    with cloud.store.begin() as tx:
        tx.execute(sa.insert(schema.migrations), row)
    return str(row["uuid"])


def list_migrations(cloud: Cloud, query: str = "", mv: str = "2.80", token: str = "admin") -> Any:
    answer = cloud.call("GET", f"/os-migrations{query}", mv=mv, token=token)
    assert answer.status_code == 200, answer.text
    return answer.json


def list_uuids(cloud: Cloud, query: str = "", **more: Any) -> list[str]:
    return [one["uuid"] for one in list_migrations(cloud, query, **more)["migrations"]]


# --- the list ---
@pytest.mark.parametrize(
    ("mv", "more"),
    [
        ("2.1", set()),
        ("2.22", set()),
        ("2.23", {"migration_type"}),
        ("2.58", {"migration_type"}),
        ("2.59", {"migration_type", "uuid"}),
        ("2.79", {"migration_type", "uuid"}),
        ("2.80", {"migration_type", "uuid", "user_id", "project_id"}),
        ("2.104", {"migration_type", "uuid", "user_id", "project_id"}),
    ],
)
def test_what_is_shown_of_a_migration(cloud: Cloud, mv: str, more: set[str]) -> None:
    server = ids.new()
    add_migration(cloud, server_id=server)
    [shown] = list_migrations(cloud, mv=mv)["migrations"]
    assert set(shown) == FIRST_FIELDS | more
    assert {**shown, **dict.fromkeys(more)} == {
        "id": 1,
        "status": "finished",
        "instance_uuid": server,
        "source_compute": "host1",
        "source_node": "host1.cloud",
        "dest_compute": "host2",
        "dest_node": "host2.cloud",
        "dest_host": "192.0.2.1",
        "created_at": "1970-01-01T00:00:01.000000",
        "updated_at": "1970-01-01T00:00:01.000000",
        "old_instance_type_id": 2,
        "new_instance_type_id": 7,
        **dict.fromkeys(more),
    }


def test_the_flavors_of_a_migration_outlive_their_deletion(cloud: Cloud) -> None:
    numbers = {row.flavorid: row.id for row in cloud.rows(schema.flavors)}
    server = cloud.create()
    cloud.rest(server)
    resize = {"resize": {"flavorRef": "2"}}
    assert cloud.call("POST", f"/servers/{server}/action", resize).status_code == 202
    for flavor in ("1", "2"):
        assert cloud.call("DELETE", f"/flavors/{flavor}", token="admin").status_code == 202
    [shown] = list_migrations(cloud)["migrations"]
    assert (shown["old_instance_type_id"], shown["new_instance_type_id"]) == (
        numbers["1"],
        numbers["2"],
    )


def test_what_is_not_known_yet_or_not_any_more_is_null(cloud: Cloud) -> None:
    add_migration(cloud, dest_host=None, new_flavor={"id": "gone", "name": "m1.gone"})
    [shown] = list_migrations(cloud)["migrations"]
    assert [
        shown[name] for name in ("dest_compute", "dest_node", "dest_host", "new_instance_type_id")
    ] == [None] * 4


@pytest.mark.parametrize(
    ("kind", "status", "linked"),
    [
        ("live-migration", "running", True),
        ("live-migration", "queued", True),
        ("live-migration", "completed", False),
        ("live-migration", "accepted", False),
        ("evacuation", "pre-migrating", False),
        ("resize", "post-migrating", False),
    ],
)
def test_live_migrations_on_their_way_have_links(
    cloud: Cloud, kind: str, status: str, linked: bool
) -> None:
    server = ids.new()
    add_migration(cloud, kind, status, server_id=server)
    assert "links" not in list_migrations(cloud, mv="2.22")["migrations"][0]
    [shown] = list_migrations(cloud, mv="2.23")["migrations"]
    links = [
        {"rel": "self", "href": f"http://falconframework.org/v2.1/servers/{server}/migrations/1"},
        {"rel": "bookmark", "href": f"http://falconframework.org/servers/{server}/migrations/1"},
    ]
    assert shown.get("links") == (links if linked else None)


def test_managers_see_those_of_their_project_without_hosts(cloud: Cloud) -> None:
    mine, _ = add_migration(cloud), add_migration(cloud, project_id=OTHER)
    for query in ("", f"?project_id={OTHER}"):
        answer = cloud.call("GET", f"/os-migrations{query}", mv="2.80", token="manager")
        assert answer.json["forbidden"]["message"] == (
            "Policy doesn't allow os_compute_api:os-migrations:index:all_projects to be performed."
        )
    assert (
        cloud.call(
            "GET", f"/os-migrations?project_id={PROJECT}", mv="2.80", token="user"
        ).status_code
        == 403
    )
    [shown] = list_migrations(cloud, f"?project_id={PROJECT}", token="manager")["migrations"]
    assert (shown["uuid"], [shown[name] for name in HOST_FIELDS]) == (mine, [None] * 5)
    assert (
        cloud.call(
            "GET", f"/os-migrations?project_id={PROJECT}", mv="2.58", token="manager"
        ).status_code
        == 403
    )
    assert len(list_uuids(cloud)) == 2


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", "abc"),
        ("host=host1", "ab"),
        ("host=host3", "bc"),
        ("host=nowhere", ""),
        ("source_compute=host1", "ab"),
        ("source_compute=host2", "c"),
        ("status=error", "b"),
        ("status=migrating", ""),
        ("migration_type=resize", "a"),
        ("migration_type=evacuation&status=done", "c"),
        ("user_id=u2", "c"),
        (f"project_id={OTHER}", "b"),
        ("hidden=1", "abc"),
        ("instance_uuid=nothing", ""),
        ("status=error&status=finished", "a"),
        ("instance_uuid=INSTANCE", "a"),
        ("changes-since=1970-01-01T00:00:02Z", "bc"),
        ("changes-before=1970-01-01T00:00:02Z", "ab"),
        ("changes-since=1970-01-01T00:00:02Z&changes-before=1970-01-01T00:00:02.5Z", "b"),
        ("changes-before=1970-01-01T00:00:01Z", "a"),
    ],
)
def test_filters(cloud: Cloud, query: str, found: str) -> None:
    server = ids.new()
    names = {
        add_migration(cloud, server_id=server): "a",
        add_migration(cloud, "live-migration", "error", 2, dest_host="host3", project_id=OTHER): "b",
        add_migration(
            cloud, "evacuation", "done", 3, source_host="host2", dest_host="host3", user_id="u2"
        ): "c",
    }
    got = list_uuids(cloud, "?" + query.replace("INSTANCE", server))
    assert "".join(sorted(names[uuid] for uuid in got)) == found
    assert got == sorted(got, key=lambda uuid: names[uuid], reverse=True), "newest first"


@pytest.mark.parametrize(
    ("mv", "query"),
    [
        ("2.59", "changes-before=1970-01-01T00:00:02Z"),
        ("2.59", "user_id=u1"),
        ("2.79", "project_id=p"),
        ("2.59", "colour=red"),
        ("2.59", "limit=x"),
        ("2.59", "limit=1&limit=2"),
        ("2.59", "marker=a&marker=b"),
        ("2.59", f"marker={UNKNOWN}"),
        ("2.66", "changes-since=yesterday"),
        ("2.80", "changes-since=1970-01-01T00:00:03Z&changes-before=1970-01-01T00:00:02Z"),
    ],
)
def test_queries_that_are_refused(cloud: Cloud, mv: str, query: str) -> None:
    assert cloud.call("GET", f"/os-migrations?{query}", mv=mv, token="admin").status_code == 400


@pytest.mark.parametrize(
    ("mv", "query"),
    [
        ("2.1", "limit=1"),
        ("2.58", "colour=red"),
        ("2.58", "user_id=nobody"),
        ("2.58", "changes-since=1999-01-01T00:00:00Z"),
    ],
)
def test_what_a_version_does_not_know_yet_is_passed_over(cloud: Cloud, mv: str, query: str) -> None:
    add_migration(cloud), add_migration(cloud)
    assert len(list_migrations(cloud, f"?{query}", mv=mv)["migrations"]) == 2


def test_pages(cloud: Cloud) -> None:
    made = [add_migration(cloud, at=number // 2) for number in range(7)][::-1]
    assert list_uuids(cloud) == made[:5], "the operator's limit"
    first = list_migrations(cloud, "?limit=3&status=finished", mv="2.59")
    assert [one["uuid"] for one in first["migrations"]] == made[:3]
    [link] = first["migrations_links"]
    assert link["href"].endswith(f"/v2.1/os-migrations?limit=3&status=finished&marker={made[2]}")
    rest = list_migrations(cloud, f"?limit=5&marker={made[2]}", mv="2.59")
    assert ([one["uuid"] for one in rest["migrations"]], "migrations_links" in rest) == (
        made[3:],
        False,
    )
    assert list_migrations(cloud, "?limit=0") == {"migrations": []}
    assert "migrations_links" not in list_migrations(cloud, mv="2.58")


# --- below a server ---
@pytest.fixture
def moving(cloud: Cloud) -> str:
    """A server whose live migration runs at host1."""
    server = create_resting_server(cloud)
    act(
        cloud,
        server,
        "os-migrateLive",
        {"host": None, "block_migration": "auto"},
        "2.30",
        "admin",
        status=202,
    )
    runs(cloud, server)
    return server


def runs(cloud: Cloud, server: str, status: str = "running", **values: Any) -> None:
    action, move = find_action_and_migration(cloud, server)
    cloud.change(
        schema.migrations,
        schema.migrations.c.id == move.id,
        status=status,
        dest_host="host2",
        **values,
    )
    cloud.change(
        schema.actions,
        schema.actions.c.id == action.id,
        state="waiting",
        step="migrate",
        host="host1",
        attempt=2,
    )


# fmt: off
@pytest.mark.parametrize(("mv", "more"), [
    ("2.23", set()), ("2.58", set()), ("2.59", {"uuid"}), ("2.79", {"uuid"}),
    ("2.80", {"uuid", "user_id", "project_id"}), ("2.104", {"uuid", "user_id", "project_id"})])
def test_a_live_migration_tells_how_far_it_is(cloud: Cloud, moving: str, mv: str, more: set[str]) -> None:
    runs(cloud, moving, progress={"memory_total": 300, "memory_processed": 200, "memory_remaining": 100,
                                  "disk_total": 0})
    [listed_one] = cloud.call("GET", f"/servers/{moving}/migrations", mv=mv, token="admin").json["migrations"]
    shown = cloud.call("GET", f"/servers/{moving}/migrations/1", mv=mv, token="admin").json["migration"]
    assert shown == listed_one
    common = FIRST_FIELDS - {"instance_uuid", "old_instance_type_id", "new_instance_type_id"}
    assert set(shown) == common | BYTES | more | {"server_uuid"}
    assert (shown["server_uuid"], shown["source_compute"], shown["dest_compute"]) == (moving, "host1", "host2")
    assert [shown[f"memory_{how}_bytes"] for how in ("total", "processed", "remaining")] == [300, 200, 100]
    assert [shown[f"disk_{how}_bytes"] for how in ("total", "processed", "remaining")] == [None] * 3
# fmt: on


def test_managers_see_it_without_hosts_and_others_not_at_all(cloud: Cloud, moving: str) -> None:
    [shown] = cloud.call("GET", f"/servers/{moving}/migrations", mv="2.23", token="manager").json[
        "migrations"
    ]
    assert [shown[name] for name in HOST_FIELDS] == [None] * 5
    path = f"/servers/{moving}/migrations"
    statuses = {
        token: (
            cloud.call("GET", path, mv="2.23", token=token).status_code,
            cloud.call("GET", f"{path}/1", mv="2.23", token=token).status_code,
        )
        for token in ("manager", "user", "reader", "stranger", "admin")
    }
    assert statuses == {
        "manager": (200, 403),
        "user": (403, 403),
        "reader": (403, 403),
        "stranger": (404, 404),
        "admin": (200, 200),
    }


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        ("live-migration", "accepted", "Live migration 1 for server {} is not in progress."),
        ("live-migration", "completed", "Live migration 1 for server {} is not in progress."),
        ("evacuation", "pre-migrating", "Migration 1 for server {} is not live-migration."),
    ],
)
def test_what_is_not_on_its_way_is_not_there(
    cloud: Cloud, moving: str, kind: str, status: str, text: str
) -> None:
    runs(cloud, moving, status, type=kind)
    path = f"/servers/{moving}/migrations"
    assert cloud.call("GET", path, mv="2.23", token="admin").json == {"migrations": []}
    assert cloud.call("GET", f"{path}/1", mv="2.23", token="admin").json["itemNotFound"][
        "message"
    ] == text.format(moving)


@pytest.mark.parametrize("number", ["2", "x", "9" * 30, "-1"])
def test_a_migration_that_there_is_not(cloud: Cloud, moving: str, number: str) -> None:
    path = f"/servers/{moving}/migrations/{number}"
    assert cloud.call("GET", path, mv="2.23", token="admin").status_code == 404
    gone = cloud.call("DELETE", path, mv="2.24", token="admin")
    assert (
        gone.json["itemNotFound"]["message"]
        == f"Migration {number} not found for instance {moving}"
    )
    assert (
        cloud.call(
            "POST", path + "/action", {"force_complete": None}, mv="2.22", token="admin"
        ).status_code
        == 400
    )
    other = create_resting_server(cloud)
    assert (
        cloud.call("GET", f"/servers/{other}/migrations/1", mv="2.23", token="admin").status_code
        == 404
    )


# --- controls ---
def request(cloud: Cloud, server: str, word: str, mv: str = "2.65", token: str = "admin") -> Any:
    path = f"/servers/{server}/migrations/1"
    if word == "abort":
        return cloud.call("DELETE", path, mv=mv, token=token)
    return cloud.call("POST", path + "/action", {"force_complete": None}, mv=mv, token=token)


@pytest.mark.parametrize(
    ("word", "mv", "journal"),
    [
        ("abort", "2.24", "live_migration_cancel"),
        ("complete", "2.22", "live_migration_force_complete"),
    ],
)
@pytest.mark.parametrize("token", ["manager", "admin"])
def test_a_wish_is_written_down_and_told_to_the_host_at_once(
    cloud: Cloud, moving: str, word: str, mv: str, journal: str, token: str
) -> None:
    answer = request(cloud, moving, word, mv, token)
    assert (answer.status_code, answer.content) == (202, b"")
    [move] = cloud.rows(schema.migrations)
    action, _ = find_action_and_migration(cloud, moving)
    session = cloud.store.read(lambda tx: hosts.sessions(tx, ["host1"]))["host1"]
    assert move.requested_control == word
    assert cloud.agents.told == [
        (
            "host1",
            control_command(
                CommandKey(CommandKind.DO, action.id, "migrate", 2),
                Control(word),
                server=moving,
                fence=action.fence,
                session=session,
            ),
        )
    ]
    assert cloud.agents.told[0][1] in cloud.store.read(
        lambda tx: lost_commands.control_commands(tx, WORKFLOWS, "host1", session)
    ), "repeated"
    shown = cloud.call("GET", f"/servers/{moving}/os-instance-actions", mv="2.58").json[
        "instanceActions"
    ]
    assert [one["action"] for one in shown] == [journal, "live-migration", "create"]


@pytest.mark.parametrize(("word", "name"), [("abort", "abort"), ("complete", "force_complete")])
def test_a_wish_is_told_to_others_when_it_is_taken(
    cloud: Cloud, moving: str, word: str, name: str
) -> None:
    cloud.store.notify_with(NotificationSettings("api1"))
    assert request(cloud, moving, word).status_code == 202
    [row] = all_told(cloud.store)
    assert (row.event, row.key) == (f"instance.live_migration_{name}.start", moving)
    assert (row.publisher, row.body["object"]["task_state"]) == ("nova-compute:host1", "migrating")
    assert row.body["request"]["id"].startswith("req-")


def test_a_host_that_does_not_hear_it_hears_it_later(cloud: Cloud, moving: str) -> None:
    cloud.agents.silent = {"host1"}
    assert request(cloud, moving, "abort").status_code == 202
    assert cloud.rows(schema.migrations)[0].requested_control == "abort"


@pytest.mark.parametrize(
    ("status", "mv", "word", "answer"),
    [
        ("queued", "2.64", "abort", 400),
        ("preparing", "2.64", "abort", 400),
        ("queued", "2.65", "abort", 202),
        ("preparing", "2.65", "abort", 202),
        ("accepted", "2.65", "abort", 400),
        ("post-migrating", "2.65", "abort", 400),
        ("completed", "2.65", "abort", 400),
        ("queued", "2.65", "complete", 400),
        ("preparing", "2.65", "complete", 400),
    ],
)
def test_the_states_in_which_it_can_be_wished(
    cloud: Cloud, moving: str, status: str, mv: str, word: str, answer: int
) -> None:
    runs(cloud, moving, status)
    got = request(cloud, moving, word, mv)
    assert got.status_code == answer
    assert len(cloud.agents.told) == (answer == 202)
    if answer == 400:
        what = {"abort": "abort live migration", "complete": "force complete"}[word]
        assert got.json["badRequest"]["message"] == (
            f"Migration 1 state of instance {moving} is {status}. Cannot {what} while the migration is in this state."
        )
        assert cloud.rows(schema.migrations)[0].requested_control is None


def test_one_that_no_host_has_in_hand_is_for_the_conductor_alone(cloud: Cloud, moving: str) -> None:
    runs(cloud, moving, "preparing")
    action, _ = find_action_and_migration(cloud, moving)
    cloud.change(
        schema.actions, schema.actions.c.id == action.id, state="due", step="prepare", host=None
    )
    assert request(cloud, moving, "abort").status_code == 202
    assert (cloud.agents.told, cloud.rows(schema.migrations)[0].requested_control) == ([], "abort")


def test_nothing_follows_an_abort(cloud: Cloud, moving: str) -> None:
    assert request(cloud, moving, "complete").status_code == 202
    assert request(cloud, moving, "abort").status_code == 202
    assert (
        request(cloud, moving, "complete")
        .json["badRequest"]["message"]
        .endswith("is being aborted.")
    )
    assert cloud.rows(schema.migrations)[0].requested_control == "abort"


@pytest.mark.parametrize(
    ("word", "name"), [("abort", "abort live migration"), ("complete", "force_complete")]
)
def test_who_is_refused(cloud: Cloud, moving: str, word: str, name: str) -> None:
    statuses = {
        token: request(cloud, moving, word, token=token).status_code
        for token in ("user", "reader", "stranger")
    }
    assert statuses == {"user": 403, "reader": 403, "stranger": 404}
    action, _ = find_action_and_migration(cloud, moving)
    cloud.rest(moving, task_state="migrating", action=action.id, locked=True, locked_by="admin")
    assert (
        request(cloud, moving, word, token="manager")
        .json["conflictingRequest"]["message"]
        .endswith("is locked")
    )
    cloud.rest(moving)
    assert request(cloud, moving, word).json["conflictingRequest"]["message"] == (
        f"Cannot '{name}' instance {moving} while it is in task_state None"
    )
    assert (cloud.agents.told, cloud.rows(schema.migrations)[0].requested_control) == ([], None)


@pytest.mark.parametrize(
    "body", [{"force_complete": {}}, {}, {"abort": None}, {"force_complete": None, "more": 1}]
)
def test_bodies_that_force_nothing(cloud: Cloud, moving: str, body: Any) -> None:
    answer = cloud.call(
        "POST", f"/servers/{moving}/migrations/1/action", body, mv="2.22", token="admin"
    )
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "first"),
    [
        ("GET", "", "2.23"),
        ("GET", "/1", "2.23"),
        ("DELETE", "/1", "2.24"),
        ("POST", "/1/action", "2.22"),
    ],
)
def test_versions_before_there_were_such_things(
    cloud: Cloud, moving: str, method: str, path: str, first: str
) -> None:
    body = {"force_complete": None} if method == "POST" else None
    before = f"2.{int(first[2:]) - 1}"
    statuses = [
        cloud.call(
            method, f"/servers/{moving}/migrations{path}", body, mv=mv, token="admin"
        ).status_code
        for mv in (before, first)
    ]
    assert statuses in ([404, 200], [404, 202])


def test_lists_cost_the_same_whatever_they_hold(cloud: Cloud) -> None:
    """One statement a page."""
    seen: list[str] = []
    sa.event.listen(
        cloud.store.engine, "before_cursor_execute", lambda *given: seen.append(given[2])
    )
    counts = []
    for _ in range(2):
        add_migration(cloud, at=cloud.store.read(lambda tx: tx.scalar(sa.select(now()))) // SECOND)
        seen.clear()
        list_migrations(cloud)
        counts.append(sum(text.startswith("SELECT") for text in seen))
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("status", "wanted"), [("running", 409), ("finished", 409), ("confirmed", 200)]
)
def test_a_server_that_is_being_moved_is_not_pinned(cloud: Cloud, status: str, wanted: int) -> None:
    """Where it will be is not known yet; giving its pin up is fine."""
    server = cloud.create()
    cloud.rest(server)
    add_migration(cloud, "live-migration", status, server_id=server)
    put = [
        cloud.call(
            "PUT", f"/servers/{server}", {"server": {"pinned_availability_zone": zone}}, mv="2.104"
        ).status_code
        for zone in ("nova", None)
    ]
    assert put == [wanted, 200]
