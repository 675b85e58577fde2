# SPDX-License-Identifier: Apache-2.0
"""Live migration and evacuation of dead hosts through the API: stored arguments and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.domain import states
from common.security.vault import Vault
from common.store import schema
from common.store.servers import actions
from tests.api.conftest import Cloud
from tests.api.moves import (
    KEY,
    LARGE,
    act,
    add_host2_and_large_flavor,
    create_resting_server,
    find_action_and_migration,
    mark_host_down,
    requested_args,
)


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with two hosts and a large flavor. Servers have the flavor m1.small."""
    return make_cloud(add_host2_and_large_flavor, secret_key=KEY)


@pytest.fixture
def server(cloud: Cloud) -> str:
    return create_resting_server(cloud)


# --- live migration ---
OLD = {"host": None, "block_migration": "no", "disk_over_commit": False}


@pytest.mark.parametrize(
    ("mv", "body", "arguments"),
    [
        ("2.1", OLD, (None, False, False)),
        ("2.24", {**OLD, "host": "host2"}, ("host2", True, False)),
        ("2.25", {"host": None, "block_migration": "auto"}, (None, False, None)),
        ("2.29", {"host": "host2", "block_migration": True}, ("host2", True, True)),
        ("2.30", {"host": "host2", "block_migration": "True"}, ("host2", False, True)),
        (
            "2.67",
            {"host": "host2", "block_migration": "auto", "force": "true"},
            ("host2", True, None),
        ),
        (
            "2.67",
            {"host": "host2", "block_migration": "auto", "force": False},
            ("host2", False, None),
        ),
        ("2.68", {"host": "host2", "block_migration": "auto"}, ("host2", False, None)),
    ],
)
def test_live_migrate_begins_action_with_arguments_of_the_request(
    cloud: Cloud, server: str, mv: str, body: Any, arguments: Any
) -> None:
    act(cloud, server, "os-migrateLive", body, mv, "admin", status=202)
    action, move = find_action_and_migration(cloud, server)
    assert (action.name, action.workflow, move.type) == (
        "live-migration",
        "live_migrate",
        "live-migration",
    )
    assert requested_args(action.args) == dict(
        zip(("host", "forced", "block_migration"), arguments, strict=True)
    )
    assert cloud.call("GET", f"/servers/{server}").json["server"]["status"] == "MIGRATING"


@pytest.mark.parametrize(
    ("mv", "body", "text"),
    [
        (
            "2.1",
            {"host": None, "block_migration": True},
            "'disk_over_commit' is a required property",
        ),
        ("2.24", {**OLD, "block_migration": "auto"}, "block_migration"),
        ("2.25", OLD, "disk_over_commit"),
        ("2.29", {"host": None, "block_migration": True, "force": True}, "force"),
        ("2.68", {"host": "host2", "block_migration": True, "force": True}, "force"),
        ("2.30", {"block_migration": True}, "'host' is a required property"),
        (
            "2.30",
            {"host": None, "block_migration": True, "force": True},
            "Can't force to a non-provided destination",
        ),
        (
            "2.30",
            {"host": "nowhere", "block_migration": True},
            "Compute host nowhere could not be found.",
        ),
        (
            "2.30",
            {"host": "host3", "block_migration": True},
            "Compute service of host3 is unavailable at this time.",
        ),
        (
            "2.30",
            {"host": "host3", "block_migration": True, "force": True},
            "Compute service of host3 is unavailable at",
        ),
    ],
)
def test_live_migrate_with_invalid_body_or_destination_returns_400(
    cloud: Cloud, server: str, mv: str, body: Any, text: str
) -> None:
    cloud.add_host("host3")
    mark_host_down(cloud, "host3")
    assert text in act(cloud, server, "os-migrateLive", body, mv, "admin", status=400)
    assert cloud.rows(schema.migrations) == []


def test_live_migrate_to_current_host_or_from_forced_down_host_returns_400(
    cloud: Cloud, server: str
) -> None:
    body = {"host": "host1", "block_migration": "auto"}
    message = act(cloud, server, "os-migrateLive", body, "2.68", "admin", status=400)
    assert message == f"Unable to migrate instance ({server}) to current host (host1)."
    mark_host_down(cloud, "host1", forced=True)
    body = {"host": None, "block_migration": "auto"}
    message = [
        act(cloud, server, "os-migrateLive", body, "2.68", token, status=400)
        for token in ("admin", "manager")
    ]
    assert message == [
        "Compute service of host1 is unavailable at this time.",
        f"Compute service of instance {server} is unavailable at this time.",
    ]


