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
    add_host2_and_large_flavor,
    create_resting_server,
    find_action_and_migration,
)
from tests.outbox_events import read_outbox

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
    return [migration["uuid"] for migration in list_migrations(cloud, query, **more)["migrations"]]


# --- the list ---
@pytest.mark.parametrize(
    ("mv", "new_fields"),
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
def test_migrations_have_the_fields_of_each_microversion(
    cloud: Cloud, mv: str, new_fields: set[str]
) -> None:
    server = ids.new()
    add_migration(cloud, server_id=server)
    [migration] = list_migrations(cloud, mv=mv)["migrations"]
    assert set(migration) == FIRST_FIELDS | new_fields
    assert {**migration, **dict.fromkeys(new_fields)} == {
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
        **dict.fromkeys(new_fields),
    }


def test_migration_shows_flavor_numbers_after_flavors_are_deleted(cloud: Cloud) -> None:
    numbers = {row.flavorid: row.id for row in cloud.rows(schema.flavors)}
    server = cloud.create()
    cloud.set_state(server)
    resize = {"resize": {"flavorRef": "2"}}
    assert cloud.call("POST", f"/servers/{server}/action", resize).status_code == 202
    for flavor in ("1", "2"):
        assert cloud.call("DELETE", f"/flavors/{flavor}", token="admin").status_code == 202
    [migration] = list_migrations(cloud)["migrations"]
    assert (migration["old_instance_type_id"], migration["new_instance_type_id"]) == (
        numbers["1"],
        numbers["2"],
    )


def test_migration_shows_null_for_unknown_destination_and_flavor(cloud: Cloud) -> None:
    add_migration(cloud, dest_host=None, new_flavor={"id": "gone", "name": "m1.gone"})
    [migration] = list_migrations(cloud)["migrations"]
    assert [
        migration[name]
        for name in ("dest_compute", "dest_node", "dest_host", "new_instance_type_id")
    ] == [None] * 4


@pytest.mark.parametrize(
    ("kind", "status", "has_links"),
    [
        ("live-migration", "running", True),
        ("live-migration", "queued", True),
        ("live-migration", "completed", False),
        ("live-migration", "accepted", False),
        ("evacuation", "pre-migrating", False),
        ("resize", "post-migrating", False),
    ],
)
def test_migration_has_links_only_while_live_migration_is_in_progress(
    cloud: Cloud, kind: str, status: str, has_links: bool
) -> None:
    server = ids.new()
    add_migration(cloud, kind, status, server_id=server)
    assert "links" not in list_migrations(cloud, mv="2.22")["migrations"][0]
    [migration] = list_migrations(cloud, mv="2.23")["migrations"]
    links = [
        {"rel": "self", "href": f"http://falconframework.org/v2.1/servers/{server}/migrations/1"},
        {"rel": "bookmark", "href": f"http://falconframework.org/servers/{server}/migrations/1"},
    ]
    assert migration.get("links") == (links if has_links else None)


def test_list_migrations_by_manager_shows_own_project_without_hosts(cloud: Cloud) -> None:
    own, _ = add_migration(cloud), add_migration(cloud, project_id=OTHER)
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
    [migration] = list_migrations(cloud, f"?project_id={PROJECT}", token="manager")["migrations"]
    assert (migration["uuid"], [migration[name] for name in HOST_FIELDS]) == (own, [None] * 5)
    assert (
        cloud.call(
            "GET", f"/os-migrations?project_id={PROJECT}", mv="2.58", token="manager"
        ).status_code
        == 403
    )
    assert len(list_uuids(cloud)) == 2


@pytest.mark.parametrize(
    ("query", "expected"),
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
def test_list_migrations_filters_and_sorts_newest_first(
    cloud: Cloud, query: str, expected: str
) -> None:
    server = ids.new()
    names = {
        add_migration(cloud, server_id=server): "a",
        add_migration(
            cloud, "live-migration", "error", 2, dest_host="host3", project_id=OTHER
        ): "b",
        add_migration(
            cloud, "evacuation", "done", 3, source_host="host2", dest_host="host3", user_id="u2"
        ): "c",
    }
    uuids = list_uuids(cloud, "?" + query.replace("INSTANCE", server))
    assert "".join(sorted(names[uuid] for uuid in uuids)) == expected
    assert uuids == sorted(uuids, key=lambda uuid: names[uuid], reverse=True), "newest first"


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
def test_list_migrations_with_invalid_query_returns_400(cloud: Cloud, mv: str, query: str) -> None:
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
def test_list_migrations_ignores_later_and_unknown_parameters_before_2_59(
    cloud: Cloud, mv: str, query: str
) -> None:
    add_migration(cloud), add_migration(cloud)
    assert len(list_migrations(cloud, f"?{query}", mv=mv)["migrations"]) == 2


def test_list_migrations_pages_with_limit_and_marker(cloud: Cloud) -> None:
    uuids = [add_migration(cloud, at=number // 2) for number in range(7)][::-1]
    assert list_uuids(cloud) == uuids[:5], "the operator's limit"
    first = list_migrations(cloud, "?limit=3&status=finished", mv="2.59")
    assert [migration["uuid"] for migration in first["migrations"]] == uuids[:3]
    [link] = first["migrations_links"]
    assert link["href"].endswith(f"/v2.1/os-migrations?limit=3&status=finished&marker={uuids[2]}")
    rest = list_migrations(cloud, f"?limit=5&marker={uuids[2]}", mv="2.59")
    assert (
        [migration["uuid"] for migration in rest["migrations"]],
        "migrations_links" in rest,
    ) == (
        uuids[3:],
        False,
    )
    assert list_migrations(cloud, "?limit=0") == {"migrations": []}
    assert "migrations_links" not in list_migrations(cloud, mv="2.58")


# --- migrations of a server ---
@pytest.fixture
def migrating_server(cloud: Cloud) -> str:
    """Return a server with a live migration that runs at host1."""
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
    set_status(cloud, server)
    return server


def set_status(cloud: Cloud, server: str, status: str = "running", **values: Any) -> None:
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


@pytest.mark.parametrize(
    ("mv", "more"),
    [
        ("2.23", set()),
        ("2.58", set()),
        ("2.59", {"uuid"}),
        ("2.79", {"uuid"}),
        ("2.80", {"uuid", "user_id", "project_id"}),
        ("2.104", {"uuid", "user_id", "project_id"}),
    ],
)
def test_server_migration_shows_progress_of_live_migration(
    cloud: Cloud, migrating_server: str, mv: str, more: set[str]
) -> None:
    set_status(
        cloud,
        migrating_server,
        progress={
            "memory_total": 300,
            "memory_processed": 200,
            "memory_remaining": 100,
            "disk_total": 0,
        },
    )
    [listed_migration] = cloud.call(
        "GET", f"/servers/{migrating_server}/migrations", mv=mv, token="admin"
    ).json["migrations"]
    migration = cloud.call(
        "GET", f"/servers/{migrating_server}/migrations/1", mv=mv, token="admin"
    ).json["migration"]
    assert migration == listed_migration
    common = FIRST_FIELDS - {"instance_uuid", "old_instance_type_id", "new_instance_type_id"}
    assert set(migration) == common | BYTES | more | {"server_uuid"}
    assert (migration["server_uuid"], migration["source_compute"], migration["dest_compute"]) == (
        migrating_server,
        "host1",
        "host2",
    )
    assert [
        migration[f"memory_{count}_bytes"] for count in ("total", "processed", "remaining")
    ] == [300, 200, 100]
    assert [migration[f"disk_{count}_bytes"] for count in ("total", "processed", "remaining")] == [
        None
    ] * 3


def test_server_migrations_hide_hosts_from_managers_and_refuse_users(
    cloud: Cloud, migrating_server: str
) -> None:
    [migration] = cloud.call(
        "GET", f"/servers/{migrating_server}/migrations", mv="2.23", token="manager"
    ).json["migrations"]
    assert [migration[name] for name in HOST_FIELDS] == [None] * 5
    path = f"/servers/{migrating_server}/migrations"
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
def test_server_migration_not_live_or_not_in_progress_returns_404(
    cloud: Cloud, migrating_server: str, kind: str, status: str, text: str
) -> None:
    set_status(cloud, migrating_server, status, type=kind)
    path = f"/servers/{migrating_server}/migrations"
    assert cloud.call("GET", path, mv="2.23", token="admin").json == {"migrations": []}
    assert cloud.call("GET", f"{path}/1", mv="2.23", token="admin").json["itemNotFound"][
        "message"
    ] == text.format(migrating_server)


@pytest.mark.parametrize("number", ["2", "x", "9" * 30, "-1"])
def test_show_or_abort_server_migration_of_unknown_number_returns_404(
    cloud: Cloud, migrating_server: str, number: str
) -> None:
    path = f"/servers/{migrating_server}/migrations/{number}"
    assert cloud.call("GET", path, mv="2.23", token="admin").status_code == 404
    answer = cloud.call("DELETE", path, mv="2.24", token="admin")
    assert (
        answer.json["itemNotFound"]["message"]
        == f"Migration {number} not found for instance {migrating_server}"
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


# --- abort and force complete ---
def request_control(
    cloud: Cloud, server: str, control: str, mv: str = "2.65", token: str = "admin"
) -> Any:
    path = f"/servers/{server}/migrations/1"
    if control == "abort":
        return cloud.call("DELETE", path, mv=mv, token=token)
    return cloud.call("POST", path + "/action", {"force_complete": None}, mv=mv, token=token)


@pytest.mark.parametrize(
    ("control", "mv", "journal"),
    [
        ("abort", "2.24", "live_migration_cancel"),
        ("complete", "2.22", "live_migration_force_complete"),
    ],
)
@pytest.mark.parametrize("token", ["manager", "admin"])
def test_abort_and_force_complete_are_stored_and_sent_to_host_at_once(
    cloud: Cloud, migrating_server: str, control: str, mv: str, journal: str, token: str
) -> None:
    answer = request_control(cloud, migrating_server, control, mv, token)
    assert (answer.status_code, answer.content) == (202, b"")
    [move] = cloud.rows(schema.migrations)
    action, _ = find_action_and_migration(cloud, migrating_server)
    session = cloud.store.read(lambda tx: hosts.sessions(tx, ["host1"]))["host1"]
    assert move.requested_control == control
    assert cloud.agents.commands == [
        (
            "host1",
            control_command(
                CommandKey(CommandKind.DO, action.id, "migrate", 2),
                Control(control),
                server=migrating_server,
                fence=action.fence,
                session=session,
            ),
        )
    ]
    assert cloud.agents.commands[0][1] in cloud.store.read(
        lambda tx: lost_commands.control_commands(tx, WORKFLOWS, "host1", session)
    ), "repeated"
    log = cloud.call("GET", f"/servers/{migrating_server}/os-instance-actions", mv="2.58").json[
        "instanceActions"
    ]
    assert [item["action"] for item in log] == [journal, "live-migration", "create"]


@pytest.mark.parametrize(("control", "name"), [("abort", "abort"), ("complete", "force_complete")])
def test_migration_abort_and_force_complete_emit_start_notification(
    cloud: Cloud, migrating_server: str, control: str, name: str
) -> None:
    cloud.store.notify_with(NotificationSettings("api1"))
    assert request_control(cloud, migrating_server, control).status_code == 202
    [row] = read_outbox(cloud.store)
    assert (row.event, row.key) == (f"instance.live_migration_{name}.start", migrating_server)
    assert (row.publisher, row.body["object"]["task_state"]) == ("nova-compute:host1", "migrating")
    assert row.body["request"]["id"].startswith("req-")


def test_migration_abort_is_stored_when_host_is_silent(cloud: Cloud, migrating_server: str) -> None:
    cloud.agents.silent = {"host1"}
    assert request_control(cloud, migrating_server, "abort").status_code == 202
    assert cloud.rows(schema.migrations)[0].requested_control == "abort"


@pytest.mark.parametrize(
    ("status", "mv", "control", "expected"),
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
def test_migration_abort_or_force_complete_returns_400_unless_status_allows(
    cloud: Cloud, migrating_server: str, status: str, mv: str, control: str, expected: int
) -> None:
    set_status(cloud, migrating_server, status)
    response = request_control(cloud, migrating_server, control, mv)
    assert response.status_code == expected
    assert len(cloud.agents.commands) == (expected == 202)
    if expected == 400:
        description = {"abort": "abort live migration", "complete": "force complete"}[control]
        assert response.json["badRequest"]["message"] == (
            f"Migration 1 state of instance {migrating_server} is {status}. "
            f"Cannot {description} while the migration is in this state."
        )
        assert cloud.rows(schema.migrations)[0].requested_control is None


def test_migration_abort_before_host_has_command_is_stored_but_not_sent(
    cloud: Cloud, migrating_server: str
) -> None:
    set_status(cloud, migrating_server, "preparing")
    action, _ = find_action_and_migration(cloud, migrating_server)
    cloud.change(
        schema.actions, schema.actions.c.id == action.id, state="due", step="prepare", host=None
    )
    assert request_control(cloud, migrating_server, "abort").status_code == 202
    assert (cloud.agents.commands, cloud.rows(schema.migrations)[0].requested_control) == (
        [],
        "abort",
    )


def test_force_complete_after_abort_returns_400(cloud: Cloud, migrating_server: str) -> None:
    assert request_control(cloud, migrating_server, "complete").status_code == 202
    assert request_control(cloud, migrating_server, "abort").status_code == 202
    assert (
        request_control(cloud, migrating_server, "complete")
        .json["badRequest"]["message"]
        .endswith("is being aborted.")
    )
    assert cloud.rows(schema.migrations)[0].requested_control == "abort"


@pytest.mark.parametrize(
    ("control", "name"), [("abort", "abort live migration"), ("complete", "force_complete")]
)
def test_abort_and_force_complete_are_refused_by_role_lock_or_task_state(
    cloud: Cloud, migrating_server: str, control: str, name: str
) -> None:
    statuses = {
        token: request_control(cloud, migrating_server, control, token=token).status_code
        for token in ("user", "reader", "stranger")
    }
    assert statuses == {"user": 403, "reader": 403, "stranger": 404}
    action, _ = find_action_and_migration(cloud, migrating_server)
    cloud.set_state(
        migrating_server, task_state="migrating", action=action.id, locked=True, locked_by="admin"
    )
    assert (
        request_control(cloud, migrating_server, control, token="manager")
        .json["conflictingRequest"]["message"]
        .endswith("is locked")
    )
    cloud.set_state(migrating_server)
    assert request_control(cloud, migrating_server, control).json["conflictingRequest"][
        "message"
    ] == (f"Cannot '{name}' instance {migrating_server} while it is in task_state None")
    assert (cloud.agents.commands, cloud.rows(schema.migrations)[0].requested_control) == ([], None)


@pytest.mark.parametrize(
    "body", [{"force_complete": {}}, {}, {"abort": None}, {"force_complete": None, "more": 1}]
)
def test_migration_action_with_invalid_body_returns_400(
    cloud: Cloud, migrating_server: str, body: Any
) -> None:
    answer = cloud.call(
        "POST", f"/servers/{migrating_server}/migrations/1/action", body, mv="2.22", token="admin"
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
def test_server_migration_operations_return_404_before_their_version(
    cloud: Cloud, migrating_server: str, method: str, path: str, first: str
) -> None:
    body = {"force_complete": None} if method == "POST" else None
    before = f"2.{int(first[2:]) - 1}"
    statuses = [
        cloud.call(
            method, f"/servers/{migrating_server}/migrations{path}", body, mv=mv, token="admin"
        ).status_code
        for mv in (before, first)
    ]
    assert statuses in ([404, 200], [404, 202])


def test_list_migrations_executes_one_select_for_any_number_of_rows(cloud: Cloud) -> None:
    statements: list[str] = []
    sa.event.listen(
        cloud.store.engine,
        "before_cursor_execute",
        lambda *arguments: statements.append(arguments[2]),
    )
    counts = []
    for _ in range(2):
        add_migration(cloud, at=cloud.store.read(lambda tx: tx.scalar(sa.select(now()))) // SECOND)
        statements.clear()
        list_migrations(cloud)
        counts.append(sum(text.startswith("SELECT") for text in statements))
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("status", "expected"), [("running", 409), ("finished", 409), ("confirmed", 200)]
)
def test_update_pinned_zone_during_open_migration_returns_409(
    cloud: Cloud, status: str, expected: int
) -> None:
    """The future zone of the server is still open. Removing the pin is accepted."""
    server = cloud.create()
    cloud.set_state(server)
    add_migration(cloud, "live-migration", status, server_id=server)
    statuses = [
        cloud.call(
            "PUT", f"/servers/{server}", {"server": {"pinned_availability_zone": zone}}, mv="2.104"
        ).status_code
        for zone in ("nova", None)
    ]
    assert statuses == [expected, 200]
