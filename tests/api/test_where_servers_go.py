# SPDX-License-Identifier: Apache-2.0
"""Placement of servers by request: zone, host, scheduler hints, group and hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain import ids
from common.domain.models import Flavor, ImageRef
from common.store import schema
from tests.api.conftest import IMAGE, PROJECT, Cloud


def post_server(
    cloud: Cloud, mv: str = "2.1", token: str = "user", hints: Any = None, **change: Any
) -> Any:
    body: dict[str, Any] = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **change}}
    if mv != "2.1":
        body["server"]["networks"] = "none"
    if hints is not None:
        body["os:scheduler_hints"] = hints
    return cloud.call("POST", "/servers", body, mv=mv, token=token)


def read_placement(cloud: Cloud, answer: Any) -> tuple[Any, Any, Any, Any]:
    """Return zone, host and forced of the create's arguments, and the server's pinned zone."""
    assert answer.status_code == 202, answer.text
    server = answer.json["server"]["id"]
    [args] = [action.args for action in cloud.rows(schema.actions) if action.server_id == server]
    [row] = [row for row in cloud.rows(schema.servers) if row.id == server]
    return args["zone"], args["host"], args["forced"], row.pinned_availability_zone


def read_refusal(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json["badRequest"]["message"])


@pytest.fixture
def zoned_cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with host1 in the zone nova and host2 in az1."""
    return add_host2_in_az1(cloud)


def add_host2_in_az1(cloud: Cloud) -> Cloud:
    cloud.add_host("host2")
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.aggregates),
            {
                "id": 1,
                "uuid": ids.new(),
                "name": "a",
                "created_at": 0,
                "meta": {"availability_zone": "az1"},
            },
        )
        tx.execute(sa.insert(schema.aggregate_hosts), {"aggregate_id": 1, "host": "host2"})
    return cloud


# --- zones and hosts ---
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nova:host1", ("nova", "host1", True, "nova")),
        (":host2", (None, "host2", True, None)),
        ("az1:host2:host2.cloud", ("az1", "host2", True, "az1")),
        ("az1::host2.cloud", ("az1", "host2", True, "az1")),
        ("nova:host2", ("az1", "host2", True, "az1")),
    ],
)
def test_create_server_by_admin_on_forced_host_pins_its_zone_if_zone_given(
    zoned_cloud: Cloud, text: str, expected: Any
) -> None:
    assert (
        read_placement(zoned_cloud, post_server(zoned_cloud, token="admin", availability_zone=text))
        == expected
    )


def test_create_server_with_requested_host_does_not_force_host(zoned_cloud: Cloud) -> None:
    both = post_server(
        zoned_cloud,
        "2.74",
        "admin",
        host="host2",
        hypervisor_hostname="host2.cloud",
        availability_zone="az1",
    )
    node = post_server(zoned_cloud, "2.74", "admin", hypervisor_hostname="host1.cloud")
    assert read_placement(zoned_cloud, both) == ("az1", "host2", False, "az1")
    assert read_placement(zoned_cloud, node) == (None, "host1", False, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"host": "nowhere"}, "Compute host nowhere could not be found."),
        (
            {"host": "host1", "hypervisor_hostname": "other"},
            "Compute host host1 could not be found. A host with this name exists, but its node is not other.",
        ),
        ({"availability_zone": "nova:nowhere"}, "Compute host nowhere could not be found."),
        (
            {"availability_zone": "nova:host1:host2.cloud"},
            "Compute host host1 could not be found. A host with this name exists, but its node is not host2.cloud.",
        ),
        (
            {"availability_zone": "a:b:c:d"},
            "Unable to parse availability_zone: give ZONE, ZONE:HOST or ZONE:HOST:NODE.",
        ),
        ({"availability_zone": "moon"}, "The requested availability zone is not available"),
        (
            {"availability_zone": "moon", "host": "host1"},
            "The requested availability zone is not available",
        ),
        (
            {"availability_zone": "nova:host1", "host": "host1"},
            "A host in availability_zone cannot be given together with host.",
        ),
    ],
)
def test_create_server_with_unknown_or_invalid_host_or_zone_returns_400(
    cloud: Cloud, change: dict[str, Any], text: str
) -> None:
    assert read_refusal(post_server(cloud, "2.74", "admin", **change)) == text
    assert cloud.rows(schema.servers) == []


