# SPDX-License-Identifier: Apache-2.0
"""Locks and who undoes them, an admin's word about the state, shelving and where to, deletes that
can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.store import schema
from tests.api.conftest import IMAGE, Cloud


@pytest.fixture
def server(cloud: Cloud) -> str:
    made = cloud.create("vm")
    cloud.rest(made)
    return made


def act(
    cloud: Cloud, server: str, key: str, body: Any = None, mv: str = "2.1", token: str = "user"
) -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: body}, mv=mv, token=token)


def newest(cloud: Cloud) -> Any:
    return max(cloud.rows(schema.actions), key=lambda action: (action.created_at, action.fence))


def lock_of(cloud: Cloud) -> tuple[bool, str | None, str | None]:
    [row] = cloud.rows(schema.servers)
    return bool(row.locked), row.locked_by, row.locked_reason


# --- locks ---
def test_a_lock_and_its_reason(cloud: Cloud, server: str) -> None:
    assert act(cloud, server, "lock", {"locked_reason": "why"}, "2.73").status_code == 202
    assert lock_of(cloud) == (True, "owner", "why")
    shown = cloud.call("GET", f"/servers/{server}", mv="2.73").json["server"]
    assert (shown["locked"], shown["locked_reason"]) == (True, "why")
    for nothing in (None, {}):
        assert act(cloud, server, "unlock", nothing, "2.73").status_code == 202
        assert lock_of(cloud) == (False, None, None)
    assert act(cloud, server, "lock", {"locked_reason": "passed over"}, "2.72").status_code == 202
    assert lock_of(cloud) == (True, "owner", None)
    log = cloud.call("GET", f"/servers/{server}/os-instance-actions").json["instanceActions"]
    assert [action["action"] for action in log] == ["lock", "unlock", "unlock", "lock", "create"]


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("lock", {"locked_reason": ""}),
        ("lock", {"locked_reason": "x" * 256}),
        ("lock", {"reason": "x"}),
        ("lock", "x"),
        ("unlock", {"reason": "x"}),
        ("unlock", "x"),
    ],
)
def test_what_is_no_reason(cloud: Cloud, server: str, key: str, body: Any) -> None:
    assert act(cloud, server, key, body, "2.73").status_code == 400
    assert not lock_of(cloud)[0]
    assert act(cloud, server, key, body, "2.72").status_code == 202


def test_an_admin_s_lock_is_not_undone_by_the_owner(cloud: Cloud, server: str) -> None:
    assert act(cloud, server, "lock", token="admin").status_code == 202
    refused = act(cloud, server, "unlock")
    assert refused.json["forbidden"]["message"] == (
        "Policy doesn't allow os_compute_api:os-lock-server:unlock:unlock_override to be performed."
    )
    assert act(cloud, server, "lock").status_code == 202
    assert lock_of(cloud)[1] == "admin", "nor by locking it again"
    assert act(cloud, server, "unlock", token="admin").status_code == 202
    assert not lock_of(cloud)[0]
    act(cloud, server, "lock")
    assert act(cloud, server, "unlock", token="admin").status_code == 202


def test_an_operator_may_let_others_override(
    make_cloud: Callable[..., Cloud], tmp_path: Any
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('"os_compute_api:os-lock-server:unlock:unlock_override": "role:member"\n')
    cloud = make_cloud(policy_file=str(file))
    server = cloud.create()
    cloud.rest(server)
    act(cloud, server, "lock", token="admin")
    assert act(cloud, server, "unlock").status_code == 202
    assert not lock_of(cloud)[0]


def test_owner_who_locks_again_changes_nothing_of_an_admins_lock(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock", {"locked_reason": "audit"}, "2.73", token="admin")
    for reason in (None, {"locked_reason": "mine"}):
        assert act(cloud, server, "lock", reason, "2.73").status_code == 202
        assert lock_of(cloud) == (True, "admin", "audit")
    act(cloud, server, "lock", {"locked_reason": "longer"}, "2.73", token="admin")
    assert lock_of(cloud) == (True, "admin", "longer")


def test_owner_who_locks_again_keeps_the_first_reason(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock", {"locked_reason": "first"}, "2.73")
    act(cloud, server, "lock", {"locked_reason": "second"}, "2.73")
    assert lock_of(cloud) == (True, "owner", "first")


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("createImage", {"name": "i"}),
        ("createBackup", {"name": "b", "backup_type": "daily", "rotation": 1}),
    ],
)
def test_locked_server_can_be_backed_up(
    cloud: Cloud, server: str, key: str, body: dict[str, Any]
) -> None:
    act(cloud, server, "lock")
    assert act(cloud, server, key, body).status_code == 202


def test_a_lock_does_not_stop_admins_and_stops_delete(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock")
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 409
    assert act(cloud, server, "forceDelete").status_code == 409
    assert act(cloud, server, "os-stop", token="admin").status_code == 202
    assert cloud.call("DELETE", f"/servers/{server}", token="admin").status_code == 204


# --- a server that could not be built ---
@pytest.mark.parametrize("vm_state", ["error", "active"])
@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("os-stop", None),
        ("reboot", {"type": "HARD"}),
        ("rescue", None),
        ("rebuild", {"imageRef": IMAGE}),
    ],
)
def test_server_on_no_host_is_refused_at_once_what_is_done_on_a_host(
    cloud: Cloud, server: str, vm_state: str, key: str, body: Any
) -> None:
    cloud.rest(server, vm_state, host=None)
    before = len(cloud.rows(schema.actions))
    answer = act(cloud, server, key, body)
    assert answer.status_code == 409
    assert "it is on no host" in answer.json["conflictingRequest"]["message"]
    assert len(cloud.rows(schema.actions)) == before
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204


# --- an admin's word ---
@pytest.mark.parametrize("state", ["active", "error"])
def test_reset_state_ends_what_hangs(cloud: Cloud, server: str, state: str) -> None:
    act(cloud, server, "os-stop")
    stopping = newest(cloud)
    assert act(cloud, server, "os-resetState", {"state": state}).status_code == 403
    assert act(cloud, server, "os-resetState", {"state": state}, token="admin").status_code == 202
    [row] = cloud.rows(schema.servers)
    assert (row.vm_state, row.task_state, row.action) == (state, None, None)
    assert row.fence == stopping.fence + 1
    ended = next(action for action in cloud.rows(schema.actions) if action.id == stopping.id)
    assert ended.state == "superseded"


# --- unshelving somewhere ---
@pytest.fixture
def shelved(cloud: Cloud, server: str) -> str:
    cloud.rest(
        server,
        "shelved_offloaded",
        host=None,
        availability_zone=None,
        pinned_availability_zone="old",
    )
    return server


@pytest.mark.parametrize(
    ("mv", "body", "token", "args", "pinned"),
    [
        ("2.1", None, "user", {"zone": "old", "host": None, "unpin": False}, "old"),
        (
            "2.76",
            {"availability_zone": "passed over"},
            "user",
            {"zone": "old", "host": None, "unpin": False},
            "old",
        ),
        (
            "2.77",
            {"availability_zone": "nova"},
            "user",
            {"zone": "nova", "host": None, "unpin": False},
            "nova",
        ),
        ("2.91", {}, "user", {"zone": "old", "host": None, "unpin": False}, "old"),
        (
            "2.91",
            {"availability_zone": None},
            "user",
            {"zone": None, "host": None, "unpin": True},
            None,
        ),
        (
            "2.91",
            {"availability_zone": None, "host": "host1"},
            "admin",
            {"zone": None, "host": "host1", "unpin": True},
            None,
        ),
        (
            "2.91",
            {"availability_zone": "nova", "host": "host1"},
            "admin",
            {"zone": "nova", "host": "host1", "unpin": False},
            "nova",
        ),
    ],
)
def test_where_to(
    cloud: Cloud, shelved: str, mv: str, body: Any, token: str, args: Any, pinned: str | None
) -> None:
    assert act(cloud, shelved, "unshelve", body, mv, token).status_code == 202
    assert newest(cloud).args == {"was": "shelved_offloaded", "forced": False, **args}
    assert newest(cloud).workflow == "unshelve"
    assert cloud.rows(schema.servers)[0].pinned_availability_zone == pinned


@pytest.mark.parametrize(
    ("mv", "body", "token", "status"),
    [
        ("2.77", {}, "user", 400),
        ("2.77", {"availability_zone": None}, "user", 400),
        ("2.77", {"availability_zone": "moon"}, "user", 400),
        ("2.90", {"host": "host1"}, "admin", 400),
        ("2.91", {"host": "host1"}, "user", 403),
        ("2.91", {"host": "moon"}, "admin", 400),
        ("2.91", {"host": None}, "admin", 400),
        ("2.91", {"host": "host1", "availability_zone": "moon"}, "admin", 400),
    ],
)
def test_where_not(cloud: Cloud, shelved: str, mv: str, body: Any, token: str, status: int) -> None:
    assert act(cloud, shelved, "unshelve", body, mv, token).status_code == status
    assert cloud.rows(schema.servers)[0].action is None


def test_a_host_outside_the_zone_is_a_conflict(cloud: Cloud, shelved: str) -> None:
    cloud.add_host("host2")
    with cloud.store.begin() as tx:
        tx.execute(
            schema.aggregates.insert(),
            {
                "id": 1,
                "uuid": "u",
                "name": "a",
                "meta": {"availability_zone": "z"},
                "created_at": 1,
                "updated_at": 1,
            },
        )
        tx.execute(schema.aggregate_hosts.insert(), {"aggregate_id": 1, "host": "host2"})
    body = {"availability_zone": "z", "host": "host1"}
    assert act(cloud, shelved, "unshelve", body, "2.91", "admin").status_code == 409
    cloud.change(schema.servers, schema.servers.c.id == shelved, pinned_availability_zone="z")
    assert act(cloud, shelved, "unshelve", {"host": "host1"}, "2.91", "admin").status_code == 409
    assert act(cloud, shelved, "unshelve", {"host": "host2"}, "2.91", "admin").status_code == 202
    assert cloud.rows(schema.servers)[0].pinned_availability_zone == "z"


def test_a_server_that_is_still_on_its_host_goes_nowhere_else(cloud: Cloud, server: str) -> None:
    cloud.rest(server, "shelved")
    assert act(cloud, server, "unshelve", {"availability_zone": "nova"}, "2.77").status_code == 409
    assert act(cloud, server, "unshelve", None, "2.77").status_code == 202
    assert newest(cloud).workflow == "unshelve_here"


# --- deletes that can be undone ---
@pytest.fixture
def kind(make_cloud: Callable[..., Cloud]) -> Cloud:
    """A cloud that keeps what is deleted for a while."""
    return make_cloud(reclaim_interval=3600)


@pytest.mark.parametrize(
    ("vm_state", "values", "workflow"),
    [
        ("active", {}, "soft_delete"),
        ("stopped", {}, "soft_delete"),
        ("building", {}, "delete"),
        ("active", {"task_state": "rebooting"}, "delete"),
        ("soft-delete", {"task_state": "restoring"}, "delete"),
        ("error", {"launched_at": 1}, "soft_delete"),
        ("error", {}, "delete"),
        ("error", {"launched_at": 1, "host": None}, "delete"),
        ("error", {"launched_at": 1, "task_state": "x"}, "delete"),
        ("shelved_offloaded", {"launched_at": 1, "host": None}, "delete"),
        ("resized", {"launched_at": 1}, "delete"),
    ],
)
def test_what_rests_is_kept_and_all_else_goes_at_once(
    kind: Cloud, vm_state: str, values: dict[str, Any], workflow: str
) -> None:
    server = kind.create()
    kind.rest(server, vm_state, **values)
    assert kind.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest(kind).workflow == workflow


def test_delete_during_action_without_task_state_deletes_at_once(kind: Cloud) -> None:
    server = kind.create()
    running = newest(kind).id
    kind.rest(server, "active", action=running)
    assert kind.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest(kind).workflow == "delete"
    assert [row.state for row in kind.rows(schema.actions) if row.id == running] == ["superseded"]


def test_broken_server_that_cannot_be_kept_goes_at_next_delete(kind: Cloud) -> None:
    server = kind.create()
    kind.rest(server, "error", launched_at=1)
    assert kind.call("DELETE", f"/servers/{server}").status_code == 204
    kind.change(schema.actions, schema.actions.c.id == newest(kind).id, state="failed")
    kind.rest(server, "error", launched_at=1)
    assert kind.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest(kind).workflow == "delete"


def test_a_server_that_is_kept_stays_so(kind: Cloud) -> None:
    server = kind.create()
    kind.rest(server, "soft-delete")
    before = kind.rows(schema.servers), len(kind.rows(schema.actions))
    assert kind.call("DELETE", f"/servers/{server}").status_code == 204
    assert (kind.rows(schema.servers), len(kind.rows(schema.actions))) == before
    kind.rest(server, "soft-delete", locked=True)
    assert kind.call("DELETE", f"/servers/{server}").status_code == 409
    kind.rest(server, "soft-delete", locked=False)
    assert act(kind, server, "restore").status_code == 202
    assert newest(kind).workflow == "restore"
    kind.rest(server, "soft-delete")
    assert act(kind, server, "forceDelete").status_code == 202
    assert newest(kind).workflow == "delete"


def test_it_is_listed_to_who_asks(kind: Cloud) -> None:
    server = kind.create()
    kind.rest(server, "soft-delete")

    def listed(query: str, token: str = "user") -> list[str]:
        return [
            item["id"] for item in kind.call("GET", "/servers" + query, token=token).json["servers"]
        ]

    assert kind.call("GET", f"/servers/{server}").json["server"]["status"] == "SOFT_DELETED"
    assert listed("") == listed("?soft_deleted=true") == listed("?status=ACTIVE") == []
    assert listed("?status=SOFT_DELETED") == listed("?changes-since=2020-01-01") == [server]
    assert listed("?all_tenants=1", "admin") == []
    assert listed("?all_tenants=1&soft_deleted=true", "admin") == [server]


@pytest.mark.parametrize("letter", ["n", "\u6f22", "\U0001f600"])
def test_shelve_of_longest_server_name_gives_image_name_of_255(cloud: Cloud, letter: str) -> None:
    made = cloud.create(letter * 255)
    cloud.rest(made)
    assert act(cloud, made, "shelve").status_code == 202
    name = newest(cloud).args["name"]
    assert len(name) == 255
    assert name == letter * 247 + "-shelved"


def test_offloaded_server_shows_no_zone_and_keeps_its_pin(cloud: Cloud, server: str) -> None:
    cloud.rest(
        server,
        "shelved_offloaded",
        host=None,
        availability_zone=None,
        pinned_availability_zone="zA",
    )
    shown = cloud.call("GET", f"/servers/{server}", mv="2.96").json["server"]
    assert shown["OS-EXT-AZ:availability_zone"] == ""
    assert shown["pinned_availability_zone"] == "zA"
