# SPDX-License-Identifier: Apache-2.0
"""[quota] driver = unified: the limits of Keystone are enforced exactly.

Without an answer of Keystone a request that needs a limit is refused.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.models import Flavor
from common.domain.wire import to_wire
from common.store import schema
from compute_api.compute.request.quota import UnregisteredLimits
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.api.test_keypairs import SSH

EVERYTHING = {
    "servers": 10,
    "class:VCPU": 20,
    "class:MEMORY_MB": 51200,
    "server_metadata_items": 128,
    "server_injected_files": 5,
    "server_injected_file_content_bytes": 10240,
    "server_injected_file_path_bytes": 255,
    "server_key_pairs": 100,
    "server_groups": 11,
    "server_group_members": 12,
}


class Keystone:
    """The limits of an identity service, registered and per project, as a test sets them."""

    def __init__(self) -> None:
        self.registered: dict[str, int] = dict(EVERYTHING)
        self.own: dict[str, dict[str, int]] = {}
        self.down = False
        self.cloud: Cloud | None = None

    def of(self, project_id: str) -> dict[str, int]:
        assert self.cloud is not None and self.cloud.store.engine.pool.checkedout() == 0, (
            "asked inside a transaction"
        )
        if self.down:
            raise errors.Unavailable(
                "The identity service does not return the limits of this project; try again later."
            )
        return {**self.registered, **self.own.get(project_id, {})}


@pytest.fixture
def keystone() -> Keystone:
    return Keystone()


@pytest.fixture
def cloud(make_cloud: Any, keystone: Keystone) -> Cloud:
    """Return a cloud with these limits, and flavors that use all kinds of resources."""
    keystone.cloud = cloud = make_cloud(keystone=keystone, secret_key="k")
    for flavor in (
        Flavor("big", "big", 4, 1024, 10, 5, 1024),
        Flavor("own", "own", 2, 512, 1, extra_specs={"hw:cpu_policy": "dedicated"}),
        Flavor("gold", "gold", 1, 512, 1, extra_specs={"resources:CUSTOM_GOLD": "3"}),
    ):
        cloud.add_flavor(flavor)
    return cloud


def post_server(cloud: Cloud, flavor: str = "1", **more: Any) -> Any:
    return cloud.call(
        "POST",
        "/servers",
        {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": flavor, **more}},
    )


def is_over(answer: Any, *names: str) -> bool:
    return bool(
        answer.status_code == 403 and f"Quota exceeded for {', '.join(names)}:" in answer.text
    )


# --- shown limits ---
def test_quota_sets_and_limits_show_values_of_keystone(cloud: Cloud, keystone: Keystone) -> None:
    keystone.own[PROJECT] = {"class:VCPU": 7, "server_groups": 3}
    cloud.create()
    own = cloud.call("GET", f"/os-quota-sets/{PROJECT}").json["quota_set"]
    assert own == {
        "id": PROJECT,
        "instances": 10,
        "cores": 7,
        "ram": 51200,
        "metadata_items": 128,
        "injected_files": 5,
        "injected_file_content_bytes": 10240,
        "injected_file_path_bytes": 255,
        "key_pairs": 100,
        "server_groups": 3,
        "server_group_members": 12,
        "floating_ips": -1,
        "fixed_ips": -1,
        "security_groups": -1,
        "security_group_rules": -1,
    }
    assert cloud.call("GET", f"/os-quota-sets/{PROJECT}?user_id=u1").json["quota_set"] == own
    for path, name in (
        (f"/os-quota-sets/{PROJECT}/defaults", "quota_set"),
        ("/os-quota-class-sets/default", "quota_class_set"),
        ("/os-quota-class-sets/x", "quota_class_set"),
    ):
        defaults = cloud.call("GET", path, token="admin", mv="2.57").json[name]
        assert (defaults["cores"], defaults["server_groups"]) == (20, 11), path
    for query in ("", "?user_id=nobody"):
        detail = cloud.call("GET", f"/os-quota-sets/{PROJECT}/detail{query}").json["quota_set"]
        assert detail["cores"] == {"limit": 7, "in_use": 1, "reserved": 0}
        assert (
            detail["instances"]["in_use"],
            detail["ram"]["in_use"],
            detail["key_pairs"]["in_use"],
        ) == (1, 512, 0)
    absolute = cloud.call("GET", "/limits").json["limits"]["absolute"]
    assert (
        absolute["maxTotalCores"],
        absolute["maxTotalInstances"],
        absolute["maxServerGroups"],
    ) == (7, 10, 3)
    assert (
        absolute["totalCoresUsed"],
        absolute["totalInstancesUsed"],
        absolute["totalRAMUsed"],
    ) == (1, 1, 512)


def test_update_quota_set_changes_no_limit_with_unified_driver(
    cloud: Cloud, keystone: Keystone
) -> None:
    path, class_path = f"/os-quota-sets/{PROJECT}", "/os-quota-class-sets/default"
    answer = cloud.call("PUT", path, {"quota_set": {"cores": 1}}, token="admin")
    assert (answer.status_code, answer.json["quota_set"]["cores"]) == (200, 20)
    answer = cloud.call("PUT", class_path, {"quota_class_set": {"cores": 1}}, token="admin")
    assert (answer.status_code, answer.json["quota_class_set"]["cores"]) == (200, 20)
    assert cloud.rows(schema.quotas) == []
    cloud.change(schema.projects, sa.true(), quota_seq=0)
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.quotas).values(
                project_id=PROJECT, user_id="", resource="cores", hard_limit=0
            )
        )
    assert cloud.call("DELETE", path, token="admin").status_code == 202
    assert len(cloud.rows(schema.quotas)) == 1, (
        "the rows apply again after a return to the database driver"
    )
    assert post_server(cloud).status_code == 202
    for method in ("PUT", "DELETE"):
        body = {"quota_set": {"cores": 1}} if method == "PUT" else None
        assert cloud.call(method, path, body).status_code == 403


# --- counted resources ---
@pytest.mark.parametrize(
    ("name", "flavor", "limit", "fit"),
    [
        ("servers", "1", 2, 2),
        ("class:VCPU", "big", 9, 2),
        ("class:MEMORY_MB", "1", 1535, 2),
        ("class:DISK_GB", "big", 47, 2),
        ("class:PCPU", "own", 5, 2),
        ("class:VCPU", "own", 0, 3),
        ("class:CUSTOM_GOLD", "gold", 6, 2),
        ("servers", "1", 0, 0),
        ("class:VCPU", "1", -1, 3),
        ("class:CUSTOM_OTHER", "gold", 0, 3),
    ],
)
def test_create_server_returns_403_beyond_keystone_limit_of_each_resource(
    cloud: Cloud, keystone: Keystone, name: str, flavor: str, limit: int, fit: int
) -> None:
    keystone.own[PROJECT] = {name: limit}
    answers = [post_server(cloud, flavor) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202] * fit + [403] * (3 - fit)
    assert all(is_over(answer, name) for answer in answers[fit:])
    assert len(cloud.rows(schema.servers)) == fit


def test_keystone_limit_ignores_foreign_and_deleted_servers(
    cloud: Cloud, keystone: Keystone
) -> None:
    keystone.registered["servers"] = 1
    keystone.own[OTHER] = {"servers": 2}
    server = cloud.create()
    for _ in range(2):
        cloud.create(token="stranger")
    assert is_over(post_server(cloud), "servers")
    cloud.change(schema.servers, schema.servers.c.id == server, deleted=1)
    assert post_server(cloud).status_code == 202


def test_create_several_servers_creates_as_many_as_keystone_limit_allows(
    cloud: Cloud, keystone: Keystone
) -> None:
    keystone.own[PROJECT] = {"class:DISK_GB": 3}
    assert is_over(post_server(cloud, min_count=4, max_count=5), "class:DISK_GB")
    assert post_server(cloud, min_count=1, max_count=5).status_code == 202
    assert len(cloud.rows(schema.servers)) == 3


def test_concurrent_creates_never_exceed_keystone_limit(cloud: Cloud, keystone: Keystone) -> None:
    # Concurrent requests use the pool, so the double must not check the pool.
    keystone.cloud = None
    keystone.of = lambda project_id: {**EVERYTHING, "class:DISK_GB": 7}  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        statuses = [
            answer.status_code for answer in pool.map(lambda _: post_server(cloud), range(16))
        ]
    assert sorted(statuses) == [202] * 7 + [403] * 9


@pytest.mark.parametrize(
    ("strategy", "resources", "servers", "cores"),
    [
        ("require", ("servers",), 0, -1),
        ("require", (), -1, -1),
        ("ignore", ("servers",), -1, 0),
        ("ignore", ("class:VCPU", "servers", "class:MEMORY_MB", "class:DISK_GB"), -1, -1),
    ],
)
def test_resource_without_keystone_limit_is_0_or_unlimited_as_configured(
    make_cloud: Any, keystone: Keystone, strategy: str, resources: Any, servers: int, cores: int
) -> None:
    keystone.registered = {"server_groups": 1}
    keystone.cloud = cloud = make_cloud(
        keystone=keystone, unregistered=UnregisteredLimits(strategy, resources)
    )
    quota = cloud.call("GET", f"/os-quota-sets/{PROJECT}").json["quota_set"]
    assert (quota["instances"], quota["cores"], quota["floating_ips"]) == (servers, cores, -1)
    answer = post_server(cloud)
    if servers == cores == -1:
        assert answer.status_code == 202
    else:
        assert is_over(
            answer,
            *(["servers"] if servers == 0 else ["class:VCPU", "class:MEMORY_MB", "class:DISK_GB"]),
        )


def test_resize_counts_larger_flavor_until_reverted(cloud: Cloud, keystone: Keystone) -> None:
    keystone.own[PROJECT] = {"class:DISK_GB": 16, "class:VCPU": 5}
    server = cloud.create()
    cloud.set_state(server)
    resize = {"resize": {"flavorRef": "big"}}

    def act(body: Any) -> Any:
        return cloud.call("POST", f"/servers/{server}/action", body)

    keystone.own[PROJECT]["class:DISK_GB"] = 15
    assert is_over(act(resize), "class:DISK_GB")
    keystone.own[PROJECT] = {"class:DISK_GB": 16, "class:CUSTOM_GOLD": 0}
    assert is_over(act({"resize": {"flavorRef": "gold"}}), "class:CUSTOM_GOLD")
    assert act(resize).status_code == 202
    assert is_over(post_server(cloud), "class:DISK_GB"), (
        "the larger flavor counts during the resize"
    )
    cloud.change(schema.migrations, sa.true(), status="finished")
    cloud.set_state(server, "resized", flavor=to_wire(Flavor("1", "m1.tiny", 1, 512, 1)))
    assert is_over(post_server(cloud), "class:DISK_GB"), (
        "and until the resize is confirmed or reverted"
    )
    cloud.change(schema.migrations, sa.true(), status="reverted")
    assert post_server(cloud).status_code == 202


def test_server_with_unreadable_flavor_counts_memory_of_its_row_in_quota(
    cloud: Cloud, keystone: Keystone
) -> None:
    keystone.own[PROJECT] = {"class:MEMORY_MB": 1024}
    server = cloud.create()
    cloud.change(schema.servers, schema.servers.c.id == server, flavor={"id": "1"})
    assert post_server(cloud).status_code == 202
    assert is_over(post_server(cloud), "class:MEMORY_MB"), "the columns of the row count"


# --- limits of groups, keys and parts of servers ---
def test_server_groups_members_and_keypairs_over_keystone_limit_return_403(
    cloud: Cloud, keystone: Keystone
) -> None:
    keystone.registered |= {"server_groups": 1, "server_key_pairs": 1, "server_group_members": 1}
    group = {"server_group": {"name": "g", "policies": ["affinity"]}}
    created, second = (cloud.call("POST", "/os-server-groups", group) for _ in range(2))
    assert (created.status_code, second.status_code) == (200, 403)
    keys = [
        cloud.call("POST", "/os-keypairs", {"keypair": {"name": name, "public_key": SSH}})
        for name in "ab"
    ]
    assert [answer.status_code for answer in keys] == [200, 403]
    body = {
        "server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"},
        "os:scheduler_hints": {"group": created.json["server_group"]["id"]},
    }
    answers = [cloud.call("POST", "/servers", body) for _ in range(2)]
    assert answers[0].status_code == 202 and is_over(answers[1], "server_group_members")


def test_metadata_and_files_over_keystone_limit_return_403(
    cloud: Cloud, keystone: Keystone
) -> None:
    keystone.registered |= {
        "server_metadata_items": 1,
        "server_injected_files": 1,
        "server_injected_file_content_bytes": 3,
        "server_injected_file_path_bytes": 2,
    }
    file = {"path": "/a", "contents": "YWJj"}
    server = cloud.create(metadata={"a": "1"}, personality=[file])
    for fields in (
        {"metadata": {"a": "1", "b": "2"}},
        {"personality": [file, file]},
        {"personality": [{**file, "path": "/ab"}]},
        {"personality": [{**file, "contents": "YWJjZA=="}]},
    ):
        assert post_server(cloud, **fields).status_code == 403, fields
    cloud.set_state(server)
    path = f"/servers/{server}/metadata"
    assert cloud.call("POST", path, {"metadata": {"b": "2"}}).status_code == 403
    rebuild = {"rebuild": {"imageRef": IMAGE, "metadata": {"a": "1", "b": "2"}}}
    assert cloud.call("POST", f"/servers/{server}/action", rebuild).status_code == 403
    keystone.registered["server_metadata_items"] = -1
    assert cloud.call("POST", path, {"metadata": {"b": "2"}}).status_code == 200


# --- Keystone without an answer ---
def test_requests_needing_limits_return_503_when_keystone_is_down(
    cloud: Cloud, keystone: Keystone
) -> None:
    server = cloud.create(metadata={"a": "1"})
    cloud.set_state(server)
    keystone.down = True
    action = f"/servers/{server}/action"
    for method, path, body in (
        ("POST", "/servers", {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}}),
        ("POST", action, {"resize": {"flavorRef": "big"}}),
        ("POST", action, {"rebuild": {"imageRef": IMAGE, "metadata": {"a": "2"}}}),
        ("POST", f"/servers/{server}/metadata", {"metadata": {"b": "2"}}),
        ("POST", "/os-keypairs", {"keypair": {"name": "k", "public_key": SSH}}),
        ("POST", "/os-server-groups", {"server_group": {"name": "g", "policies": ["affinity"]}}),
        ("GET", f"/os-quota-sets/{PROJECT}", None),
        ("GET", "/limits", None),
        ("GET", f"/os-quota-sets/{PROJECT}/detail", None),
        ("GET", f"/os-quota-sets/{PROJECT}/defaults", None),
    ):
        answer = cloud.call(method, path, body)
        assert answer.status_code == 503, path
        assert "does not return the limits" in answer.json["serviceUnavailable"]["message"]
    assert len(cloud.rows(schema.servers)) == 1
    for method, path, body, status in (
        ("GET", "/servers/detail", None, 200),
        ("DELETE", f"/servers/{server}/metadata/a", None, 204),
        ("POST", action, {"rebuild": {"imageRef": IMAGE}}, 202),
        ("DELETE", f"/servers/{server}", None, 204),
    ):
        assert cloud.call(method, path, body).status_code == status, path


# --- the other driver ---
def test_metadata_and_files_over_quota_set_return_403_with_database_driver(make_cloud: Any) -> None:
    cloud: Cloud = make_cloud()
    limits = {"metadata_items": 1, "injected_files": 0}
    assert (
        cloud.call(
            "PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": limits}, token="admin"
        ).status_code
        == 200
    )
    server = cloud.create(metadata={"a": "1"})
    assert (
        cloud.call("POST", f"/servers/{server}/metadata", {"metadata": {"b": "2"}}).status_code
        == 403
    )
    assert post_server(cloud, metadata={"a": "1", "b": "2"}).status_code == 403
    assert post_server(cloud, personality=[{"path": "/a", "contents": ""}]).status_code == 403
