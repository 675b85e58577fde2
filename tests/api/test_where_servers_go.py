# SPDX-License-Identifier: Apache-2.0
"""What a request may say of the place of its servers: zone, host, hints, group; and what is handed
to placement."""

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


def post(
    cloud: Cloud, mv: str = "2.1", token: str = "user", hints: Any = None, **change: Any
) -> Any:
    body: dict[str, Any] = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **change}}
    if mv != "2.1":
        body["server"]["networks"] = "none"
    if hints is not None:
        body["os:scheduler_hints"] = hints
    return cloud.call("POST", "/servers", body, mv=mv, token=token)


def placed(cloud: Cloud, answer: Any) -> tuple[Any, Any, Any, Any]:
    """zone, host and forced as the workflow gets them, and the zone that the server is pinned
    to."""
    assert answer.status_code == 202, answer.text
    server = answer.json["server"]["id"]
    [args] = [action.args for action in cloud.rows(schema.actions) if action.server_id == server]
    [row] = [row for row in cloud.rows(schema.servers) if row.id == server]
    return args["zone"], args["host"], args["forced"], row.pinned_availability_zone


def refusal(answer: Any) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json["badRequest"]["message"])


@pytest.fixture
def zoned(cloud: Cloud) -> Cloud:
    """host1 in the zone nova, host2 in az1."""
    return put_in_zone(cloud)


def put_in_zone(cloud: Cloud) -> Cloud:
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
def test_an_admin_forces_a_host_and_gets_its_own_zone(
    zoned: Cloud, text: str, expected: Any
) -> None:
    assert placed(zoned, post(zoned, token="admin", availability_zone=text)) == expected


def test_a_requested_host_is_not_forced(zoned: Cloud) -> None:
    both = post(
        zoned,
        "2.74",
        "admin",
        host="host2",
        hypervisor_hostname="host2.cloud",
        availability_zone="az1",
    )
    node = post(zoned, "2.74", "admin", hypervisor_hostname="host1.cloud")
    assert placed(zoned, both) == ("az1", "host2", False, "az1")
    assert placed(zoned, node) == (None, "host1", False, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"host": "nowhere"}, "Compute host nowhere could not be found."),
        (
            {"host": "host1", "hypervisor_hostname": "other"},
            "Compute host host1 could not be found. It is there, but its node is not other.",
        ),
        ({"availability_zone": "nova:nowhere"}, "Compute host nowhere could not be found."),
        (
            {"availability_zone": "nova:host1:host2.cloud"},
            "Compute host host1 could not be found. It is there, but its node is not host2.cloud.",
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
def test_a_place_that_is_none(cloud: Cloud, change: dict[str, Any], text: str) -> None:
    assert refusal(post(cloud, "2.74", "admin", **change)) == text
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
def test_only_admins_name_hosts_others_learn_none(cloud: Cloud, change: dict[str, Any]) -> None:
    answer = post(cloud, "2.74", **change)
    assert answer.status_code == 403
    assert "could not be found" not in answer.text


def test_a_zone_is_that_of_an_aggregate_and_is_pinned(zoned: Cloud) -> None:
    answer = post(zoned, availability_zone="az1")
    assert placed(zoned, answer) == ("az1", None, False, "az1")
    shown = [
        zoned.call("GET", f"/servers/{answer.json['server']['id']}", mv=mv).json["server"]
        for mv in ("2.95", "2.96")
    ]
    assert [one.get("pinned_availability_zone", "not shown") for one in shown] == [
        "not shown",
        "az1",
    ]
    assert (
        refusal(post(zoned, availability_zone="moon"))
        == "The requested availability zone is not available"
    )


def test_servers_that_name_no_zone_are_pinned_to_the_default_one(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = put_in_zone(make_cloud(default_schedule_zone="az1"))
    assert placed(cloud, post(cloud)) == ("az1", None, False, "az1")
    assert placed(cloud, post(cloud, availability_zone="nova")) == ("nova", None, False, "nova")
    assert placed(cloud, post(cloud, token="admin", availability_zone=":host1")) == (
        "nova",
        "host1",
        True,
        "nova",
    )
    gone = make_cloud(default_schedule_zone="gone")
    assert refusal(post(gone)) == "The requested availability zone is not available"


# --- hints ---
def test_hints_are_kept_as_they_were_given_and_shown(cloud: Cloud) -> None:
    hints = {
        "same_host": [ids.new()],
        "different_host": ids.new(),
        "query": '[">=", "$free_ram_mb", 1]',
        "build_near_host_ip": "192.0.2.1",
        "cidr": "/24",
        "target_cell": "cell1",
        "operators_own": "yes",
    }
    server = post(cloud, hints=hints).json["server"]["id"]
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
            "os:scheduler_hints.different_host: hints name at most 64",
        ),
        (
            {
                "same_host": [ids.new() for _ in range(40)],
                "different_host": [ids.new() for _ in range(25)],
            },
            "os:scheduler_hints.different_host: hints name at most 64",
        ),
        (
            {"group": [ids.new(), ids.new()]},
            "os:scheduler_hints.group: a server can be in one group only",
        ),
        ({"query": "x" * 20000}, "os:scheduler_hints: at most 16384 bytes"),
        ({"same_host": ["not an id"]}, "Invalid input for field/attribute same_host"),
        ({"group": "by name"}, "Invalid input for field/attribute group"),
        ({"cidr": "24"}, "Invalid input"),
        ({"build_near_host_ip": "here"}, "Invalid input"),
        ({"target_cell": ""}, "Invalid input"),
    ],
)
def test_hints_that_are_none(cloud: Cloud, hints: dict[str, Any], text: str) -> None:
    assert refusal(post(cloud, hints=hints)).startswith(text)
    assert cloud.rows(schema.servers) == []


