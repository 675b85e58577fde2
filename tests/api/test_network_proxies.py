# SPDX-License-Identifier: Apache-2.0
"""Proxies to the network service until 2.35: networks, security groups and their rules, floating
IPs and pools."""

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


def ask(cloud: Cloud, route: Any, **more: Any) -> Any:
    path = "/".join(NOWHERE if part.startswith("{") else part for part in route.path.split("/"))
    return cloud.call(
        route.method, path, body_of(path) if route.method in ("POST", "PUT") else None, **more
    )


@pytest.mark.parametrize("route", PROXIES, ids=lambda route: f"{route.method} {route.path}")
def test_every_proxy(wired: Cloud, cloud: Cloud, networks: Networks, route: Any) -> None:
    assert ask(wired, route, mv="2.36").status_code == 404
    assert ask(wired, route, mv="2.104", token="admin").status_code == 404
    assert ask(wired, route, token="reader").status_code == (
        403 if route.method != "GET" else 404 if "{" in route.path else 200
    )
    without = ask(cloud, route)
    if "{" in route.path:
        assert without.status_code == 404
    elif route.method == "POST":
        assert without.status_code == 501
        assert "no network service" in without.json["notImplemented"]["message"]
    else:
        assert (without.status_code, list(without.json.values())) == (200, [[]])
    networks.down = True
    assert ask(wired, route, mv="2.35").status_code == 503


# --- networks ---
SHOWN = """bridge bridge_interface broadcast cidr cidr_v6 created_at deleted deleted_at dhcp_server dhcp_start dns1 dns2
    enable_dhcp gateway gateway_v6 host id injected label mtu multi_host netmask netmask_v6 priority project_id
    rxtx_base share_address updated_at vlan vpn_private_address vpn_public_address vpn_public_port"""


def test_networks_by_id_and_name(wired: Cloud, networks: Networks) -> None:
    red, blue = (
        networks.add_network("red", PROJECT),
        networks.add_network("blue", OTHER, shared=True),
    )
    foreign, public = (
        networks.add_network("foreign", OTHER),
        networks.add_network("public", OTHER, external=True),
    )
    found = wired.call("GET", "/os-networks").json["networks"]
    assert [(one["id"], one["label"]) for one in found] == [
        (red, "red"),
        (blue, "blue"),
        (public, "public"),
    ]
    assert set(found[0]) == set(SHOWN.split())
    assert {value for key, value in found[0].items() if key not in ("id", "label")} == {None}
    assert wired.call("GET", f"/os-networks/{red}").json == {"network": found[0]}
    tenants = wired.call("GET", "/os-tenant-networks").json["networks"]
    assert tenants == [
        {"id": one, "label": name, "cidr": "None"}
        for one, name in ((red, "red"), (blue, "blue"), (public, "public"))
    ]
    assert wired.call("GET", f"/os-tenant-networks/{blue}").json == {"network": tenants[1]}
    for noun in ("os-networks", "os-tenant-networks"):
        for missing in (foreign, "red", "a%3Fb"):
            assert wired.call("GET", f"/{noun}/{missing}").status_code == 404


def test_what_is_gone_of_them_is_gone(wired: Cloud) -> None:
    for method, path in (
        ("POST", "/os-networks"),
        ("DELETE", f"/os-networks/{NOWHERE}"),
        ("POST", "/os-networks/add"),
        ("POST", f"/os-networks/{NOWHERE}/action"),
        ("POST", "/os-tenant-networks"),
        ("DELETE", f"/os-tenant-networks/{NOWHERE}"),
    ):
        for mv in ("2.1", "2.104"):
            assert wired.call(method, path, {}, mv=mv).status_code == 410, (method, path)


# --- security groups ---
def add_group(cloud: Cloud, name: str = "web", **more: Any) -> Any:
    return cloud.call(
        "POST",
        "/os-security-groups",
        {"security_group": {"name": name, "description": "d"}},
        **more,
    )


def test_the_life_of_a_group(wired: Cloud, networks: Networks) -> None:
    answer = add_group(wired, mv="2.35")
    assert answer.status_code == 200
    made = answer.json["security_group"]
    assert made == {
        "id": made["id"],
        "name": "web",
        "description": "d",
        "tenant_id": PROJECT,
        "rules": [],
    }
    path = f"/os-security-groups/{made['id']}"
    assert wired.call("GET", path).json == {"security_group": made}
    changed = wired.call(
        "PUT", path, {"security_group": {"name": "www", "description": "e", "more": 1}}
    )
    assert changed.json == {"security_group": {**made, "name": "www", "description": "e"}}
    for method in ("GET", "DELETE"):
        assert wired.call(method, path, token="stranger").status_code == 404
    assert wired.call("DELETE", path).status_code == 202
    for method, body in (
        ("GET", None),
        ("DELETE", None),
        ("PUT", {"security_group": {"name": "x", "description": ""}}),
    ):
        assert wired.call(method, path, body).status_code == 404


