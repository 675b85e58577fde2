# SPDX-License-Identifier: Apache-2.0
"""Resize, its end, and cold migration, as the API accepts and refuses them."""

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
    requested_args,
    find_action_and_migration,
    mark_host_down,
    finish_resize,
    add_host2_and_large_flavor,
    create_resting_server,
)


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Two hosts, and flavors to choose from; servers are made of the second, m1.small."""
    return make_cloud(add_host2_and_large_flavor, secret_key=KEY)


@pytest.fixture
def server(cloud: Cloud) -> str:
    return create_resting_server(cloud)


# --- resize ---
def test_a_resize_is_begun_and_its_move_is_on_record(cloud: Cloud, server: str) -> None:
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


def test_the_smaller_of_both_is_not_counted(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)
    [row] = cloud.rows(schema.servers)
    assert (row.vcpus, row.memory_mb) == (2, 2048)


def test_resize_with_disk_config_that_image_disables_returns_400(cloud: Cloud, server: str) -> None:
    image = {"id": "i", "properties": {"auto_disk_config": "disabled"}}
    cloud.change(schema.servers, schema.servers.c.id == server, image=image)
    given = {"flavorRef": LARGE, "OS-DCF:diskConfig": "AUTO"}
    assert "automatic disk resize" in act(cloud, server, "resize", given, status=400)
    assert cloud.rows(schema.servers)[0].disk_config == "MANUAL"


def test_the_disk_config_changes_where_it_is_given(cloud: Cloud, server: str) -> None:
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
            "flavorRef: Server disk was unable to be resized because: it cannot be changed from 20 GiB to 1 GiB; ",
        ),
        (
            "none",
            "flavorRef: Server disk was unable to be resized because: it cannot be changed to a flavor "
            "without a disk; ",
        ),
        ("odd", "flavor m1.odd: extra spec hw:cpu_policy"),
        ("hidden", "Flavor hidden could not be found."),
        (None, "Invalid input for field/attribute flavorRef"),
        ("", "Invalid input for field/attribute flavorRef"),
    ],
)
def test_flavors_that_a_server_cannot_get(
    cloud: Cloud, server: str, flavor: Any, text: str
) -> None:
    cloud.add_flavor(Flavor("none", "m1.none", 1, 4096, 0))
    cloud.add_flavor(
        Flavor("odd", "m1.odd", 1, 4096, 40, extra_specs={"hw:cpu_policy": "sometimes"})
    )
    cloud.add_flavor(Flavor("hidden", "m1.hidden", 1, 4096, 40))
    cloud.change(schema.flavors, schema.flavors.c.flavorid == "hidden", is_public=False)
    said = act(cloud, server, "resize", {"flavorRef": flavor}, status=400)
    assert said.startswith(text) or ("hw:cpu_policy" in text and "hw:cpu_policy" in said)
    assert (len(cloud.rows(schema.actions)), cloud.rows(schema.migrations)) == (1, [])
    assert cloud.rows(schema.servers)[0].action is None


def test_private_flavor_is_for_projects_with_access(cloud: Cloud, server: str) -> None:
    cloud.change(schema.flavors, schema.flavors.c.flavorid == LARGE, is_public=False)
    [number] = [row.id for row in cloud.rows(schema.flavors) if row.flavorid == LARGE]
    with cloud.store.begin() as tx:
        tx.execute(sa.insert(schema.flavor_access), {"flavor_id": number, "project_id": OTHER})
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=400)
    cloud.change(
        schema.flavor_access, schema.flavor_access.c.flavor_id == number, project_id=PROJECT
    )
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)


def test_resize_to_a_recreated_flavor_of_another_size(cloud: Cloud, server: str) -> None:
    cloud.change(schema.flavors, schema.flavors.c.flavorid == "2", memory_mb=4096)
    act(cloud, server, "resize", {"flavorRef": "2"}, status=202)


def test_resize_to_less_memory_checks_the_image_if_known(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))
    cloud.images.images[IMAGE] = Image(ImageRef(IMAGE), min_ram=1024, status="deactivated")
    said = act(cloud, server, "resize", {"flavorRef": "thin"}, status=400)
    assert said == "Flavor's memory is too small for requested image."
    cloud.images.down = True
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=503)
    cloud.images.down = False
    del cloud.images.images[IMAGE]
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)


@pytest.mark.parametrize("flavor", ["thin", LARGE])
def test_resize_during_the_image_lookup_is_checked_again(
    cloud: Cloud, server: str, flavor: str
) -> None:
    """Else it would get the flavor that it has by now, or a smaller disk."""
    cloud.add_flavor(Flavor("thin", "m1.thin", 2, 512, 20))

    def resized() -> None:
        act(cloud, server, "resize", {"flavorRef": flavor}, status=202)
        new = find_action_and_migration(cloud, server)[0].args["new_flavor"]
        cloud.change(schema.migrations, schema.migrations.c.server_id == server, status="confirmed")
        cloud.rest(server, flavor=new, flavor_id=new["id"])

    cloud.meanwhile("SELECT flavors", resized)
    assert "try again" in act(cloud, server, "resize", {"flavorRef": "thin"}, status=409)
    assert [row.status for row in cloud.rows(schema.migrations)] == ["confirmed"]
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=400)


def test_resize_counts_for_its_project_and_the_servers_user(cloud: Cloud, server: str) -> None:
    quota = {"quota_set": {"ram": 8191, "cores": 4}}
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", quota, token="admin")
    for token in ("user", "admin"):
        said = act(cloud, server, "resize", {"flavorRef": LARGE}, token=token, status=403)
        assert said == "Quota exceeded for ram: Requested 6144, but already used 2048 of 8191 ram"
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"ram": 8192}}, token="admin")
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}?user_id=u1", {"quota_set": {"cores": 3}}, token="admin"
    )
    said = act(cloud, server, "resize", {"flavorRef": LARGE}, status=403)
    assert said == "Quota exceeded for cores: Requested 3, but already used 1 of 3 cores"
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


def test_a_server_that_shrinks_needs_no_quota(cloud: Cloud, server: str) -> None:
    cloud.add_flavor(Flavor("thin", "m1.thin", 1, 512, 20))
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"ram": 100, "cores": 0}}, token="admin"
    )
    act(cloud, server, "resize", {"flavorRef": "thin"}, status=202)


@pytest.mark.parametrize(("key", "given"), [("resize", {"flavorRef": LARGE}), ("migrate", None)])
def test_a_server_does_not_leave_a_host_that_is_down(
    cloud: Cloud, server: str, key: str, given: Any
) -> None:
    mark_host_down(cloud, "host1")
    said = act(cloud, server, key, given, token="admin", status=409)
    assert said.startswith(f"Instance {server} is on a host that is down; try again when it is up.")
    assert cloud.rows(schema.migrations) == []


# --- confirm and revert ---
@pytest.mark.parametrize(
    ("key", "workflow", "status", "task"),
    [
        ("confirmResize", "confirm_resize", 204, None),
        ("revertResize", "revert_resize", 202, "resize_reverting"),
    ],
)
def test_a_resize_is_confirmed_or_reverted(
    cloud: Cloud, server: str, key: str, workflow: str, status: int, task: str | None
) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    act(cloud, server, key, status=409)
    finish_resize(cloud, server)
    shown = cloud.call("GET", f"/servers/{server}", mv="2.96", token="admin").json["server"]
    assert (shown["status"], shown["flavor"]["original_name"], shown["OS-EXT-SRV-ATTR:host"]) == (
        "VERIFY_RESIZE",
        "m1.large",
        "host2",
    )
    woken = cloud.wakeup.woken
    act(cloud, server, key, status=status)
    action, _ = find_action_and_migration(cloud, server)
    [move] = cloud.rows(schema.migrations)
    assert (action.workflow, cloud.rows(schema.servers)[0].task_state, cloud.wakeup.woken) == (
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
def test_what_was_not_resized_is_neither_confirmed_nor_reverted(
    cloud: Cloud, server: str, key: str
) -> None:
    cloud.rest(server, "resized")
    assert act(cloud, server, key, status=400) == "Instance has not been resized."


@pytest.mark.parametrize(
    ("host", "forced", "text"),
    [
        (
            "host1",
            False,
            "Host host1 that the server came from is down; revert when it is up again, or confirm",
        ),
        (
            "host1",
            True,
            "Host host1 that the server came from is down; revert when it is up again, or confirm",
        ),
        (
            "host2",
            False,
            "Host host2 that the server is on does not answer, and the server may run there.",
        ),
        ("host2", True, None),
    ],
)
def test_revert_needs_both_hosts_or_proof_confirm_neither(
    cloud: Cloud, server: str, host: str, forced: bool, text: str | None
) -> None:
    act(cloud, server, "resize", {"flavorRef": LARGE}, status=202)
    finish_resize(cloud, server)
    mark_host_down(cloud, host, forced)
    if text is not None:
        assert act(cloud, server, "revertResize", token="admin", status=409).startswith(text)
        assert host not in act(cloud, server, "revertResize", status=409), (
            "who may not know hosts is not told"
        )
        assert begun_or_none(cloud, server) is None
        act(cloud, server, "confirmResize", status=204)
    else:
        act(cloud, server, "revertResize", status=202)


def begun_or_none(cloud: Cloud, server: str) -> Any:
    return next(row.action for row in cloud.rows(schema.servers) if row.id == server)


# --- migrate ---
@pytest.mark.parametrize(
    ("given", "mv", "host"),
    [
        (None, "2.1", None),
        ({"host": "host2"}, "2.55", None),
        (None, "2.56", None),
        ({}, "2.56", None),
        ({"host": None}, "2.56", None),
        ({"host": "host2"}, "2.56", "host2"),
    ],
)
def test_a_migration_to_any_or_to_a_named_host(
    cloud: Cloud, server: str, given: Any, mv: str, host: str | None
) -> None:
    act(cloud, server, "migrate", given, mv, "admin", status=202)
    action, move = find_action_and_migration(cloud, server)
    assert (action.name, action.workflow, move.type) == ("migrate", "migrate", "migration")
    assert requested_args(action.args) == {"host": host, "forced": False}
    assert move.old_flavor == move.new_flavor
    assert cloud.rows(schema.servers)[0].task_state == "resize_prep"


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        ({"host": "host1"}, 400, "Cannot migrate to the host where the server exists."),
        ({"host": "nowhere"}, 400, "Compute host nowhere could not be found."),
        ({"host": "a b"}, 400, "Invalid input for field/attribute host"),
        ({"colour": "red"}, 400, "Additional properties are not allowed"),
    ],
)
def test_hosts_that_a_server_cannot_migrate_to(
    cloud: Cloud, server: str, given: Any, status: int, text: str
) -> None:
    assert text in act(cloud, server, "migrate", given, "2.56", "admin", status=status)
    assert cloud.rows(schema.migrations) == []


@pytest.mark.parametrize(
    ("key", "given"),
    [("migrate", {"host": None}), ("os-migrateLive", {"host": None, "block_migration": "auto"})],
)
def test_managers_move_servers_only_admins_name_a_host(
    cloud: Cloud, server: str, key: str, given: dict[str, Any]
) -> None:
    assert act(cloud, server, key, given, "2.56", status=403).startswith(
        "Policy doesn't allow os_compute_api:os-mig"
    )
    for host in ("host2", "nowhere"):
        said = act(cloud, server, key, {**given, "host": host}, "2.56", "manager", status=403)
        assert said.endswith(":host to be performed.")
    act(cloud, server, key, given, "2.56", "manager", status=202)