@pytest.mark.parametrize(("mv", "status"), [("2.33", 400), ("2.34", 202)])
def test_live_migrate_returns_400_for_failed_host_check_before_2_34_only(
    make_cloud: Callable[..., Cloud], mv: str, status: int
) -> None:
    """A replacement of the wake-up plays the conductor and lets the action fail at once."""
    cloud = make_cloud(answer_timeout_seconds=20)
    add_host2_and_large_flavor(cloud)
    server = create_resting_server(cloud)

    def wake(service_calls: bool = False) -> None:
        action, _ = find_action_and_migration(cloud, server)
        cloud.store.write(
            lambda tx: actions.append(
                tx,
                [
                    {
                        "action_id": action.id,
                        "seq": 1,
                        "step": "prepare",
                        "attempt": 1,
                        "event": "failed",
                        "message": "The CPUs of host2 are too old.",
                    }
                ],
            )
        )
        cloud.change(schema.actions, schema.actions.c.id == action.id, state="failed")

    cloud.wakeup.wake = wake  # type: ignore[method-assign]
    body = {"host": None, "block_migration": "auto"}
    answer = act(cloud, server, "os-migrateLive", body, mv, "admin", status=status)
    assert status == 202 or answer == "The CPUs of host2 are too old."


def test_event_names_contain_step_prepare_of_live_migrate() -> None:
    assert ("live_migrate", "prepare") in states.EVENT_NAMES


# --- evacuate ---
EMPTY: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("mv", "body", "arguments"),
    [
        ("2.1", {"onSharedStorage": False}, (None, False, False, False)),
        ("2.13", {"onSharedStorage": "True", "host": "host2"}, ("host2", True, False, True)),
        ("2.14", EMPTY, (None, False, False, None)),
        ("2.28", {"host": "host2"}, ("host2", True, False, None)),
        ("2.29", {"host": "host2"}, ("host2", False, False, None)),
        ("2.67", {"host": "host2", "force": True}, ("host2", True, False, None)),
        ("2.94", {"host": "host2"}, ("host2", False, False, None)),
        ("2.95", {"host": "host2", "adminPass": "p"}, ("host2", False, True, None)),
    ],
)
def test_evacuate_begins_action_with_arguments_of_the_request(
    cloud: Cloud, server: str, mv: str, body: Any, arguments: Any
) -> None:
    mark_host_down(cloud, "host1", forced=True)
    act(cloud, server, "evacuate", body, mv, "admin", status=200)
    action, move = find_action_and_migration(cloud, server)
    assert (action.name, action.workflow, move.type) == ("evacuate", "evacuate", "evacuation")
    assert requested_args(action.args) == dict(
        zip(("host", "forced", "stopped", "shared"), arguments, strict=True)
    )
    assert cloud.call("GET", f"/servers/{server}").json["server"]["status"] == "REBUILD"


@pytest.mark.parametrize(
    ("mv", "body", "response"),
    [
        ("2.13", {"onSharedStorage": False, "adminPass": "mine"}, {"adminPass": "mine"}),
        ("2.13", {"onSharedStorage": True}, {"adminPass": None}),
        ("2.14", {"adminPass": "mine"}, None),
        ("2.104", {"adminPass": "mine"}, None),
    ],
)
def test_evacuate_returns_password_before_2_14_only(
    cloud: Cloud, server: str, mv: str, body: Any, response: Any
) -> None:
    mark_host_down(cloud, "host1", forced=True)
    answer = act(cloud, server, "evacuate", body, mv, "admin", status=200)
    assert (answer.json if answer.content else None) == response
    action, _ = find_action_and_migration(cloud, server)
    secrets = Vault(KEY).open(action.secrets) if action.secrets else {}
    assert secrets == ({} if body.get("onSharedStorage") else {"admin_pass": "mine"})
    assert "mine" not in str(action.args)


def test_evacuate_without_password_generates_one(cloud: Cloud, server: str) -> None:
    mark_host_down(cloud, "host1", forced=True)
    answer = act(cloud, server, "evacuate", {"onSharedStorage": False}, "2.13", "admin", status=200)
    action, _ = find_action_and_migration(cloud, server)
    assert Vault(KEY).open(action.secrets) == {"admin_pass": answer.json["adminPass"]}