def test_groups_of_the_project_and_of_everybody(wired: Cloud, networks: Networks) -> None:
    for name, project in (("web", PROJECT), ("db", PROJECT), ("theirs", OTHER)):
        networks.add_group(name, project)

    def listed(query: str = "", token: str = "user") -> list[str]:
        answer = wired.call("GET", f"/os-security-groups{query}", token=token)
        assert answer.status_code == 200, answer.text
        return [group["name"] for group in answer.json["security_groups"]]

    assert listed() == ["db", "web"]
    assert listed("?all_tenants=1") == ["db", "web"]
    assert listed("?all_tenants=1", "admin") == ["db", "web", "theirs"]
    assert listed(token="admin") == []
    assert (listed("?limit=1"), listed("?offset=1"), listed("?limit=1&offset=2")) == (
        ["db"],
        ["web"],
        [],
    )
    assert listed("?limit=0&other=x") == ["db", "web"]
    assert wired.call("GET", "/os-security-groups?offset=x").status_code == 400


def test_groups_that_cannot_be(wired: Cloud, networks: Networks) -> None:
    used = networks.add_group("used", PROJECT)
    networks.add_port(networks.add_network("red", PROJECT), PROJECT, security_groups=[used])
    assert wired.call("DELETE", f"/os-security-groups/{used}").status_code == 400
    assert add_group(wired, "default").status_code == 400
    assert (
        wired.call(
            "PUT",
            f"/os-security-groups/{used}",
            {"security_group": {"name": "default", "description": ""}},
        ).status_code
        == 400
    )
    for method in ("GET", "PUT", "DELETE"):
        answer = wired.call(method, "/os-security-groups/web", body_of("/os-security-groups"))
        assert answer.status_code == 400
        assert "web is not a UUID" in answer.json["badRequest"]["message"]
    for body in (
        {},
        {"security_group": None},
        {"security_group": {"name": "x"}},
        {"security_group": {"name": "x" * 256, "description": ""}},
    ):
        assert wired.call("POST", "/os-security-groups", body).status_code == 400
    networks.limits["security-groups"] = 1
    assert add_group(wired).status_code == 403


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
    ("given", "stored", "shown"),
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
def test_a_rule_for_addresses(
    wired: Cloud, networks: Networks, given: Any, stored: Any, shown: Any
) -> None:
    group = networks.add_group("web", PROJECT)
    answer = add_rule(wired, group, **given)
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
    wanted = {
        "id": rule["id"],
        "parent_group_id": group,
        "group": {},
        "ip_range": {"cidr": shown["cidr"]},
        **{key: shown[key] for key in ("ip_protocol", "from_port", "to_port")},
    }
    assert answer.json == {"security_group_rule": wanted}
    assert wired.call("GET", f"/os-security-groups/{group}").json["security_group"]["rules"] == [
        wanted
    ]
    assert add_rule(wired, group, **given).status_code == 400  # there already
    path = f"/os-security-group-rules/{rule['id']}"
    assert [wired.call("DELETE", path).status_code for _ in range(2)] == [202, 404]


@pytest.mark.parametrize(
    ("given", "stored", "ports"),
    [
        ({}, (None, None, None), (None, None)),
        ({"ip_protocol": "tcp"}, ("tcp", None, None), (1, 65535)),
        ({"ip_protocol": "icmp"}, ("icmp", None, None), (-1, -1)),
        ({"ip_protocol": "udp", "from_port": 53, "to_port": 53}, ("udp", 53, 53), (53, 53)),
    ],
)
def test_a_rule_for_the_members_of_a_group(
    wired: Cloud, networks: Networks, given: Any, stored: Any, ports: Any
) -> None:
    web, db = networks.add_group("web", PROJECT), networks.add_group("db", PROJECT)
    made = add_rule(wired, db, group_id=web, **given).json["security_group_rule"]
    [rule] = networks.groups[1]["security_group_rules"]
    assert (rule["protocol"], rule["port_range_min"], rule["port_range_max"]) == stored
    assert (rule["remote_group_id"], rule["remote_ip_prefix"]) == (web, None)
    assert (made["group"], made["ip_range"]) == ({"name": "web", "tenant_id": PROJECT}, {})
    assert (made["from_port"], made["to_port"]) == ports
    assert wired.call("GET", f"/os-security-groups/{db}").json["security_group"]["rules"] == [made]


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
def test_a_rule_that_says_too_little_or_what_cannot_be(
    wired: Cloud, networks: Networks, change: dict[str, Any]
) -> None:
    web = networks.add_group("web", PROJECT)
    known = {"there": web}
    rule = {"parent_group_id": web, **SSH, **change}
    rule["group_id"] = known.get(rule.get("group_id"), rule.get("group_id"))
    answer = wired.call("POST", "/os-security-group-rules", {"security_group_rule": rule})
    assert answer.status_code == 400, answer.text
    assert networks.groups[0]["security_group_rules"] == []