@pytest.mark.parametrize(
    "change",
    [
        {"availability_zone": "nova:host1"},
        {"availability_zone": ":nowhere"},
        {"availability_zone": "nova::host1.cloud"},
        {"host": "host1"},
        {"hypervisor_hostname": "nowhere"},
    ],
)
def test_create_server_with_host_by_user_returns_403_even_for_unknown_host(
    cloud: Cloud, change: dict[str, Any]
) -> None:
    answer = post_server(cloud, "2.74", **change)
    assert answer.status_code == 403
    assert "could not be found" not in answer.text


def test_create_server_pins_requested_zone_of_aggregate(zoned_cloud: Cloud) -> None:
    answer = post_server(zoned_cloud, availability_zone="az1")
    assert read_placement(zoned_cloud, answer) == ("az1", None, False, "az1")
    views = [
        zoned_cloud.call("GET", f"/servers/{answer.json['server']['id']}", mv=mv).json["server"]
        for mv in ("2.95", "2.96")
    ]
    assert [view.get("pinned_availability_zone", "not shown") for view in views] == [
        "not shown",
        "az1",
    ]
    assert (
        read_refusal(post_server(zoned_cloud, availability_zone="moon"))
        == "The requested availability zone is not available"
    )


def test_create_server_without_zone_pins_default_schedule_zone(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = add_host2_in_az1(make_cloud(default_schedule_zone="az1"))
    assert read_placement(cloud, post_server(cloud)) == ("az1", None, False, "az1")
    assert read_placement(cloud, post_server(cloud, availability_zone="nova")) == (
        "nova",
        None,
        False,
        "nova",
    )
    assert read_placement(cloud, post_server(cloud, token="admin", availability_zone=":host1")) == (
        "nova",
        "host1",
        True,
        "nova",
    )
    cloud_without_zone = make_cloud(default_schedule_zone="gone")
    assert (
        read_refusal(post_server(cloud_without_zone))
        == "The requested availability zone is not available"
    )


# --- hints ---
def test_create_server_stores_and_shows_scheduler_hints(cloud: Cloud) -> None:
    hints = {
        "same_host": [ids.new()],
        "different_host": ids.new(),
        "query": '[">=", "$free_ram_mb", 1]',
        "build_near_host_ip": "192.0.2.1",
        "cidr": "/24",
        "target_cell": "cell1",
        "operators_own": "yes",
    }
    server = post_server(cloud, hints=hints).json["server"]["id"]
    assert [row.scheduler_hints for row in cloud.rows(schema.servers)] == [hints]
    assert (
        cloud.call("GET", f"/servers/{server}", mv="2.100").json["server"]["scheduler_hints"]
        == hints
    )


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({"_kilonova": "x"}, "os:scheduler_hints._kilonova: names that begin with _"),
        ({"_nova_check_type": ["rebuild"]}, "os:scheduler_hints._nova_check_type: names"),
        (
            {"different_host": [ids.new() for _ in range(65)]},
            "os:scheduler_hints.different_host: same_host and different_host may together name at most 64",
        ),
        (
            {
                "same_host": [ids.new() for _ in range(40)],
                "different_host": [ids.new() for _ in range(25)],
            },
            "os:scheduler_hints.different_host: same_host and different_host may together name at most 64",
        ),
        (
            {"group": [ids.new(), ids.new()]},
            "os:scheduler_hints.group: a server can be in one group only",
        ),
        ({"query": "x" * 20000}, "os:scheduler_hints: the hints may have at most 16384 bytes"),
        ({"same_host": ["not an id"]}, "Invalid input for field/attribute same_host"),
        ({"group": "by name"}, "Invalid input for field/attribute group"),
        ({"cidr": "24"}, "Invalid input"),
        ({"build_near_host_ip": "here"}, "Invalid input"),
        ({"target_cell": ""}, "Invalid input"),
    ],
)
def test_create_server_with_invalid_scheduler_hints_returns_400(
    cloud: Cloud, hints: dict[str, Any], text: str
) -> None:
    assert read_refusal(post_server(cloud, hints=hints)).startswith(text)
    assert cloud.rows(schema.servers) == []