@pytest.mark.parametrize(
    ("mv", "body", "status", "text"),
    [
        ("2.13", EMPTY, 400, "'onSharedStorage' is a required property"),
        ("2.14", {"onSharedStorage": True}, 400, "onSharedStorage"),
        ("2.28", {"force": True}, 400, "force"),
        ("2.29", {"force": True}, 400, "Can't force to a non-provided destination"),
        ("2.68", {"host": "host2", "force": True}, 400, "force"),
        (
            "2.13",
            {"onSharedStorage": True, "adminPass": "p"},
            400,
            "admin password can't be changed on existing disk",
        ),
        ("2.14", {"host": "nowhere"}, 404, "Compute host nowhere not found."),
        ("2.14", {"host": None}, 400, "Invalid input for field/attribute host"),
        ("2.14", {"host": "host1"}, 400, "The target host can't be the same one."),
    ],
)
def test_evacuate_with_invalid_body_or_destination_is_refused(
    cloud: Cloud, server: str, mv: str, body: Any, status: int, text: str
) -> None:
    mark_host_down(cloud, "host1", forced=True)
    assert text in act(cloud, server, "evacuate", body, mv, "admin", status=status)
    assert cloud.rows(schema.migrations) == []


def test_evacuate_from_silent_host_returns_400_until_forced_down(cloud: Cloud, server: str) -> None:
    message = act(cloud, server, "evacuate", {}, "2.14", "admin", status=400)
    assert message == "Compute service of host1 is still in use."
    mark_host_down(cloud, "host1")
    message = act(cloud, server, "evacuate", {}, "2.14", "admin", status=400)
    assert message.startswith("Host host1 is silent, which does not prove that its guests are dead")
    assert "[conductor] fencing_hook" in message
    assert message.endswith("openstack compute service set --down host1 nova-compute")
    [service] = [
        item
        for item in cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
        if item["host"] == "host1"
    ]
    path = f"/os-services/{service['id']}"
    assert (
        cloud.call("PUT", path, {"forced_down": True}, mv="2.53", token="admin").status_code == 200
    )
    assert (
        cloud.call("PUT", path, {"forced_down": False}, mv="2.53", token="admin").status_code == 200
    )
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=400)
    assert (
        cloud.call("PUT", path, {"forced_down": True}, mv="2.53", token="admin").status_code == 200
    )
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=200)


def test_evacuate_at_2_53_is_accepted_after_forced_down_and_disable(
    cloud: Cloud, server: str
) -> None:
    """These are the requests of Pacemaker's alert and of Masakari's host recovery."""
    mark_host_down(cloud, "host1")
    query = "/os-services?host=host1&binary=nova-compute"
    [service] = cloud.call("GET", query, mv="2.53", token="admin").json["services"]
    path = f"/os-services/{service['id']}"
    for body, expected in (
        ({"forced_down": True}, ("enabled", True)),
        ({"status": "disabled", "disabled_reason": "Masakari"}, ("disabled", True)),
    ):
        answer = cloud.call("PUT", path, body, mv="2.53", token="admin")
        assert answer.status_code == 200, answer.text
        response = answer.json["service"]
        assert (response["status"], response["forced_down"]) == expected
    act(cloud, server, "evacuate", {}, "2.53", "admin", status=200)
    [migration] = cloud.rows(schema.migrations)
    assert migration.source_host == "host1"


def test_evacuate_from_silent_host_is_accepted_with_fencing_hook(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(fencing=True)
    add_host2_and_large_flavor(cloud)
    server = create_resting_server(cloud)
    assert act(cloud, server, "evacuate", {}, "2.14", "admin", status=400).endswith(
        "is still in use."
    )
    mark_host_down(cloud, "host1")
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=200)


@pytest.mark.parametrize(
    ("key", "body", "mv"),
    [
        ("evacuate", {}, "2.14"),
        ("migrate", None, "2.1"),
        ("resize", {"flavorRef": LARGE}, "2.1"),
        ("os-migrateLive", {"host": None, "block_migration": "auto"}, "2.34"),
    ],
)
def test_moves_of_server_without_host_return_409(
    cloud: Cloud, server: str, key: str, body: Any, mv: str
) -> None:
    cloud.set_state(server, host=None)
    message = act(cloud, server, key, body, mv, "admin", status=409)
    assert message == f"Instance {server} is on no host; there is nothing to move."


def test_evacuate_from_forced_down_host_supersedes_open_action_of_server(
    cloud: Cloud, server: str
) -> None:
    act(cloud, server, "os-stop", status=202)
    before, _ = find_action_and_migration(cloud, server)
    mark_host_down(cloud, "host1", forced=True)
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=200)
    assert {row.state for row in cloud.rows(schema.actions) if row.id == before.id} == {
        "superseded"
    }
