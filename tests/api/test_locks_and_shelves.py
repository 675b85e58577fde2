# SPDX-License-Identifier: Apache-2.0
"""Lock and unlock, reset of states, unshelve destinations, and soft delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.store import schema
from tests.api.conftest import IMAGE, Cloud


@pytest.fixture
def server(cloud: Cloud) -> str:
    server_id = cloud.create("vm")
    cloud.set_state(server_id)
    return server_id


def act(
    cloud: Cloud, server: str, key: str, body: Any = None, mv: str = "2.1", token: str = "user"
) -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: body}, mv=mv, token=token)


def newest_action(cloud: Cloud) -> Any:
    return max(cloud.rows(schema.actions), key=lambda action: (action.created_at, action.fence))


def read_lock(cloud: Cloud) -> tuple[bool, str | None, str | None]:
    [row] = cloud.rows(schema.servers)
    return bool(row.locked), row.locked_by, row.locked_reason


# --- locks ---
def test_lock_stores_reason_from_2_73_and_unlock_clears_it(cloud: Cloud, server: str) -> None:
    assert act(cloud, server, "lock", {"locked_reason": "why"}, "2.73").status_code == 202
    assert read_lock(cloud) == (True, "owner", "why")
    view = cloud.call("GET", f"/servers/{server}", mv="2.73").json["server"]
    assert (view["locked"], view["locked_reason"]) == (True, "why")
    for body in (None, {}):
        assert act(cloud, server, "unlock", body, "2.73").status_code == 202
        assert read_lock(cloud) == (False, None, None)
    assert act(cloud, server, "lock", {"locked_reason": "passed over"}, "2.72").status_code == 202
    assert read_lock(cloud) == (True, "owner", None)
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
def test_lock_and_unlock_with_invalid_body_return_400_from_2_73(
    cloud: Cloud, server: str, key: str, body: Any
) -> None:
    assert act(cloud, server, key, body, "2.73").status_code == 400
    assert not read_lock(cloud)[0]
    assert act(cloud, server, key, body, "2.72").status_code == 202


def test_unlock_by_owner_returns_403_when_admin_locked_server(cloud: Cloud, server: str) -> None:
    assert act(cloud, server, "lock", token="admin").status_code == 202
    answer = act(cloud, server, "unlock")
    assert answer.json["forbidden"]["message"] == (
        "Policy doesn't allow os_compute_api:os-lock-server:unlock:unlock_override to be performed."
    )
    assert act(cloud, server, "lock").status_code == 202
    assert read_lock(cloud)[1] == "admin", "nor by locking it again"
    assert act(cloud, server, "unlock", token="admin").status_code == 202
    assert not read_lock(cloud)[0]
    act(cloud, server, "lock")
    assert act(cloud, server, "unlock", token="admin").status_code == 202


def test_unlock_override_policy_lets_owner_unlock_admins_lock(
    make_cloud: Callable[..., Cloud], tmp_path: Any
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('"os_compute_api:os-lock-server:unlock:unlock_override": "role:member"\n')
    cloud = make_cloud(policy_file=str(file))
    server = cloud.create()
    cloud.set_state(server)
    act(cloud, server, "lock", token="admin")
    assert act(cloud, server, "unlock").status_code == 202
    assert not read_lock(cloud)[0]


def test_lock_by_owner_does_not_change_lock_of_admin(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock", {"locked_reason": "audit"}, "2.73", token="admin")
    for reason in (None, {"locked_reason": "mine"}):
        assert act(cloud, server, "lock", reason, "2.73").status_code == 202
        assert read_lock(cloud) == (True, "admin", "audit")
    act(cloud, server, "lock", {"locked_reason": "longer"}, "2.73", token="admin")
    assert read_lock(cloud) == (True, "admin", "longer")


def test_second_lock_by_owner_keeps_first_reason(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock", {"locked_reason": "first"}, "2.73")
    act(cloud, server, "lock", {"locked_reason": "second"}, "2.73")
    assert read_lock(cloud) == (True, "owner", "first")


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("createImage", {"name": "i"}),
        ("createBackup", {"name": "b", "backup_type": "daily", "rotation": 1}),
    ],
)
def test_locked_server_accepts_create_image_and_create_backup(
    cloud: Cloud, server: str, key: str, body: dict[str, Any]
) -> None:
    act(cloud, server, "lock")
    assert act(cloud, server, key, body).status_code == 202


def test_locked_server_refuses_delete_by_owner_and_accepts_admin(cloud: Cloud, server: str) -> None:
    act(cloud, server, "lock")
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 409
    assert act(cloud, server, "forceDelete").status_code == 409
    assert act(cloud, server, "os-stop", token="admin").status_code == 202
    assert cloud.call("DELETE", f"/servers/{server}", token="admin").status_code == 204


# --- servers without a host ---
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
def test_stop_reboot_rescue_and_rebuild_of_server_without_host_return_409(
    cloud: Cloud, server: str, vm_state: str, key: str, body: Any
) -> None:
    cloud.set_state(server, vm_state, host=None)
    before = len(cloud.rows(schema.actions))
    answer = act(cloud, server, key, body)
    assert answer.status_code == 409
    assert "it is on no host" in answer.json["conflictingRequest"]["message"]
    assert len(cloud.rows(schema.actions)) == before
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204


# --- reset of states ---
@pytest.mark.parametrize("state", ["active", "error"])
def test_reset_state_supersedes_open_action_and_raises_fence(
    cloud: Cloud, server: str, state: str
) -> None:
    act(cloud, server, "os-stop")
    stopping = newest_action(cloud)
    assert act(cloud, server, "os-resetState", {"state": state}).status_code == 403
    assert act(cloud, server, "os-resetState", {"state": state}, token="admin").status_code == 202
    [row] = cloud.rows(schema.servers)
    assert (row.vm_state, row.task_state, row.action) == (state, None, None)
    assert row.fence == stopping.fence + 1
    superseded = next(action for action in cloud.rows(schema.actions) if action.id == stopping.id)
    assert superseded.state == "superseded"


# --- unshelve to a zone or host ---
@pytest.fixture
def shelved_server(cloud: Cloud, server: str) -> str:
    cloud.set_state(
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
def test_unshelve_stores_zone_host_and_pinned_zone_of_the_request(
    cloud: Cloud, shelved_server: str, mv: str, body: Any, token: str, args: Any, pinned: str | None
) -> None:
    assert act(cloud, shelved_server, "unshelve", body, mv, token).status_code == 202
    assert newest_action(cloud).args == {"was": "shelved_offloaded", "forced": False, **args}
    assert newest_action(cloud).workflow == "unshelve"
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
def test_unshelve_with_invalid_or_forbidden_zone_or_host_is_refused(
    cloud: Cloud, shelved_server: str, mv: str, body: Any, token: str, status: int
) -> None:
    assert act(cloud, shelved_server, "unshelve", body, mv, token).status_code == status
    assert cloud.rows(schema.servers)[0].action is None


def test_unshelve_to_host_outside_zone_returns_409(cloud: Cloud, shelved_server: str) -> None:
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
    assert act(cloud, shelved_server, "unshelve", body, "2.91", "admin").status_code == 409
    cloud.change(
        schema.servers, schema.servers.c.id == shelved_server, pinned_availability_zone="z"
    )
    assert (
        act(cloud, shelved_server, "unshelve", {"host": "host1"}, "2.91", "admin").status_code
        == 409
    )
    assert (
        act(cloud, shelved_server, "unshelve", {"host": "host2"}, "2.91", "admin").status_code
        == 202
    )
    assert cloud.rows(schema.servers)[0].pinned_availability_zone == "z"


def test_unshelve_of_not_offloaded_server_to_zone_returns_409(cloud: Cloud, server: str) -> None:
    cloud.set_state(server, "shelved")
    assert act(cloud, server, "unshelve", {"availability_zone": "nova"}, "2.77").status_code == 409
    assert act(cloud, server, "unshelve", None, "2.77").status_code == 202
    assert newest_action(cloud).workflow == "unshelve_here"


# --- deletes that can be undone ---
@pytest.fixture
def soft_delete_cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud that keeps deleted servers for an hour."""
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
def test_delete_is_soft_for_idle_active_stopped_or_launched_error_server(
    soft_delete_cloud: Cloud, vm_state: str, values: dict[str, Any], workflow: str
) -> None:
    server = soft_delete_cloud.create()
    soft_delete_cloud.set_state(server, vm_state, **values)
    assert soft_delete_cloud.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest_action(soft_delete_cloud).workflow == workflow