def test_sixty_four_servers_can_be_named(cloud: Cloud) -> None:
    assert post(cloud, hints={"different_host": [ids.new() for _ in range(64)]}).status_code == 202


# --- server groups ---
def new_group(cloud: Cloud, policy: str, token: str = "user") -> str:
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
def test_server_joins_its_group_in_its_transaction(cloud: Cloud, policy: str) -> None:
    group = new_group(cloud, policy)
    assert post(cloud, hints={"group": group}, min_count=2).status_code == 202
    members = cloud.call("GET", f"/os-server-groups/{group}").json["server_group"]["members"]
    assert sorted(members) == sorted(row.id for row in cloud.rows(schema.servers))
    cloud.call(
        "PUT",
        f"/os-quota-sets/{PROJECT}",
        {"quota_set": {"server_group_members": 2}},
        token="admin",
    )
    over = post(cloud, hints={"group": group})
    assert over.json["forbidden"]["message"].startswith("Quota exceeded for server_group_members")
    assert len(cloud.rows(schema.server_group_members)) == 2


def test_a_group_of_another_project_is_none_also_for_admins(cloud: Cloud) -> None:
    theirs, unknown = new_group(cloud, "affinity", "stranger"), ids.new()
    for token, group in (("user", theirs), ("user", unknown), ("admin", theirs)):
        assert refusal(post(cloud, hints={"group": group}, token=token)) == (
            f"Instance group {group} could not be found."
        )
    assert cloud.rows(schema.servers) == []


def test_group_counts_no_deleted_servers_and_can_be_deleted(cloud: Cloud) -> None:
    group = new_group(cloud, "anti-affinity")
    first, second = (post(cloud, hints={"group": group}).json["server"]["id"] for _ in range(2))
    cloud.rest(first, "deleted", deleted=1)
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