def test_rules_of_groups_that_are_not_there_or_full(wired: Cloud, networks: Networks) -> None:
    web, theirs = networks.add_group("web", PROJECT), networks.add_group("theirs", OTHER)
    assert add_rule(wired, NOWHERE, **SSH).status_code == 404
    assert add_rule(wired, theirs, **SSH).status_code == 404
    assert add_rule(wired, web, group_id=theirs).status_code == 404
    assert wired.call("DELETE", "/os-security-group-rules/5").status_code == 400
    networks.limits["security-group-rules"] = 0
    assert add_rule(wired, web, **SSH).status_code == 403


# --- floating addresses ---
@pytest.fixture
def public(networks: Networks) -> str:
    """An external network with five addresses."""
    return networks.add_network("public", OTHER, "172.24.4.0/29", external=True)


def test_the_life_of_a_floating_ip(wired: Cloud, networks: Networks, public: str) -> None:
    assert wired.call("GET", "/os-floating-ip-pools", token="nobody").json == {
        "floating_ip_pools": [{"name": "public"}]
    }
    answer = wired.call("POST", "/os-floating-ips", {"pool": "public"}, mv="2.35")
    assert answer.status_code == 200, answer.text
    made = answer.json["floating_ip"]
    assert made == {
        "id": made["id"],
        "ip": "172.24.4.2",
        "pool": "public",
        "fixed_ip": None,
        "instance_id": None,
    }
    port = networks.add_port(
        networks.add_network("red", PROJECT), PROJECT, "10.0.0.9", device_id=SERVER
    )
    networks.floating_ips[0].update(port_id=port, fixed_ip_address="10.0.0.9")
    used = {**made, "fixed_ip": "10.0.0.9", "instance_id": SERVER}
    path = f"/os-floating-ips/{made['id']}"
    assert wired.call("GET", path).json == {"floating_ip": used}
    assert wired.call("GET", "/os-floating-ips").json == {"floating_ips": [used]}
    assert wired.call("GET", "/os-floating-ips", token="admin").json == {"floating_ips": []}
    for method in ("GET", "DELETE"):
        assert wired.call(method, path, token="stranger").status_code == 404
    assert [wired.call("DELETE", path).status_code for _ in range(2)] == [202, 404]
    assert wired.call("GET", "/os-floating-ips/5").status_code == 404


def test_which_pool_is_meant(wired: Cloud, networks: Networks, public: str) -> None:
    def made(body: Any) -> Any:
        answer = wired.call("POST", "/os-floating-ips", body, raw=b"null" if body is None else None)
        return (
            answer.json["floating_ip"]["pool"] if answer.status_code == 200 else answer.status_code
        )

    assert (made(None), made({}), made({"pool": None}), made({"pool": public})) == ("public",) * 4
    assert (made({"pool": "private"}), made({"pool": 5}), made([])) == (404, 400, 400)
    assert made({"pool": "public"}) == "public"
    assert made({"pool": "public"}) == 404  # no address is left
    other = networks.add_network("public", OTHER, "172.24.5.0/29", external=True)
    assert (made(None), made({"pool": "public"}), made({"pool": other})) == (400, 400, "public")
    networks.networks_by_id[other]["is_default"] = True
    assert made(None) == "public"
    networks.add_network("nova", OTHER, "172.24.6.0/29", external=True)
    assert made(None) == "nova"
    networks.limits["floatingips"] = 0
    assert made(None) == 403


def test_a_cloud_without_external_networks_has_no_pool(wired: Cloud) -> None:
    assert wired.call("GET", "/os-floating-ip-pools").json == {"floating_ip_pools": []}
    assert wired.call("POST", "/os-floating-ips", {}).status_code == 404