def test_delete_server_during_action_without_task_state_is_immediate(
    soft_delete_cloud: Cloud,
) -> None:
    cloud = soft_delete_cloud
    server = cloud.create()
    running = newest_action(cloud).id
    cloud.set_state(server, "active", action=running)
    assert cloud.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest_action(cloud).workflow == "delete"
    assert [row.state for row in cloud.rows(schema.actions) if row.id == running] == ["superseded"]


def test_delete_server_after_failed_soft_delete_is_immediate(soft_delete_cloud: Cloud) -> None:
    server = soft_delete_cloud.create()
    soft_delete_cloud.set_state(server, "error", launched_at=1)
    assert soft_delete_cloud.call("DELETE", f"/servers/{server}").status_code == 204
    soft_delete_cloud.change(
        schema.actions, schema.actions.c.id == newest_action(soft_delete_cloud).id, state="failed"
    )
    soft_delete_cloud.set_state(server, "error", launched_at=1)
    assert soft_delete_cloud.call("DELETE", f"/servers/{server}").status_code == 204
    assert newest_action(soft_delete_cloud).workflow == "delete"


def test_soft_deleted_server_ignores_delete_and_accepts_restore(soft_delete_cloud: Cloud) -> None:
    server = soft_delete_cloud.create()
    soft_delete_cloud.set_state(server, "soft-delete")
    before = soft_delete_cloud.rows(schema.servers), len(soft_delete_cloud.rows(schema.actions))
    assert soft_delete_cloud.call("DELETE", f"/servers/{server}").status_code == 204
    assert (
        soft_delete_cloud.rows(schema.servers),
        len(soft_delete_cloud.rows(schema.actions)),
    ) == before
    soft_delete_cloud.set_state(server, "soft-delete", locked=True)
    assert soft_delete_cloud.call("DELETE", f"/servers/{server}").status_code == 409
    soft_delete_cloud.set_state(server, "soft-delete", locked=False)
    assert act(soft_delete_cloud, server, "restore").status_code == 202
    assert newest_action(soft_delete_cloud).workflow == "restore"
    soft_delete_cloud.set_state(server, "soft-delete")
    assert act(soft_delete_cloud, server, "forceDelete").status_code == 202
    assert newest_action(soft_delete_cloud).workflow == "delete"


