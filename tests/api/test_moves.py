# SPDX-License-Identifier: Apache-2.0
"""Resize, confirm, revert and cold migration through the API: stored arguments and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain.models import Flavor, ImageRef
from common.store import schema
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.api.moves import (
    KEY,
    LARGE,
    TINY,
    act,
    add_host2_and_large_flavor,
    create_resting_server,
    find_action_and_migration,
    finish_resize,
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


# --- resize ---
def test_resize_begins_action_and_records_migration(cloud: Cloud, server: str) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    action, move = find_action_and_migration(cloud, server)
    [row] = cloud.rows(schema.servers)
    assert (action.workflow, action.name, requested_args(action.args)) == (
        "resize",
        "resize",
        {"host": None, "forced": False},
    )
    assert (action.args["was"], action.args["source"], action.args["migration"]) == (
        "active",
        "host1",
        move.uuid,
    )
    assert (move.type, move.status, move.source_host, move.dest_host) == (
        "resize",
        "accepted",
        "host1",
        None,
    )
    assert [flavor["name"] for flavor in (move.old_flavor, move.new_flavor)] == [
        "m1.small",
        "m1.large",
    ]
    assert (row.task_state, row.flavor["name"], row.flavor_id) == ("resize_prep", "m1.small", "2")
    assert (row.vcpus, row.memory_mb, row.disk_gb) == (4, 8192, 20), (
        "the quota counts the larger of both"
    )
    assert cloud.call("GET", f"/servers/{server}").json["server"]["status"] == "RESIZE"


def test_resize_to_smaller_memory_keeps_larger_value_for_quota(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)
    [row] = cloud.rows(schema.servers)
    assert (row.vcpus, row.memory_mb) == (2, 2048)


def test_resize_with_disk_config_disabled_by_image_returns_400(cloud: Cloud, server: str) -> None:
    image = {"id": "i", "properties": {"auto_disk_config": "disabled"}}
    cloud.change(schema.servers, schema.servers.c.id == server, image=image)
    body = {"flavorRef": LARGE, "OS-DCF:diskConfig": "AUTO"}
    assert "automatic disk resize" in act(cloud, server, "resize", body, status=400)
    assert cloud.rows(schema.servers)[0].disk_config == "MANUAL"


def test_resize_stores_disk_config_of_request(cloud: Cloud, server: str) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE, "OS-DCF:diskConfig": "AUTO"}, status=202)
    assert cloud.rows(schema.servers)[0].disk_config == "AUTO"
    assert act(
        cloud, server, "resize", {"flavorRef": LARGE, "OS-DCF:diskConfig": "BIG"}, status=400
    )


@pytest.mark.parametrize(
    ("flavor", "text"),
    [
        ("2", "When resizing, instances must change flavor!"),
        ("nowhere", "Flavor nowhere could not be found."),
        (
            TINY,
            "flavorRef: Server disk was unable to be resized because: the root disk cannot "
            "change from 20 GiB to 1 GiB; ",
        ),
        (
            "none",
            "flavorRef: Server disk was unable to be resized because: the root disk cannot change to a flavor "
            "without a disk; ",
        ),
        ("odd", "flavor m1.odd: extra spec hw:cpu_policy"),
        ("hidden", "Flavor hidden could not be found."),
        (None, "Invalid input for field/attribute flavorRef"),
        ("", "Invalid input for field/attribute flavorRef"),
    ],
)
def test_resize_to_unusable_flavor_returns_400(
    cloud: Cloud, server: str, flavor: Any, text: str
) -> None:
    cloud.add_flavor(Flavor("none", "m1.none", 1, 4096, 0))
    cloud.add_flavor(
        Flavor("odd", "m1.odd", 1, 4096, 40, extra_specs={"hw:cpu_policy": "sometimes"})
    )
    cloud.add_flavor(Flavor("hidden", "m1.hidden", 1, 4096, 40))
    cloud.change(schema.flavors, schema.flavors.c.flavorid == "hidden", is_public=False)
    message = act(cloud, server, "resize", {"flavorRef": flavor}, status=400)
    assert message.startswith(text) or ("hw:cpu_policy" in text and "hw:cpu_policy" in message)
    assert (len(cloud.rows(schema.actions)), cloud.rows(schema.migrations)) == (1, [])
    assert cloud.rows(schema.servers)[0].action is None


def test_resize_to_private_flavor_needs_access_of_project(cloud: Cloud, server: str) -> None:
    cloud.change(schema.flavors, schema.flavors.c.flavorid == LARGE, is_public=False)
    [number] = [row.id for row in cloud.rows(schema.flavors) if row.flavorid == LARGE]
    with cloud.store.begin() as tx:
        tx.execute(sa.insert(schema.flavor_access), {"flavor_id": number, "project_id": OTHER})
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=400)
    cloud.change(
        schema.flavor_access, schema.flavor_access.c.flavor_id == number, project_id=PROJECT
    )
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)


def test_resize_to_recreated_flavor_of_other_size_is_accepted(cloud: Cloud, server: str) -> None:
    cloud.change(schema.flavors, schema.flavors.c.flavorid == "2", memory_mb=4096)
    act(cloud, server, "resize", {"flavorRef": "2"}, status=202)


def test_resize_to_less_memory_checks_min_ram_of_existing_image(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))
    cloud.images.images[IMAGE] = Image(ImageRef(IMAGE), min_ram=1024, status="deactivated")
    message = act(cloud, server, "resize", {"flavorRef": "thin"}, status=400)
    assert message == "Flavor's memory is too small for requested image."
    cloud.images.down = True
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=503)
    cloud.images.down = False
    del cloud.images.images[IMAGE]
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)


@pytest.mark.parametrize("flavor", ["thin", LARGE])
def test_resize_returns_409_when_another_resize_ends_during_its_checks(
    cloud: Cloud, server: str, flavor: str
) -> None:
    """Otherwise the server would get the flavor that it already has, or a smaller disk."""
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))

    def resize_meanwhile() -> None:
        act(cloud, server, "resize", {"flavorRef": flavor}, status=202)
        new = find_action_and_migration(cloud, server)[0].args["new_flavor"]
        cloud.change(schema.migrations, schema.migrations.c.server_id == server, status="confirmed")
        cloud.set_state(server, flavor=new, flavor_id=new["id"])

    cloud.run_after_statement("SELECT flavors", resize_meanwhile)
    assert "try again" in act(cloud, server, "resize", {"flavorRef": "thin"}, status=409)
    assert [row.status for row in cloud.rows(schema.migrations)] == ["confirmed"]
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=400)


def test_resize_over_quota_of_project_or_servers_user_returns_403(
    cloud: Cloud, server: str
) -> None:
    quota = {"quota_set": {"ram": 8191, "cores": 4}}
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", quota, token="admin")
    for token in ("user", "admin"):
        message = act(cloud, server, "resize", {"flavorRef": LARGE}, token=token, status=403)
        assert (
            message == "Quota exceeded for ram: Requested 6144, but already used 2048 of 8191 ram"
        )
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"ram": 8192}}, token="admin")
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}?user_id=u1", {"quota_set": {"cores": 3}}, token="admin"
    )
    message = act(cloud, server, "resize", {"flavorRef": LARGE}, status=403)
    assert message == "Quota exceeded for cores: Requested 3, but already used 1 of 3 cores"
    assert (cloud.rows(schema.migrations), cloud.rows(schema.servers)[0].action) == ([], None)
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}?user_id=u1", {"quota_set": {"cores": 4}}, token="admin"
    )
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    assert (
        "ram"
        in cloud.call(
            "POST", "/servers", {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": TINY}}
        ).json["forbidden"]["message"]
    )


def test_resize_to_smaller_flavor_needs_no_quota(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 1, 512, 20))
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"ram": 100, "cores": 0}}, token="admin"
    )
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)


@pytest.mark.parametrize(("key", "body"), [("resize", {"flavorRef": LARGE}), ("migrate", None)])
def test_resize_and_migrate_from_host_down_return_409(
    cloud: Cloud, server: str, key: str, body: Any
) -> None:
    mark_host_down(cloud, "host1")
    message = act(cloud, server, key, body, token="admin", status=409)
    assert message.startswith(
        f"Instance {server} is on a host that is down; try again when it is up."
    )
    assert cloud.rows(schema.migrations) == []


# --- confirm and revert ---
@pytest.mark.parametrize(
    ("key", "workflow", "status", "task"),
    [
        ("confirmResize", "confirm_resize", 204, None),
        ("revertResize", "revert_resize", 202, "resize_reverting"),
    ],
)
def test_confirm_and_revert_in_verify_resize_begin_their_workflows(
    cloud: Cloud, server: str, key: str, workflow: str, status: int, task: str | None
) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    act(cloud, server, key, status=409)
    finish_resize(cloud, server)
    response = cloud.call("GET", f"/servers/{server}", mv="2.96", token="admin").json["server"]
    assert (
        response["status"],
        response["flavor"]["original_name"],
        response["OS-EXT-SRV-ATTR:host"],
    ) == (
        "VERIFY_RESIZE",
        "m1.large",
        "host2",
    )
    woken = cloud.wakeup.count
    act(cloud, server, key, status=status)
    action, _ = find_action_and_migration(cloud, server)
    [move] = cloud.rows(schema.migrations)
    assert (action.workflow, cloud.rows(schema.servers)[0].task_state, cloud.wakeup.count) == (
        workflow,
        task,
        woken + 1,
    )
    assert {name: action.args[name] for name in ("migration", "source", "dest", "before")} == {
        "migration": move.uuid,
        "source": "host1",
        "dest": "host2",
        "before": "active",
    }
    assert act(cloud, server, "confirmResize").status_code == 409


@pytest.mark.parametrize("key", ["confirmResize", "revertResize"])
def test_confirm_and_revert_without_migration_return_400(
    cloud: Cloud, server: str, key: str
) -> None:
    cloud.set_state(server, "resized")
    assert act(cloud, server, key, status=400) == "Instance has not been resized."


@pytest.mark.parametrize(
    ("host", "forced", "text"),
    [
        (
            "host1",
            False,
            "The source host host1 of the resize is down. Revert when this host is up again, or confirm",
        ),
        (
            "host1",
            True,
            "The source host host1 of the resize is down. Revert when this host is up again, or confirm",
        ),
        (
            "host2",
            False,
            "The server's host host2 does not answer, and the server may still run there.",
        ),
        ("host2", True, None),
    ],
)
def test_revert_resize_needs_both_hosts_unless_destination_is_forced_down(
    cloud: Cloud, server: str, host: str, forced: bool, text: str | None
) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    finish_resize(cloud, server)
    mark_host_down(cloud, host, forced)
    if text is not None:
        assert act(cloud, server, "revertResize", token="admin", status=409).startswith(text)
        assert host not in act(cloud, server, "revertResize", status=409), (
            "users may not see host names"
        )
        assert find_action_id(cloud, server) is None
        act(cloud, server, "confirmResize", status=204)
    else:
        act(cloud, server, "revertResize", status=202)


def find_action_id(cloud: Cloud, server: str) -> Any:
    return next(row.action for row in cloud.rows(schema.servers) if row.id == server)


# --- migrate ---
@pytest.mark.parametrize(
    ("body", "mv", "host"),
    [
        (None, "2.1", None),
        ({"host": "host2"}, "2.55", None),
        (None, "2.56", None),
        ({}, "2.56", None),
        ({"host": None}, "2.56", None),
        ({"host": "host2"}, "2.56", "host2"),
    ],
)
def test_migrate_begins_action_with_host_of_request_from_2_56(
    cloud: Cloud, server: str, body: Any, mv: str, host: str | None
) -> None:
    act(cloud, server, "migrate", body, mv, "admin", status=202)
    action, move = find_action_and_migration(cloud, server)
    assert (action.name, action.workflow, move.type) == ("migrate", "migrate", "migration")
    assert requested_args(action.args) == {"host": host, "forced": False}
    assert move.old_flavor == move.new_flavor
    assert cloud.rows(schema.servers)[0].task_state == "resize_prep"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"host": "host1"}, 400, "Cannot migrate to the host where the server exists."),
        ({"host": "nowhere"}, 400, "Compute host nowhere could not be found."),
        ({"host": "a b"}, 400, "Invalid input for field/attribute host"),
        ({"colour": "red"}, 400, "Additional properties are not allowed"),
    ],
)
def test_migrate_with_invalid_host_or_field_returns_400(
    cloud: Cloud, server: str, body: Any, status: int, text: str
) -> None:
    assert text in act(cloud, server, "migrate", body, "2.56", "admin", status=status)
    assert cloud.rows(schema.migrations) == []


@pytest.mark.parametrize(
    ("key", "body"),
    [("migrate", {"host": None}), ("os-migrateLive", {"host": None, "block_migration": "auto"})],
)
def test_migrate_and_live_migrate_by_manager_return_403_if_host_is_named(
    cloud: Cloud, server: str, key: str, body: dict[str, Any]
) -> None:
    assert act(cloud, server, key, body, "2.56", status=403).startswith(
        "Policy doesn't allow os_compute_api:os-mig"
    )
    for host in ("host2", "nowhere"):
        message = act(cloud, server, key, {**body, "host": host}, "2.56", "manager", status=403)
        assert message.endswith(":host to be performed.")
    act(cloud, server, key, body, "2.56", "manager", status=202)
