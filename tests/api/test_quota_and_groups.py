# SPDX-License-Identifier: Apache-2.0
"""Quota sets, limits and server groups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import OTHER, PROJECT, Cloud


# --- server groups ---
@pytest.mark.parametrize(
    ("mv", "fields", "keys"),
    [
        ("2.1", {"policies": ["affinity"]}, {"id", "name", "policies", "members", "metadata"}),
        (
            "2.13",
            {"policies": ["affinity"]},
            {"id", "name", "policies", "members", "metadata", "project_id", "user_id"},
        ),
        (
            "2.15",
            {"policies": ["soft-affinity"]},
            {"id", "name", "policies", "members", "metadata", "project_id", "user_id"},
        ),
        (
            "2.64",
            {"policy": "anti-affinity", "rules": {"max_server_per_host": 2}},
            {"id", "name", "policy", "rules", "members", "project_id", "user_id"},
        ),
    ],
)
def test_server_group_has_the_fields_of_each_microversion(
    cloud: Cloud, mv: str, fields: dict[str, Any], keys: set[str]
) -> None:
    group = cloud.call(
        "POST", "/os-server-groups", {"server_group": {"name": "g", **fields}}, mv=mv
    ).json["server_group"]
    assert set(group) == keys
    assert {key: group[key] for key in fields} == fields
    assert (
        cloud.call("GET", f"/os-server-groups/{group['id']}", mv=mv).json["server_group"] == group
    )
    assert cloud.call("GET", "/os-server-groups", mv=mv).json["server_groups"] == [group]
    assert (
        cloud.call("GET", "/os-server-groups", mv=mv, token="stranger").json["server_groups"] == []
    )
    assert (
        cloud.call("GET", f"/os-server-groups/{group['id']}", mv=mv, token="stranger").status_code
        == 404
    )
    assert cloud.call("GET", "/os-server-groups?all_projects=1", mv=mv, token="admin").json[
        "server_groups"
    ] == [group]
    assert (
        cloud.call("DELETE", f"/os-server-groups/{group['id']}", mv=mv, token="reader").status_code
        == 403
    )
    assert cloud.call("DELETE", f"/os-server-groups/{group['id']}", mv=mv).status_code == 204
    assert cloud.call("DELETE", f"/os-server-groups/{group['id']}", mv=mv).status_code == 404


@pytest.mark.parametrize(
    ("mv", "fields"),
    [
        ("2.14", {"policies": ["soft-affinity"]}),
        ("2.63", {"policy": "affinity"}),
        ("2.64", {"policies": ["affinity"]}),
        ("2.64", {"policy": "affinity", "rules": {"max_server_per_host": 1}}),
        ("2.1", {"policies": []}),
        ("2.64", {"policy": "anti-affinity", "rules": {"max_server_per_host": 0}}),
        ("2.1", {"policies": ["near", "far"]}),
    ],
)
def test_create_server_group_with_invalid_policy_or_rules_returns_400(
    cloud: Cloud, mv: str, fields: dict[str, Any]
) -> None:
    assert (
        cloud.call(
            "POST", "/os-server-groups", {"server_group": {"name": "g", **fields}}, mv=mv
        ).status_code
        == 400
    )


def test_create_server_group_over_quota_returns_403(make_cloud: Any) -> None:
    cloud: Cloud = make_cloud()
    cloud.call(
        "PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"server_groups": 1}}, token="admin"
    )
    body = {"server_group": {"name": "g", "policies": ["affinity"]}}
    assert [cloud.call("POST", "/os-server-groups", body).status_code for _ in range(2)] == [
        200,
        403,
    ]


# --- quota sets and limits ---
def test_quota_limit_prefers_user_then_project_class_configuration(cloud: Cloud) -> None:
    def read_cores(query: str = "", path: str = f"/os-quota-sets/{PROJECT}") -> int:
        return int(cloud.call("GET", path + query, token="admin").json["quota_set"]["cores"])

    def set_cores(path: str, value: int, name: str = "quota_set") -> Any:
        return cloud.call("PUT", path, {name: {"cores": value}}, token="admin")

    assert read_cores() == 20
    assert (
        set_cores("/os-quota-class-sets/default", 30, "quota_class_set").json["quota_class_set"][
            "cores"
        ]
        == 30
    )
    assert (read_cores(), read_cores(path=f"/os-quota-sets/{OTHER}/defaults")) == (30, 30)
    assert set_cores(f"/os-quota-sets/{PROJECT}", 40).json["quota_set"]["cores"] == 40
    assert set_cores(f"/os-quota-sets/{PROJECT}?user_id=u1", 5).json["quota_set"]["cores"] == 5
    assert (read_cores(), read_cores("?user_id=u1"), read_cores("?user_id=u2")) == (40, 5, 40)
    assert (
        cloud.call("DELETE", f"/os-quota-sets/{PROJECT}?user_id=u1", token="admin").status_code
        == 202
    )
    assert read_cores("?user_id=u1") == 40
    assert cloud.call("DELETE", f"/os-quota-sets/{PROJECT}", token="admin").status_code == 202
    assert read_cores() == 30
    set_cores("/os-quota-class-sets/gold", 99, "quota_class_set")
    assert read_cores() == 30, "only the class default has an effect"


@pytest.mark.parametrize(("limit", "status"), [(20, 200), (21, 400), (-1, 400)])
def test_quota_limit_of_user_over_project_limit_needs_force(
    cloud: Cloud, limit: int, status: int
) -> None:
    path = f"/os-quota-sets/{PROJECT}?user_id=u1"
    answer = cloud.call("PUT", path, {"quota_set": {"cores": limit}}, token="admin")
    assert answer.status_code == status
    if status == 400:
        assert "must be less than or equal to 20" in answer.json["badRequest"]["message"]
        forced = {"quota_set": {"cores": limit, "force": True}}
        assert cloud.call("PUT", path, forced, token="admin").status_code == 200


def test_quota_class_accepts_but_hides_server_group_limits_before_2_50(cloud: Cloud) -> None:
    path, groups = "/os-quota-class-sets/default", {"server_groups": 3, "server_group_members": 4}
    answer = cloud.call("PUT", path, {"quota_class_set": groups}, mv="2.49", token="admin")
    assert answer.status_code == 200 and not groups.keys() & answer.json["quota_class_set"].keys()
    assert (
        groups.items()
        <= cloud.call("GET", path, mv="2.50", token="admin").json["quota_class_set"].items()
    )


@pytest.mark.parametrize(
    ("version", "count"), [(1, 14), (35, 14), (36, 10), (56, 10), (57, 7), (104, 7)]
)
def test_quota_set_has_the_resources_of_each_microversion(
    cloud: Cloud, version: int, count: int
) -> None:
    quota = cloud.call("GET", f"/os-quota-sets/{PROJECT}", mv=f"2.{version}").json["quota_set"]
    assert len(quota) == count + 1
    assert quota["id"] == PROJECT
    detail = cloud.call("GET", f"/os-quota-sets/{PROJECT}/detail", mv=f"2.{version}").json[
        "quota_set"
    ]
    assert set(detail) == set(quota)
    assert detail["cores"] == {"limit": 20, "in_use": 0, "reserved": 0}
    for resource, is_refused in (
        ("floating_ips", version > 35),
        ("injected_files", version > 56),
        ("ram", False),
    ):
        answer = cloud.call(
            "PUT",
            f"/os-quota-sets/{PROJECT}",
            {"quota_set": {resource: 5, "force": True}},
            mv=f"2.{version}",
            token="admin",
        )
        assert answer.status_code == (400 if is_refused else 200), resource


def test_quota_limit_below_usage_needs_force(cloud: Cloud) -> None:
    cloud.create()
    path = f"/os-quota-sets/{PROJECT}"
    answer = cloud.call("PUT", path, {"quota_set": {"instances": 0}}, token="admin")
    assert answer.json["badRequest"]["message"] == (
        "Quota limit 0 for instances must be greater than or equal to already used 1."
    )
    assert (
        cloud.call(
            "PUT", path, {"quota_set": {"instances": 0, "force": "True"}}, token="admin"
        ).status_code
        == 200
    )
    assert cloud.call("PUT", path, {"quota_set": {"instances": 1}}).status_code == 403
    assert cloud.call("GET", f"/os-quota-sets/{OTHER}").status_code == 403


@pytest.mark.parametrize(
    ("version", "count"), [(1, 19), (35, 19), (36, 14), (38, 14), (39, 13), (56, 13), (57, 11)]
)
def test_limits_have_the_fields_of_each_microversion(
    cloud: Cloud, version: int, count: int
) -> None:
    cloud.create()
    limits = cloud.call("GET", "/limits?reserved=False", mv=f"2.{version}").json["limits"]
    assert limits["rate"] == []
    assert len(limits["absolute"]) == count
    assert (limits["absolute"]["maxTotalInstances"], limits["absolute"]["totalInstancesUsed"]) == (
        10,
        1,
    )
    assert limits["absolute"]["totalRAMUsed"] == 512


def test_limits_of_another_project_return_403_except_to_admin(cloud: Cloud) -> None:
    cloud.create()
    assert cloud.call("GET", f"/limits?tenant_id={OTHER}").status_code == 403
    limits = cloud.call("GET", f"/limits?tenant_id={PROJECT}", token="admin").json["limits"][
        "absolute"
    ]
    assert limits["totalInstancesUsed"] == 1