def test_list_servers_includes_soft_deleted_server_only_with_filter(
    soft_delete_cloud: Cloud,
) -> None:
    server = soft_delete_cloud.create()
    soft_delete_cloud.set_state(server, "soft-delete")

    def list_ids(query: str, token: str = "user") -> list[str]:
        return [
            item["id"]
            for item in soft_delete_cloud.call("GET", "/servers" + query, token=token).json[
                "servers"
            ]
        ]

    assert (
        soft_delete_cloud.call("GET", f"/servers/{server}").json["server"]["status"]
        == "SOFT_DELETED"
    )
    assert list_ids("") == list_ids("?soft_deleted=true") == list_ids("?status=ACTIVE") == []
    assert list_ids("?status=SOFT_DELETED") == list_ids("?changes-since=2020-01-01") == [server]
    assert list_ids("?all_tenants=1", "admin") == []
    assert list_ids("?all_tenants=1&soft_deleted=true", "admin") == [server]


@pytest.mark.parametrize("letter", ["n", "\u6f22", "\U0001f600"])
def test_shelve_cuts_image_name_of_longest_server_name_to_255_characters(
    cloud: Cloud, letter: str
) -> None:
    server = cloud.create(letter * 255)
    cloud.set_state(server)
    assert act(cloud, server, "shelve").status_code == 202
    name = newest_action(cloud).args["name"]
    assert len(name) == 255
    assert name == letter * 247 + "-shelved"


def test_shelved_offloaded_server_shows_empty_zone_and_pinned_zone(
    cloud: Cloud, server: str
) -> None:
    cloud.set_state(
        server,
        "shelved_offloaded",
        host=None,
        availability_zone=None,
        pinned_availability_zone="zA",
    )
    view = cloud.call("GET", f"/servers/{server}", mv="2.96").json["server"]
    assert view["OS-EXT-AZ:availability_zone"] == ""
    assert view["pinned_availability_zone"] == "zA"