def test_create_server_accepts_64_servers_in_scheduler_hints(cloud: Cloud) -> None:
    assert (
        post_server(cloud, hints={"different_host": [ids.new() for _ in range(64)]}).status_code
        == 202
    )


# --- server groups ---
def create_group(cloud: Cloud, policy: str, token: str = "user") -> str:
    answer = cloud.call(
        "POST",
        "/os-server-groups",
        {"server_group": {"name": "g", "policies": [policy]}},
        mv="2.15",
        token=token,
    )
    return str(answer.json["server_group"]["id"])


@pytest.mark.parametrize(
    "policy", ["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]
)
def test_create_server_joins_group_within_member_quota(cloud: Cloud, policy: str) -> None:
    group = create_group(cloud, policy)
    assert post_server(cloud, hints={"group": group}, min_count=2).status_code == 202
    members = cloud.call("GET", f"/os-server-groups/{group}").json["server_group"]["members"]
    assert sorted(members) == sorted(row.id for row in cloud.rows(schema.servers))
    cloud.call(
        "PUT",
        f"/os-quota-sets/{PROJECT}",
        {"quota_set": {"server_group_members": 2}},
        token="admin",
    )
    over = post_server(cloud, hints={"group": group})
    assert over.json["forbidden"]["message"].startswith("Quota exceeded for server_group_members")
    assert len(cloud.rows(schema.server_group_members)) == 2


def test_create_server_with_foreign_group_returns_400_also_to_admins(cloud: Cloud) -> None:
    foreign, unknown = create_group(cloud, "affinity", "stranger"), ids.new()
    for token, group in (("user", foreign), ("user", unknown), ("admin", foreign)):
        assert read_refusal(post_server(cloud, hints={"group": group}, token=token)) == (
            f"Instance group {group} could not be found."
        )
    assert cloud.rows(schema.servers) == []


def test_server_group_omits_deleted_servers_and_can_be_deleted(cloud: Cloud) -> None:
    group = create_group(cloud, "anti-affinity")
    first, second = (
        post_server(cloud, hints={"group": group}).json["server"]["id"] for _ in range(2)
    )
    cloud.set_state(first, "deleted", deleted=1)
    assert cloud.call("GET", f"/os-server-groups/{group}").json["server_group"]["members"] == [
        second
    ]
    assert cloud.call("GET", "/os-server-groups").json["server_groups"][0]["members"] == [second]
    assert cloud.call("GET", f"/servers/{second}", mv="2.71").json["server"]["server_groups"] == [
        group
    ]
    assert cloud.call("DELETE", f"/os-server-groups/{group}").status_code == 204
    assert cloud.call("GET", f"/servers/{second}", mv="2.71").json["server"]["server_groups"] == []
    assert cloud.rows(schema.server_group_members) == []


def test_create_server_returns_400_when_group_is_deleted_meanwhile(cloud: Cloud) -> None:
    """The group is deleted between the reads of the create and its transaction."""
    group, other = create_group(cloud, "affinity"), create_group(cloud, "affinity")
    show = cloud.images.show

    def delete_group_and_show(image_id: str, token: str) -> Any:
        cloud.call("DELETE", f"/os-server-groups/{group}")
        return show(image_id, token)

    cloud.images.show = delete_group_and_show
    assert (
        read_refusal(post_server(cloud, hints={"group": group}))
        == f"Instance group {group} could not be found."
    )
    assert cloud.rows(schema.servers) == cloud.rows(schema.server_group_members) == []
    assert post_server(cloud, hints={"group": other}).status_code == 202


# --- hardware ---
def test_server_hides_internal_extra_specs_of_its_flavor(cloud: Cloud) -> None:
    server = post_server(cloud).json["server"]["id"]
    [row] = cloud.rows(schema.servers)
    flavor = {
        **row.flavor,
        "extra_specs": {"kilonova:devices": "gpu=10de:1db4:1", "hw:boot_menu": "true"},
    }
    cloud.change(schema.servers, schema.servers.c.id == server, flavor=flavor)
    for token in ("user", "admin"):
        for path in (
            f"/servers/{server}",
            "/servers/detail?all_tenants=1" if token == "admin" else "/servers/detail",
        ):
            for mv in ("2.1", "2.47", "2.100"):
                answer = cloud.call("GET", path, mv=mv, token=token)
                assert "kilonova:" not in answer.text
                assert ("hw:boot_menu" in answer.text) == (mv != "2.1")


def add_flavor_with_specs(cloud: Cloud, **specs: str) -> str:
    """Add a flavor with these extra specs, and return its id."""
    cloud.add_flavor(Flavor("hw", "m1.hw", 2, 512, 1, extra_specs=specs))
    return "hw"


@pytest.mark.parametrize(
    ("specs", "properties", "name"),
    [
        ({"hw:mem_encryption": "true"}, {}, "hw:mem_encryption"),
        ({}, {"hw_tpm_model": "tpm-crb"}, "hw_tpm_model"),
        ({"hw:numa_nodes": "three"}, {}, "hw:numa_nodes"),
        ({"resources:VGPU": "1"}, {}, "resources:VGPU"),
        ({"trait:CUSTOM_FAST": "perhaps"}, {}, "trait:CUSTOM_FAST"),
        ({}, {"hw_disk_bus": "pigeon"}, "hw_disk_bus"),
        ({"pci_passthrough:alias": "gpu:1"}, {}, "pci_passthrough:alias"),
    ],
)
def test_create_server_with_unsupported_hardware_returns_400_with_its_key(
    cloud: Cloud, specs: dict[str, str], properties: dict[str, str], name: str
) -> None:
    cloud.images.images[IMAGE].ref.properties.update(properties)
    assert name in read_refusal(post_server(cloud, flavorRef=add_flavor_with_specs(cloud, **specs)))
    assert cloud.rows(schema.servers) == []


def test_create_server_stores_devices_of_pci_alias_in_its_flavor(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(pci_aliases={"gpu": [("10de", "1db4"), ("10de", "1db5")]})
    flavor = add_flavor_with_specs(
        cloud, **{"pci_passthrough:alias": "gpu:2", "kilonova:devices": "all=8086:1572:9"}
    )
    server = post_server(cloud, flavorRef=flavor).json["server"]["id"]
    assert cloud.rows(schema.servers)[0].flavor["extra_specs"] == {
        "pci_passthrough:alias": "gpu:2",
        "kilonova:devices": "gpu=10de:1db4|10de:1db5:2",
    }
    flavor_view = cloud.call("GET", f"/servers/{server}", mv="2.47", token="admin").json["server"][
        "flavor"
    ]
    assert flavor_view["extra_specs"] == {"pci_passthrough:alias": "gpu:2"}


@pytest.mark.parametrize(
    ("properties", "difference"),
    [
        ({"hw_numa_nodes": "2"}, "NUMA nodes"),
        ({"hw_cpu_policy": "dedicated"}, "resources"),
        ({"hw_disk_bus": "scsi"}, None),
    ],
)
def test_rebuild_with_image_of_other_numa_or_cpu_needs_returns_400(
    cloud: Cloud, properties: dict[str, str], difference: str | None
) -> None:
    server = post_server(cloud, flavorRef=add_flavor_with_specs(cloud)).json["server"]["id"]
    cloud.set_state(server)
    other = ids.new()
    cloud.images.images[other] = Image(ImageRef(other, "qcow2", 1024, properties=properties))
    answer = cloud.call("POST", f"/servers/{server}/action", {"rebuild": {"imageRef": other}})
    if difference is None:
        assert answer.status_code == 202, answer.text
    else:
        assert read_refusal(answer).startswith(
            f"imageRef: this image needs other {difference} than the server has"
        )
        assert cloud.rows(schema.servers)[0].image_id == IMAGE
