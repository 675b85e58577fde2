# SPDX-License-Identifier: Apache-2.0
"""Live migration, and evacuation of dead hosts, as the API accepts and refuses them: what is
frozen, what is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.domain import states
from common.security.vault import Vault
from common.store import schema
from common.store.servers import actions
from tests.api.conftest import Cloud
from tests.api.moves import KEY, LARGE, act, asked, begun, down, furnish, rested


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Two hosts, and flavors to choose from; servers are made of the second, m1.small."""
    return make_cloud(furnish, secret_key=KEY)


@pytest.fixture
def server(cloud: Cloud) -> str:
    return rested(cloud)


# --- live migration ---
OLD = {"host": None, "block_migration": "no", "disk_over_commit": False}


@pytest.mark.parametrize(
    ("mv", "given", "frozen"),
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
def test_a_live_migration_and_what_is_frozen_of_it(
    cloud: Cloud, server: str, mv: str, given: Any, frozen: Any
) -> None:
    act(cloud, server, "os-migrateLive", given, mv, "admin", status=202)
    action, move = begun(cloud, server)
    assert (action.name, action.workflow, move.type) == (
        "live-migration",
        "live_migrate",
        "live-migration",
    )
    assert asked(action.args) == dict(
        zip(("host", "forced", "block_migration"), frozen, strict=True)
    )
    assert cloud.call("GET", f"/servers/{server}").json["server"]["status"] == "MIGRATING"


@pytest.mark.parametrize(
    ("mv", "given", "text"),
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
def test_live_migrations_that_cannot_be(
    cloud: Cloud, server: str, mv: str, given: Any, text: str
) -> None:
    cloud.add_host("host3")
    down(cloud, "host3")
    assert text in act(cloud, server, "os-migrateLive", given, mv, "admin", status=400)
    assert cloud.rows(schema.migrations) == []


def test_live_migration_refuses_its_own_host_and_a_dead_source(cloud: Cloud, server: str) -> None:
    given = {"host": "host1", "block_migration": "auto"}
    said = act(cloud, server, "os-migrateLive", given, "2.68", "admin", status=400)
    assert said == f"Unable to migrate instance ({server}) to current host (host1)."
    down(cloud, "host1", forced=True)
    given = {"host": None, "block_migration": "auto"}
    said = [
        act(cloud, server, "os-migrateLive", given, "2.68", token, status=400)
        for token in ("admin", "manager")
    ]
    assert said == [
        "Compute service of host1 is unavailable at this time.",
        f"Compute service of instance {server} is unavailable at this time.",
    ]


@pytest.mark.parametrize(("mv", "status"), [("2.33", 400), ("2.34", 202)])
def test_before_2_34_the_answer_waits_for_what_the_hosts_say(
    make_cloud: Callable[..., Cloud], mv: str, status: int
) -> None:
    """The conductor is played by the wakeup message: it lets the action fail at once."""
    cloud = make_cloud(answer_timeout_seconds=20)
    furnish(cloud)
    server = rested(cloud)

    def wake(neighbours: bool = False) -> None:
        action, _ = begun(cloud, server)
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
    given = {"host": None, "block_migration": "auto"}
    answer = act(cloud, server, "os-migrateLive", given, mv, "admin", status=status)
    assert status == 202 or answer == "The CPUs of host2 are too old."


def test_the_step_that_is_waited_for_exists() -> None:
    assert ("live_migrate", "prepare") in states.EVENT_NAMES


# --- evacuate ---
EMPTY: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("mv", "given", "frozen"),
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
def test_an_evacuation_and_what_is_frozen_of_it(
    cloud: Cloud, server: str, mv: str, given: Any, frozen: Any
) -> None:
    down(cloud, "host1", forced=True)
    act(cloud, server, "evacuate", given, mv, "admin", status=200)
    action, move = begun(cloud, server)
    assert (action.name, action.workflow, move.type) == ("evacuate", "evacuate", "evacuation")
    assert asked(action.args) == dict(
        zip(("host", "forced", "stopped", "shared"), frozen, strict=True)
    )
    assert cloud.call("GET", f"/servers/{server}").json["server"]["status"] == "REBUILD"


@pytest.mark.parametrize(
    ("mv", "given", "told"),
    [
        ("2.13", {"onSharedStorage": False, "adminPass": "mine"}, {"adminPass": "mine"}),
        ("2.13", {"onSharedStorage": True}, {"adminPass": None}),
        ("2.14", {"adminPass": "mine"}, None),
        ("2.104", {"adminPass": "mine"}, None),
    ],
)
def test_the_password_is_told_before_2_14_only(
    cloud: Cloud, server: str, mv: str, given: Any, told: Any
) -> None:
    down(cloud, "host1", forced=True)
    answer = act(cloud, server, "evacuate", given, mv, "admin", status=200)
    assert (answer.json if answer.content else None) == told
    action, _ = begun(cloud, server)
    sealed = Vault(KEY).open(action.secrets) if action.secrets else {}
    assert sealed == ({} if given.get("onSharedStorage") else {"admin_pass": "mine"})
    assert "mine" not in str(action.args)


def test_a_password_is_made_where_none_is_given(cloud: Cloud, server: str) -> None:
    down(cloud, "host1", forced=True)
    answer = act(cloud, server, "evacuate", {"onSharedStorage": False}, "2.13", "admin", status=200)
    action, _ = begun(cloud, server)
    assert Vault(KEY).open(action.secrets) == {"admin_pass": answer.json["adminPass"]}


@pytest.mark.parametrize(
    ("mv", "given", "status", "text"),
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
def test_evacuations_that_cannot_be(
    cloud: Cloud, server: str, mv: str, given: Any, status: int, text: str
) -> None:
    down(cloud, "host1", forced=True)
    assert text in act(cloud, server, "evacuate", given, mv, "admin", status=status)
    assert cloud.rows(schema.migrations) == []


def test_silence_of_a_host_is_no_proof(cloud: Cloud, server: str) -> None:
    said = act(cloud, server, "evacuate", {}, "2.14", "admin", status=400)
    assert said == "Compute service of host1 is still in use."
    down(cloud, "host1")
    said = act(cloud, server, "evacuate", {}, "2.14", "admin", status=400)
    assert said.startswith("Host host1 is silent, which does not prove that its guests are dead")
    assert "[conductor] fencing_hook" in said
    assert said.endswith("openstack compute service set --down host1 nova-compute")
    [service] = [
        one
        for one in cloud.call("GET", "/os-services", mv="2.53", token="admin").json["services"]
        if one["host"] == "host1"
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


def test_evacuate_after_disable_and_forced_down_is_accepted_at_2_53(
    cloud: Cloud, server: str
) -> None:
    """The requests of Masakari's host recovery, with the word of Pacemaker's alert before it."""
    down(cloud, "host1")
    query = "/os-services?host=host1&binary=nova-compute"
    [service] = cloud.call("GET", query, mv="2.53", token="admin").json["services"]
    path = f"/os-services/{service['id']}"
    for body, expected in (
        ({"forced_down": True}, ("enabled", True)),
        ({"status": "disabled", "disabled_reason": "Masakari"}, ("disabled", True)),
    ):
        answer = cloud.call("PUT", path, body, mv="2.53", token="admin")
        assert answer.status_code == 200, answer.text
        shown = answer.json["service"]
        assert (shown["status"], shown["forced_down"]) == expected
    act(cloud, server, "evacuate", {}, "2.53", "admin", status=200)
    [migration] = cloud.rows(schema.migrations)
    assert migration.source_host == "host1"


def test_with_a_fencing_hook_silence_is_enough_to_ask_it(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(fencing=True)
    furnish(cloud)
    server = rested(cloud)
    assert act(cloud, server, "evacuate", {}, "2.14", "admin", status=400).endswith(
        "is still in use."
    )
    down(cloud, "host1")
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=200)


@pytest.mark.parametrize(
    ("key", "given", "mv"),
    [
        ("evacuate", {}, "2.14"),
        ("migrate", None, "2.1"),
        ("resize", {"flavorRef": LARGE}, "2.1"),
        ("os-migrateLive", {"host": None, "block_migration": "auto"}, "2.34"),
    ],
)
def test_what_is_on_no_host_is_not_moved(
    cloud: Cloud, server: str, key: str, given: Any, mv: str
) -> None:
    cloud.rest(server, host=None)
    said = act(cloud, server, key, given, mv, "admin", status=409)
    assert said == f"Instance {server} is on no host; there is nothing to move."


def test_an_evacuation_goes_over_what_hangs_on_the_dead_host(cloud: Cloud, server: str) -> None:
    act(cloud, server, "os-stop", status=202)
    before, _ = begun(cloud, server)
    down(cloud, "host1", forced=True)
    act(cloud, server, "evacuate", {}, "2.14", "admin", status=200)
    assert {row.state for row in cloud.rows(schema.actions) if row.id == before.id} == {
        "superseded"
    }
