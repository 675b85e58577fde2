# SPDX-License-Identifier: Apache-2.0
"""Proxies to the network service up to 2.35: networks, security groups, rules and floating IPs."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import ids
from compute_api.compute.routes import ROUTES
from tests.api.conftest import OTHER, PROJECT, Cloud
from tests.api.networks import Networks

PROXIES = [
    route
    for route in ROUTES
    if route.path.startswith(
        ("/os-networks", "/os-tenant-networks", "/os-security-group", "/os-floating-ip")
    )
]
NOWHERE, SERVER = ids.new(), ids.new()


def body_of(path: str) -> dict[str, Any]:
    return {
        "/os-security-groups": {"security_group": {"name": "web", "description": "d"}},
        "/os-security-group-rules": {
            "security_group_rule": {
                "parent_group_id": NOWHERE,
                "ip_protocol": "tcp",
                "from_port": 1,
                "to_port": 2,
            }
        },
        "/os-floating-ips": {"pool": "public"},
    }["/" + path.split("/")[1]]


def call_route(cloud: Cloud, route: Any, **more: Any) -> Any:
    path = "/".join(NOWHERE if part.startswith("{") else part for part in route.path.split("/"))
    return cloud.call(
        route.method, path, body_of(path) if route.method in ("POST", "PUT") else None, **more
    )


@pytest.mark.parametrize("route", PROXIES, ids=lambda route: f"{route.method} {route.path}")
def test_network_proxies_need_version_below_2_36_role_and_network_service(
    networked_cloud: Cloud, cloud: Cloud, networks: Networks, route: Any
) -> None:
    assert call_route(networked_cloud, route, mv="2.36").status_code == 404
    assert call_route(networked_cloud, route, mv="2.104", token="admin").status_code == 404
    assert call_route(networked_cloud, route, token="reader").status_code == (
        403 if route.method != "GET" else 404 if "{" in route.path else 200
    )
    answer = call_route(cloud, route)
    if "{" in route.path:
        assert answer.status_code == 404
    elif route.method == "POST":
        assert answer.status_code == 501
        assert "no network service" in answer.json["notImplemented"]["message"]
    else:
        assert (answer.status_code, list(answer.json.values())) == (200, [[]])
    networks.down = True
    assert call_route(networked_cloud, route, mv="2.35").status_code == 503


# --- networks ---
SHOWN = """bridge bridge_interface broadcast cidr cidr_v6 created_at deleted deleted_at dhcp_server dhcp_start dns1 dns2
    enable_dhcp gateway gateway_v6 host id injected label mtu multi_host netmask netmask_v6 priority project_id
    rxtx_base share_address updated_at vlan vpn_private_address vpn_public_address vpn_public_port"""


def test_os_networks_and_os_tenant_networks_are_listed_and_shown_by_id(
    networked_cloud: Cloud, networks: Networks
) -> None:
    red, blue = (
        networks.add_network("red", PROJECT),
        networks.add_network("blue", OTHER, shared=True),
    )
    foreign, public = (
        networks.add_network("foreign", OTHER),
        networks.add_network("public", OTHER, external=True),
    )
    items = networked_cloud.call("GET", "/os-networks").json["networks"]
    assert [(network["id"], network["label"]) for network in items] == [
        (red, "red"),
        (blue, "blue"),
        (public, "public"),
    ]
    assert set(items[0]) == set(SHOWN.split())
    assert {value for key, value in items[0].items() if key not in ("id", "label")} == {None}
    assert networked_cloud.call("GET", f"/os-networks/{red}").json == {"network": items[0]}
    tenants = networked_cloud.call("GET", "/os-tenant-networks").json["networks"]
    assert tenants == [
        {"id": network, "label": name, "cidr": "None"}
        for network, name in ((red, "red"), (blue, "blue"), (public, "public"))
    ]
    assert networked_cloud.call("GET", f"/os-tenant-networks/{blue}").json == {
        "network": tenants[1]
    }
    for noun in ("os-networks", "os-tenant-networks"):
        for missing in (foreign, "red", "a%3Fb"):
            assert networked_cloud.call("GET", f"/{noun}/{missing}").status_code == 404


def test_network_changes_return_410(networked_cloud: Cloud) -> None:
    for method, path in (
        ("POST", "/os-networks"),
        ("DELETE", f"/os-networks/{NOWHERE}"),
        ("POST", "/os-networks/add"),
        ("POST", f"/os-networks/{NOWHERE}/action"),
        ("POST", "/os-tenant-networks"),
        ("DELETE", f"/os-tenant-networks/{NOWHERE}"),
    ):
        for mv in ("2.1", "2.104"):
            assert networked_cloud.call(method, path, {}, mv=mv).status_code == 410, (method, path)


# --- security groups ---
def add_group(cloud: Cloud, name: str = "web", **more: Any) -> Any:
    return cloud.call(
        "POST",
        "/os-security-groups",
        {"security_group": {"name": name, "description": "d"}},
        **more,
    )


def test_security_group_is_created_updated_and_deleted_by_its_project(
    networked_cloud: Cloud, networks: Networks
) -> None:
    answer = add_group(networked_cloud, mv="2.35")
    assert answer.status_code == 200
    group = answer.json["security_group"]
    assert group == {
        "id": group["id"],
        "name": "web",
        "description": "d",
        "tenant_id": PROJECT,
        "rules": [],
    }
    path = f"/os-security-groups/{group['id']}"
    assert networked_cloud.call("GET", path).json == {"security_group": group}
    answer_to_update = networked_cloud.call(
        "PUT", path, {"security_group": {"name": "www", "description": "e", "more": 1}}
    )
    assert answer_to_update.json == {"security_group": {**group, "name": "www", "description": "e"}}
    for method in ("GET", "DELETE"):
        assert networked_cloud.call(method, path, token="stranger").status_code == 404
    assert networked_cloud.call("DELETE", path).status_code == 202
    for method, body in (
        ("GET", None),
        ("DELETE", None),
        ("PUT", {"security_group": {"name": "x", "description": ""}}),
    ):
        assert networked_cloud.call(method, path, body).status_code == 404


def test_list_security_groups_filters_by_project_and_pages(
    networked_cloud: Cloud, networks: Networks
) -> None:
    for name, project in (("web", PROJECT), ("db", PROJECT), ("theirs", OTHER)):
        networks.add_group(name, project)

    def list_names(query: str = "", token: str = "user") -> list[str]:
        answer = networked_cloud.call("GET", f"/os-security-groups{query}", token=token)
        assert answer.status_code == 200, answer.text
        return [group["name"] for group in answer.json["security_groups"]]

    assert list_names() == ["db", "web"]
    assert list_names("?all_tenants=1") == ["db", "web"]
    assert list_names("?all_tenants=1", "admin") == ["db", "web", "theirs"]
    assert list_names(token="admin") == []
    assert (list_names("?limit=1"), list_names("?offset=1"), list_names("?limit=1&offset=2")) == (
        ["db"],
        ["web"],
        [],
    )
    assert list_names("?limit=0&other=x") == ["db", "web"]
    assert networked_cloud.call("GET", "/os-security-groups?offset=x").status_code == 400


def test_security_group_requests_refuse_bad_names_and_ids_and_full_quota(
    networked_cloud: Cloud, networks: Networks
) -> None:
    used = networks.add_group("used", PROJECT)
    networks.add_port(networks.add_network("red", PROJECT), PROJECT, security_groups=[used])
    assert networked_cloud.call("DELETE", f"/os-security-groups/{used}").status_code == 400
    assert add_group(networked_cloud, "default").status_code == 400
    assert (
        networked_cloud.call(
            "PUT",
            f"/os-security-groups/{used}",
            {"security_group": {"name": "default", "description": ""}},
        ).status_code
        == 400
    )
    for method in ("GET", "PUT", "DELETE"):
        answer = networked_cloud.call(
            method, "/os-security-groups/web", body_of("/os-security-groups")
        )
        assert answer.status_code == 400
        assert "web is not a UUID" in answer.json["badRequest"]["message"]
    for body in (
        {},
        {"security_group": None},
        {"security_group": {"name": "x"}},
        {"security_group": {"name": "x" * 256, "description": ""}},
    ):
        assert networked_cloud.call("POST", "/os-security-groups", body).status_code == 400
    networks.limits["security-groups"] = 1
    assert add_group(networked_cloud).status_code == 403


# --- their rules ---
def add_rule(cloud: Cloud, group: str, token: str = "user", **rule: Any) -> Any:
    return cloud.call(
        "POST",
        "/os-security-group-rules",
        {"security_group_rule": {"parent_group_id": group, **rule}},
        token=token,
    )


SSH = {"ip_protocol": "tcp", "from_port": 22, "to_port": 22, "cidr": "10.0.0.0/8"}


@pytest.mark.parametrize(
    ("fields", "stored", "shown_fields"),
    [
        (SSH, ("IPv4", "tcp", 22, 22, "10.0.0.0/8"), SSH),
        (
            {**SSH, "from_port": "80", "to_port": "443", "cidr": None, "ip_protocol": "UDP"},
            ("IPv4", "udp", 80, 443, "0.0.0.0/0"),
            {"ip_protocol": "udp", "from_port": 80, "to_port": 443, "cidr": "0.0.0.0/0"},
        ),
        (
            {**SSH, "cidr": "10.0.0.7"},
            ("IPv4", "tcp", 22, 22, "10.0.0.7/32"),
            {**SSH, "cidr": "10.0.0.7/32"},
        ),
        (
            {**SSH, "cidr": "10.2.3.124/24"},
            ("IPv4", "tcp", 22, 22, "10.2.3.124/24"),
            {**SSH, "cidr": "10.2.3.124/24"},
        ),
        (
            {**SSH, "cidr": "fd00::/8"},
            ("IPv6", "tcp", 22, 22, "fd00::/8"),
            {**SSH, "cidr": "fd00::/8"},
        ),
        ({**SSH, "cidr": "::/0"}, ("IPv6", "tcp", 22, 22, "::/0"), {**SSH, "cidr": "::/0"}),
        (
            {"ip_protocol": "icmp", "from_port": -1, "to_port": -1},
            ("IPv4", "icmp", None, None, "0.0.0.0/0"),
            {"ip_protocol": "icmp", "from_port": -1, "to_port": -1, "cidr": "0.0.0.0/0"},
        ),
        (
            {"ip_protocol": "icmp", "from_port": 8, "to_port": 0},
            ("IPv4", "icmp", 8, 0, "0.0.0.0/0"),
            {"ip_protocol": "icmp", "from_port": 8, "to_port": 0, "cidr": "0.0.0.0/0"},
        ),
    ],
)
def test_create_security_group_rule_for_addresses_stores_and_shows_cidr(
    networked_cloud: Cloud, networks: Networks, fields: Any, stored: Any, shown_fields: Any
) -> None:
    group = networks.add_group("web", PROJECT)
    answer = add_rule(networked_cloud, group, **fields)
    assert answer.status_code == 200, answer.text
    [rule] = networks.groups[0]["security_group_rules"]
    assert (
        rule["ethertype"],
        rule["protocol"],
        rule["port_range_min"],
        rule["port_range_max"],
        rule["remote_ip_prefix"],
    ) == stored
    assert (rule["direction"], rule["security_group_id"], rule["remote_group_id"]) == (
        "ingress",
        group,
        None,
    )
    expected = {
        "id": rule["id"],
        "parent_group_id": group,
        "group": {},
        "ip_range": {"cidr": shown_fields["cidr"]},
        **{key: shown_fields[key] for key in ("ip_protocol", "from_port", "to_port")},
    }
    assert answer.json == {"security_group_rule": expected}
    assert networked_cloud.call("GET", f"/os-security-groups/{group}").json["security_group"][
        "rules"
    ] == [expected]
    # The rule exists already.
    assert add_rule(networked_cloud, group, **fields).status_code == 400
    path = f"/os-security-group-rules/{rule['id']}"
    assert [networked_cloud.call("DELETE", path).status_code for _ in range(2)] == [202, 404]


@pytest.mark.parametrize(
    ("fields", "stored", "ports"),
    [
        ({}, (None, None, None), (None, None)),
        ({"ip_protocol": "tcp"}, ("tcp", None, None), (1, 65535)),
        ({"ip_protocol": "icmp"}, ("icmp", None, None), (-1, -1)),
        ({"ip_protocol": "udp", "from_port": 53, "to_port": 53}, ("udp", 53, 53), (53, 53)),
    ],
)
def test_create_security_group_rule_for_group_stores_and_shows_group(
    networked_cloud: Cloud, networks: Networks, fields: Any, stored: Any, ports: Any
) -> None:
    web, db = networks.add_group("web", PROJECT), networks.add_group("db", PROJECT)
    shown_rule = add_rule(networked_cloud, db, group_id=web, **fields).json["security_group_rule"]
    [rule] = networks.groups[1]["security_group_rules"]
    assert (rule["protocol"], rule["port_range_min"], rule["port_range_max"]) == stored
    assert (rule["remote_group_id"], rule["remote_ip_prefix"]) == (web, None)
    assert (shown_rule["group"], shown_rule["ip_range"]) == (
        {"name": "web", "tenant_id": PROJECT},
        {},
    )
    assert (shown_rule["from_port"], shown_rule["to_port"]) == ports
    assert networked_cloud.call("GET", f"/os-security-groups/{db}").json["security_group"][
        "rules"
    ] == [shown_rule]


@pytest.mark.parametrize(
    "change",
    [
        {"ip_protocol": None},
        {"from_port": None},
        {"to_port": None},
        {"ip_protocol": "tcpip"},
        {"from_port": 0},
        {"from_port": -1, "to_port": -1},
        {"from_port": 23},
        {"to_port": 65536},
        {"from_port": "x"},
        {"from_port": True},
        {"ip_protocol": "icmp", "to_port": 256},
        {"cidr": "10.0.0.0/33"},
        {"cidr": "10.0.0.0/0"},
        {"cidr": 5},
        {"cidr": "x"},
        {"parent_group_id": "web"},
        {"group_id": "web"},
        {"group_id": "there", "from_port": None},
        {"group_id": "there", "ip_protocol": None},
        {"group_id": "there", "ip_protocol": "x"},
    ],
)
def test_create_security_group_rule_with_invalid_fields_returns_400(
    networked_cloud: Cloud, networks: Networks, change: dict[str, Any]
) -> None:
    web = networks.add_group("web", PROJECT)
    group_ids = {"there": web}
    rule = {"parent_group_id": web, **SSH, **change}
    rule["group_id"] = group_ids.get(rule.get("group_id"), rule.get("group_id"))
    answer = networked_cloud.call("POST", "/os-security-group-rules", {"security_group_rule": rule})
    assert answer.status_code == 400, answer.text
    assert networks.groups[0]["security_group_rules"] == []


def test_security_group_rules_of_unknown_foreign_or_full_group_are_refused(
    networked_cloud: Cloud, networks: Networks
) -> None:
    web, foreign = networks.add_group("web", PROJECT), networks.add_group("theirs", OTHER)
    assert add_rule(networked_cloud, NOWHERE, **SSH).status_code == 404
    assert add_rule(networked_cloud, foreign, **SSH).status_code == 404
    assert add_rule(networked_cloud, web, group_id=foreign).status_code == 404
    assert networked_cloud.call("DELETE", "/os-security-group-rules/5").status_code == 400
    networks.limits["security-group-rules"] = 0
    assert add_rule(networked_cloud, web, **SSH).status_code == 403


# --- floating IPs ---
@pytest.fixture
def public(networks: Networks) -> str:
    """Return the id of an external network with five addresses."""
    return networks.add_network("public", OTHER, "172.24.4.0/29", external=True)


def test_floating_ip_is_allocated_shown_with_server_and_released(
    networked_cloud: Cloud, networks: Networks, public: str
) -> None:
    assert networked_cloud.call("GET", "/os-floating-ip-pools", token="nobody").json == {
        "floating_ip_pools": [{"name": "public"}]
    }
    answer = networked_cloud.call("POST", "/os-floating-ips", {"pool": "public"}, mv="2.35")
    assert answer.status_code == 200, answer.text
    floating_ip = answer.json["floating_ip"]
    assert floating_ip == {
        "id": floating_ip["id"],
        "ip": "172.24.4.2",
        "pool": "public",
        "fixed_ip": None,
        "instance_id": None,
    }
    port = networks.add_port(
        networks.add_network("red", PROJECT), PROJECT, "10.0.0.9", device_id=SERVER
    )
    networks.floating_ips[0].update(port_id=port, fixed_ip_address="10.0.0.9")
    associated = {**floating_ip, "fixed_ip": "10.0.0.9", "instance_id": SERVER}
    path = f"/os-floating-ips/{floating_ip['id']}"
    assert networked_cloud.call("GET", path).json == {"floating_ip": associated}
    assert networked_cloud.call("GET", "/os-floating-ips").json == {"floating_ips": [associated]}
    assert networked_cloud.call("GET", "/os-floating-ips", token="admin").json == {
        "floating_ips": []
    }
    for method in ("GET", "DELETE"):
        assert networked_cloud.call(method, path, token="stranger").status_code == 404
    assert [networked_cloud.call("DELETE", path).status_code for _ in range(2)] == [202, 404]
    assert networked_cloud.call("GET", "/os-floating-ips/5").status_code == 404


def test_allocate_floating_ip_chooses_pool_by_name_id_or_default(
    networked_cloud: Cloud, networks: Networks, public: str
) -> None:
    """Unknown, ambiguous and full pools, invalid bodies and a used quota are refused."""

    def allocate(body: Any) -> Any:
        answer = networked_cloud.call(
            "POST", "/os-floating-ips", body, raw=b"null" if body is None else None
        )
        return (
            answer.json["floating_ip"]["pool"] if answer.status_code == 200 else answer.status_code
        )

    assert (allocate(None), allocate({}), allocate({"pool": None}), allocate({"pool": public})) == (
        "public",
    ) * 4
    assert (allocate({"pool": "private"}), allocate({"pool": 5}), allocate([])) == (404, 400, 400)
    assert allocate({"pool": "public"}) == "public"
    # No address is left.
    assert allocate({"pool": "public"}) == 404
    other = networks.add_network("public", OTHER, "172.24.5.0/29", external=True)
    assert (allocate(None), allocate({"pool": "public"}), allocate({"pool": other})) == (
        400,
        400,
        "public",
    )
    networks.networks_by_id[other]["is_default"] = True
    assert allocate(None) == "public"
    networks.add_network("nova", OTHER, "172.24.6.0/29", external=True)
    assert allocate(None) == "nova"
    networks.limits["floatingips"] = 0
    assert allocate(None) == 403


def test_floating_ip_pools_without_external_network_are_empty(networked_cloud: Cloud) -> None:
    assert networked_cloud.call("GET", "/os-floating-ip-pools").json == {"floating_ip_pools": []}
    assert networked_cloud.call("POST", "/os-floating-ips", {}).status_code == 404