def test_group_deleted_during_a_create_leaves_no_server(cloud: Cloud) -> None:
    """The group is deleted between the reads of a create and its transaction."""
    group, kept = new_group(cloud, "affinity"), new_group(cloud, "affinity")
    show = cloud.images.show

    def deleted_meanwhile(image_id: str, token: str) -> Any:
        cloud.call("DELETE", f"/os-server-groups/{group}")
        return show(image_id, token)

    cloud.images.show = deleted_meanwhile
    assert (
        refusal(post(cloud, hints={"group": group}))
        == f"Instance group {group} could not be found."
    )
    assert cloud.rows(schema.servers) == cloud.rows(schema.server_group_members) == []
    assert post(cloud, hints={"group": kept}).status_code == 202


# --- hardware ---
def test_what_kilonova_froze_into_a_flavor_is_nobodys_to_see(cloud: Cloud) -> None:
    server = post(cloud).json["server"]["id"]
    [row] = cloud.rows(schema.servers)
    frozen = {
        **row.flavor,
        "extra_specs": {"kilonova:devices": "gpu=10de:1db4:1", "hw:boot_menu": "true"},
    }
    cloud.change(schema.servers, schema.servers.c.id == server, flavor=frozen)
    for token in ("user", "admin"):
        for path in (
            f"/servers/{server}",
            "/servers/detail?all_tenants=1" if token == "admin" else "/servers/detail",
        ):
            for mv in ("2.1", "2.47", "2.100"):
                shown = cloud.call("GET", path, mv=mv, token=token)
                assert "kilonova:" not in shown.text
                assert ("hw:boot_menu" in shown.text) == (mv != "2.1")


def with_specs(cloud: Cloud, **specs: str) -> str:
    """A flavor's id."""
    cloud.add_flavor(Flavor("hw", "m1.hw", 2, 512, 1, extra_specs=specs))
    return "hw"


@pytest.mark.parametrize(
    ("specs", "properties", "named"),
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
def test_hardware_that_no_host_makes_is_refused_by_name(
    cloud: Cloud, specs: dict[str, str], properties: dict[str, str], named: str
) -> None:
    cloud.images.images[IMAGE].ref.properties.update(properties)
    assert named in refusal(post(cloud, flavorRef=with_specs(cloud, **specs)))
    assert cloud.rows(schema.servers) == []


def test_pci_aliases_are_resolved_when_the_flavor_is_frozen(
    make_cloud: Callable[..., Cloud],
) -> None:
    cloud = make_cloud(pci_aliases={"gpu": [("10de", "1db4"), ("10de", "1db5")]})
    flavor = with_specs(
        cloud, **{"pci_passthrough:alias": "gpu:2", "kilonova:devices": "all=8086:1572:9"}
    )
    server = post(cloud, flavorRef=flavor).json["server"]["id"]
    assert cloud.rows(schema.servers)[0].flavor["extra_specs"] == {
        "pci_passthrough:alias": "gpu:2",
        "kilonova:devices": "gpu=10de:1db4|10de:1db5:2",
    }
    shown = cloud.call("GET", f"/servers/{server}", mv="2.47", token="admin").json["server"][
        "flavor"
    ]
    assert shown["extra_specs"] == {"pci_passthrough:alias": "gpu:2"}


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"hw_numa_nodes": "2"}, "NUMA nodes"),
        ({"hw_cpu_policy": "dedicated"}, "resources"),
        ({"hw_disk_bus": "scsi"}, None),
    ],
)
def test_a_rebuild_keeps_the_servers_place_on_its_host(
    cloud: Cloud, properties: dict[str, str], words: str | None
) -> None:
    server = post(cloud, flavorRef=with_specs(cloud)).json["server"]["id"]
    cloud.rest(server)
    other = ids.new()
    cloud.images.images[other] = Image(ImageRef(other, "qcow2", 1024, properties=properties))
    answer = cloud.call("POST", f"/servers/{server}/action", {"rebuild": {"imageRef": other}})
    if words is None:
        assert answer.status_code == 202, answer.text
    else:
        assert refusal(answer).startswith(
            f"imageRef: this image asks for other {words} than the server has"
        )
        assert cloud.rows(schema.servers)[0].image_id == IMAGE
