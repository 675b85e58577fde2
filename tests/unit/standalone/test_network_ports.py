# SPDX-License-Identifier: Apache-2.0
"""Networks, subnets, ports, security groups and quotas of the embedded network service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from deploy.one_machine.services.network.addresses import free_mac
from tests.unit.standalone.conftest import Network

V6 = {"ipv6_ra_mode": "slaac", "ipv6_address_mode": "slaac"}


def port_body(network_id: str, **attributes: Any) -> dict[str, Any]:
    return {"port": {"network_id": network_id} | attributes}


def addresses(port: Any) -> list[str]:
    return [fixed["ip_address"] for fixed in port["fixed_ips"]]


# Addresses


def test_create_port_takes_lowest_free_address_and_delete_frees_it(network: Network) -> None:
    net, _ = network.create_network("10.0.0.0/29")
    ports = [network.create("port", network_id=net) for _ in range(4)]
    assert [addresses(port) for port in ports] == [
        ["10.0.0.3"],
        ["10.0.0.4"],
        ["10.0.0.5"],
        ["10.0.0.6"],
    ]
    assert network.refusal("POST", "/ports", port_body(net)) == (409, "IpAddressGenerationFailure")
    network.delete("port", ports[1]["id"])
    assert addresses(network.create("port", network_id=net)) == ["10.0.0.4"]


@pytest.mark.parametrize(
    ("fixed", "refused"),
    [
        ({"ip_address": "10.0.0.2"}, (409, "IpAddressInUse")),
        ({"ip_address": "10.0.1.7"}, (400, "InvalidIpForNetwork")),
        ({"ip_address": "10.0.0.255"}, (400, "InvalidIpForSubnet")),
        ({"ip_address": "no"}, (400, "HTTPBadRequest")),
        ({"subnet_id": "elsewhere"}, (400, "InvalidInput")),
        ({}, (400, "InvalidInput")),
        ({"colour": "red"}, (400, "HTTPBadRequest")),
    ],
)
def test_create_port_fails_with_400_if_fixed_ip_is_invalid_or_409_if_used(
    network: Network, fixed: dict[str, str], refused: tuple[int, str]
) -> None:
    net, _ = network.create_network()
    before = network.get("/ports")
    assert network.refusal("POST", "/ports", port_body(net, fixed_ips=[fixed])) == refused
    assert network.get("/ports") == before


def test_bulk_create_ports_is_atomic(network: Network) -> None:
    net, _ = network.create_network()
    wish = {"network_id": net, "fixed_ips": [{"ip_address": "10.0.0.9"}]}
    assert network.refusal("POST", "/ports", {"ports": [wish, wish]}) == (409, "IpAddressInUse")
    assert addresses(network.create("port", **wish)) == ["10.0.0.9"]


def test_create_port_in_slaac_subnet_gets_address_of_its_mac(network: Network) -> None:
    net, _ = network.create_network()
    network.create("subnet", network_id=net, cidr="fd00::/64", ip_version=6, **V6)
    port = network.create("port", network_id=net, mac_address="fa:16:3e:00:00:01")
    assert sorted(addresses(port)) == ["10.0.0.3", "fd00::f816:3eff:fe00:1"]


def test_concurrent_port_creates_get_different_addresses(network: Network) -> None:
    net, _ = network.create_network("10.0.0.0/16")
    with ThreadPoolExecutor(8) as pool:
        allocated = list(
            pool.map(lambda _: addresses(network.create("port", network_id=net))[0], range(40))
        )
    assert len(set(allocated)) == 40


def test_free_mac_draws_again_when_address_is_taken(network: Network) -> None:
    net, _ = network.create_network()
    taken_mac = network.create("port", network_id=net)["mac_address"]
    suffixes = iter([bytes.fromhex(taken_mac.replace(":", ""))[3:], b"\x01\x02\x03"])
    with network.fabric.database.read() as connection:
        assert free_mac(connection, net, lambda: next(suffixes)) == "fa:16:3e:01:02:03"


def test_update_port_fixed_ips_keeps_unchanged_addresses(network: Network) -> None:
    net, subnet = network.create_network()
    port = network.create("port", network_id=net)
    fixed = [*port["fixed_ips"], {"subnet_id": subnet, "ip_address": "10.0.0.77"}]
    changed = network.change("port", port["id"], fixed_ips=fixed)
    assert addresses(changed) == ["10.0.0.3", "10.0.0.77"]
    assert changed["revision_number"] > port["revision_number"]
    assert addresses(network.change("port", port["id"], fixed_ips=[])) == []


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "-a",
        "a-",
        "a..b",
        ".a",
        "a.",
        "a.-b",
        "a.1",
        "x" * 64 + ".b",
        "x." * 128 + "a",
        "x" * 64,
        "ä",
        "a\n",
        5,
        ["a"],
    ],
)
def test_create_and_update_port_with_invalid_dns_name_return_400(
    network: Network, name: Any
) -> None:
    net, _ = network.create_network()
    port = network.create("port", network_id=net)
    assert network.refusal("POST", "/ports", port_body(net, dns_name=name)) == (
        400,
        "HTTPBadRequest",
    )
    refused = network.refusal("PUT", f"/ports/{port['id']}", {"port": {"dns_name": name}})
    assert refused == (400, "HTTPBadRequest")


@pytest.mark.parametrize("name", ["web.example.com", "1.b", "x" * 63 + "." + "y" * 63, "1"])
def test_valid_port_dns_name_with_or_without_domain_is_accepted(
    network: Network, name: str
) -> None:
    port = network.create("port", network_id=network.create_network()[0], dns_name=name)
    assert port["dns_name"] == name
    assert port["dns_assignment"][0]["fqdn"] == f"{name}.openstacklocal."


def test_port_dns_assignment_has_name_of_each_address(network: Network) -> None:
    net, _ = network.create_network()
    network.create("subnet", network_id=net, cidr="fd00::/64", ip_version=6, **V6)
    port = network.create("port", network_id=net, mac_address="fa:16:3e:00:00:01", dns_name="VM-1")
    assert port["dns_name"] == "vm-1"
    assert {
        (item["ip_address"], item["hostname"], item["fqdn"]) for item in port["dns_assignment"]
    } == {(address, "vm-1", "vm-1.openstacklocal.") for address in addresses(port)}
    assert [item["id"] for item in network.get("/ports?dns_name=vm-1")["ports"]] == [port["id"]]
    for unset in ("", None):
        network.change("port", port["id"], dns_name="vm-1")
        updated = network.change("port", port["id"], dns_name=unset)
        assert updated["dns_name"] == ""
        assert sorted(item["fqdn"] for item in updated["dns_assignment"]) == [
            "host-10-0-0-3.openstacklocal.",
            "host-fd00--f816-3eff-fe00-1.openstacklocal.",
        ]
    assert "dns-integration" in {item["alias"] for item in network.get("/extensions")["extensions"]}


# Networks and subnets


@pytest.mark.parametrize(
    ("attributes", "refused"),
    [
        ({"cidr": "10.0.0.128/25"}, (400, "InvalidInput")),
        ({"cidr": "fd00::/64"}, (400, "InvalidInput")),
        ({"cidr": "nonsense"}, (400, "HTTPBadRequest")),
        (
            {"cidr": "10.1.0.0/24", "allocation_pools": [{"start": "10.2.0.2", "end": "10.2.0.9"}]},
            (400, "OutOfBoundsAllocationPool"),
        ),
        (
            {"cidr": "10.1.0.0/24", "allocation_pools": [{"start": "10.1.0.1", "end": "10.1.0.9"}]},
            (409, "GatewayConflictWithAllocationPools"),
        ),
        (
            {
                "cidr": "10.1.0.0/24",
                "allocation_pools": [
                    {"start": "10.1.0.2", "end": "10.1.0.9"},
                    {"start": "10.1.0.9", "end": "10.1.0.12"},
                ],
            },
            (409, "OverlappingAllocationPools"),
        ),
        ({"cidr": "10.1.0.0/24", "gateway_ip": "10.1.0.0"}, (400, "InvalidInput")),
        ({"cidr": "10.1.0.0/24", "ip_version": 5}, (400, "HTTPBadRequest")),
        ({"cidr": "10.1.0.0/24", "colour": "red"}, (400, "HTTPBadRequest")),
        ({}, (400, "HTTPBadRequest")),
    ],
)
def test_create_subnet_returns_400_if_invalid_409_if_pools_conflict(
    network: Network, attributes: Any, refused: tuple[int, str]
) -> None:
    net, _ = network.create_network()
    body = {"network_id": net, "ip_version": 4} | attributes
    assert network.refusal("POST", "/subnets", {"subnet": body}) == refused


def test_networks_may_have_equal_subnets(network: Network) -> None:
    assert network.create_network() != network.create_network()


def test_delete_network_returns_409_if_in_use_and_else_deletes_dhcp_port(network: Network) -> None:
    net, subnet = network.create_network()
    port = network.create("port", network_id=net)
    assert network.refusal("DELETE", f"/networks/{net}") == (409, "NetworkInUse")
    assert network.refusal("DELETE", f"/subnets/{subnet}") == (409, "SubnetInUse")
    network.delete("port", port["id"])
    network.delete("network", net)
    assert network.get("/ports") == {"ports": []}
    assert network.refusal("GET", f"/subnets/{subnet}") == (404, "SubnetNotFound")


def test_dhcp_port_is_deleted_when_subnet_disables_dhcp(network: Network) -> None:
    _net, subnet = network.create_network()
    [dhcp] = network.get("/ports?device_owner=network:dhcp")["ports"]
    assert addresses(dhcp) == ["10.0.0.2"]
    network.change("subnet", subnet, enable_dhcp=False)
    assert network.get("/ports")["ports"] == []


# Permissions


def test_network_is_visible_to_other_project_only_when_shared_or_external(network: Network) -> None:
    own = network.create("network")["id"]
    shared = network.create("network", role="admin", shared=True)["id"]
    external = network.create("network", role="admin", **{"router:external": True})["id"]
    visible = {item["id"] for item in network.get("/networks", project="other")["networks"]}
    assert visible == {shared, external}
    assert network.refusal("GET", f"/networks/{own}", project="other") == (404, "NetworkNotFound")
    assert network.refusal("DELETE", f"/networks/{shared}", project="other") == (
        403,
        "PolicyNotAuthorized",
    )
    assert network.refusal("POST", "/ports", port_body(own), project="other") == (
        404,
        "NetworkNotFound",
    )
    assert network.refusal("POST", "/ports", port_body(external), project="other") == (
        403,
        "PolicyNotAuthorized",
    )


@pytest.mark.parametrize(
    ("noun", "attributes"),
    [
        ("network", {"shared": True}),
        ("network", {"router:external": True}),
        ("network", {"provider:segmentation_id": 5}),
        ("network", {"project_id": "other"}),
    ],
)
def test_create_network_with_admin_attribute_by_member_returns_403(
    network: Network, noun: str, attributes: Any
) -> None:
    assert network.refusal("POST", f"/{noun}s", {noun: attributes}) == (403, "PolicyNotAuthorized")


def test_port_binding_is_neither_set_nor_shown_for_member(network: Network) -> None:
    net, _ = network.create_network()
    refused = network.refusal("POST", "/ports", port_body(net, **{"binding:host_id": "h1"}))
    assert refused == (403, "PolicyNotAuthorized")
    port = network.create(
        "port",
        role="service",
        project="service",
        network_id=net,
        project_id="mine",
        **{"binding:host_id": "h1"},
    )
    assert (port["status"], port["binding:vif_type"]) == ("ACTIVE", "bridge")
    assert port["binding:vif_details"]["bridge_name"] == f"brq{net[:11]}"
    assert not any(
        name.startswith("binding:vif") or name == "binding:host_id"
        for name in network.get(f"/ports/{port['id']}")["port"]
    )


@pytest.mark.parametrize(
    "query",
    [
        "ports?binding:host_id=h1",
        "ports?host=h1",
        "routers?host=h1",
        "networks?vni=1",
        "networks?provider:segmentation_id=1",
        "ports?sort_key=host",
    ],
)
def test_list_with_admin_filter_returns_400_for_member(network: Network, query: str) -> None:
    assert network.refusal("GET", f"/{query}") == (400, "HTTPBadRequest")
    assert network.call("GET", f"/{query}", role="admin").status_code == 200


def test_reader_lists_networks_but_create_network_returns_403(network: Network) -> None:
    network.create("network")
    assert network.refusal("POST", "/networks", {"network": {}}, role="reader") == (
        403,
        "PolicyNotAuthorized",
    )
    assert len(network.get("/networks", role="reader")["networks"]) == 1


# Security groups


def test_default_security_group_has_rules_and_cannot_be_deleted(network: Network) -> None:
    [group] = network.get("/security-groups")["security_groups"]
    rules = [
        (rule["direction"], rule["ethertype"], rule["remote_group_id"])
        for rule in group["security_group_rules"]
    ]
    assert sorted(rules, key=str) == sorted(
        [
            ("egress", "IPv4", None),
            ("egress", "IPv6", None),
            ("ingress", "IPv4", group["id"]),
            ("ingress", "IPv6", group["id"]),
        ],
        key=str,
    )
    refused = network.refusal("DELETE", f"/security-groups/{group['id']}")
    assert refused == (409, "SecurityGroupCannotRemoveDefault")
    duplicate = network.refusal("POST", "/security-groups", {"security_group": {"name": "default"}})
    assert duplicate == (409, "SecurityGroupDefaultAlreadyExists")


def test_delete_used_security_group_returns_409_port_with_foreign_group_404(
    network: Network,
) -> None:
    net, _ = network.create_network()
    group = network.create("security_group", name="web")["id"]
    port = network.create("port", network_id=net, security_groups=[group])
    assert port["security_groups"] == [group]
    assert network.refusal("DELETE", f"/security-groups/{group}") == (409, "SecurityGroupInUse")
    foreign = network.create("security_group", project="other", name="web")["id"]
    wish = {"port": {"security_groups": [foreign]}}
    assert network.refusal("PUT", f"/ports/{port['id']}", wish) == (404, "SecurityGroupNotFound")
    assert network.change("port", port["id"], security_groups=[])["security_groups"] == []
    network.delete("security_group", group)


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        (
            {"protocol": "tcp", "port_range_min": 22, "port_range_max": 22},
            (409, "SecurityGroupRuleExists"),
        ),
        (
            {"protocol": "tcp", "port_range_min": 9, "port_range_max": 8},
            (400, "SecurityGroupInvalidPortRange"),
        ),
        ({"protocol": "tcp", "port_range_min": 70000}, (400, "HTTPBadRequest")),
        (
            {"port_range_min": 1, "port_range_max": 2},
            (400, "SecurityGroupProtocolRequiredWithPorts"),
        ),
        (
            {"protocol": "gre", "port_range_min": 1, "port_range_max": 2},
            (400, "SecurityGroupInvalidProtocolForPort"),
        ),
        ({"protocol": "icmp", "port_range_min": 256}, (400, "SecurityGroupInvalidIcmpValue")),
        ({"protocol": "icmp", "port_range_max": 1}, (400, "SecurityGroupMissingIcmpType")),
        ({"protocol": "nonsense"}, (400, "HTTPBadRequest")),
        (
            {"protocol": "tcp", "remote_ip_prefix": "fd00::/64"},
            (400, "SecurityGroupRuleParameterConflict"),
        ),
        ({"protocol": "icmpv6"}, (400, "SecurityGroupEthertypeConflictWithProtocol")),
        ({"remote_group_id": "nothing"}, (404, "SecurityGroupNotFound")),
        ({"direction": "sideways"}, (400, "HTTPBadRequest")),
    ],
)
def test_security_group_rule_returns_400_if_invalid_409_if_duplicate_404_without_group(
    network: Network, rule: Any, refused: tuple[int, str]
) -> None:
    group = network.create("security_group", name="web")["id"]
    base = {"security_group_id": group, "direction": "ingress"}
    network.create(
        "security_group_rule", protocol="tcp", port_range_min=22, port_range_max=22, **base
    )
    assert (
        network.refusal("POST", "/security-group-rules", {"security_group_rule": base | rule})
        == refused
    )


@pytest.mark.parametrize(
    ("protocol", "shown"), [("00", None), ("0", None), (0, None), ("006", "6"), ("17", "17")]
)
def test_security_group_rule_protocol_number_has_no_leading_zeros(
    network: Network, protocol: Any, shown: str | None
) -> None:
    group = network.create("security_group", name="g")["id"]
    rule = network.create(
        "security_group_rule", security_group_id=group, direction="ingress", protocol=protocol
    )
    assert rule["protocol"] == shown


@pytest.mark.parametrize(
    ("prefix", "given_prefix", "normalized"),
    [
        ("10.2.3.124/24", "10.2.3.124/24", "10.2.3.0/24"),
        ("10.2.3.4", "10.2.3.4/32", "10.2.3.4/32"),
        (None, None, None),
    ],
)
def test_security_group_rule_shows_remote_prefix_with_length_and_normalized(
    network: Network, prefix: Any, given_prefix: Any, normalized: Any
) -> None:
    group = network.create("security_group", name="web")["id"]
    rule = network.create(
        "security_group_rule", security_group_id=group, direction="ingress", remote_ip_prefix=prefix
    )
    assert (rule["remote_ip_prefix"], rule["normalized_cidr"]) == (given_prefix, normalized)


# Lists, quotas and cost


def test_network_list_filters_sorts_pages_and_refuses_unknown_filters(network: Network) -> None:
    for name in ("c", "a", "b"):
        network.create("network", name=name)
    first = network.get("/networks?sort_key=name&sort_dir=desc&limit=2&fields=name")
    assert [item["name"] for item in first["networks"]] == ["c", "b"]
    [following] = first["networks_links"]
    second = network.get("/networks?" + following["href"].partition("?")[2])
    assert [item["name"] for item in second["networks"]] == ["a"]
    assert [link["rel"] for link in second["networks_links"]] == ["previous"]
    back = network.get("/networks?" + second["networks_links"][0]["href"].partition("?")[2])
    assert [item["name"] for item in back["networks"]] == ["c", "b"]
    assert {item["name"] for item in network.get("/networks?name=a&name=b")["networks"]} == {
        "a",
        "b",
    }
    for query in ("colour=red", "shared=perhaps", "limit=x", "sort_key=colour"):
        assert network.refusal("GET", f"/networks?{query}") == (400, "HTTPBadRequest")


def test_port_list_filters_by_attributes(network: Network) -> None:
    net, subnet = network.create_network()
    first, second = (
        network.create("port", network_id=net, device_id=name, tags=[name]) for name in ("d1", "d2")
    )
    for query, expected in (
        (f"fixed_ips=ip_address={addresses(first)[0]}", {first["id"]}),
        ("device_id=d2", {second["id"]}),
        (f"fixed_ips=subnet_id={subnet}&device_id=d1&device_id=d2", {first["id"], second["id"]}),
        ("tags=d1", {first["id"]}),
        ("not-tags=d1&device_owner=", {second["id"]}),
        (f"mac_address={second['mac_address'].upper()}", {second["id"]}),
        ("project_id=other", set()),
        (f"id={first['id']}&id={second['id']}", {first["id"], second["id"]}),
    ):
        assert {port["id"] for port in network.get(f"/ports?{query}")["ports"]} == expected, query


def test_port_quota_is_exact_and_counts_whole_bulk_request(network: Network) -> None:
    net, _ = network.create_network()
    network.call("PUT", "/quotas/mine", {"quota": {"port": 3}}, role="admin")
    wish = {"network_id": net}
    assert network.refusal("POST", "/ports", {"ports": [wish, wish, wish]}) == (409, "OverQuota")
    details = network.get("/quotas/mine/details")["quota"]["port"]
    assert details == {"limit": 3, "used": 1, "reserved": 0}
    assert network.call("POST", "/ports", {"ports": [wish, wish]}).status_code == 201
    assert network.refusal("POST", "/ports", port_body(net)) == (409, "OverQuota")
    assert network.refusal("PUT", "/quotas/mine", {"quota": {"port": 9}}) == (
        403,
        "PolicyNotAuthorized",
    )
    assert network.call("DELETE", "/quotas/mine", role="admin").status_code == 204
    assert network.get("/quotas/mine")["quota"]["port"] == 500


def test_create_bound_port_takes_at_most_12_statements(network: Network) -> None:
    net, _ = network.create_network()
    network.create("port", network_id=net)
    statements: list[str] = []
    sa.event.listen(
        sa.Engine, "before_cursor_execute", listener := lambda *args: statements.append(args[2])
    )
    network.create("port", role="admin", network_id=net, **{"binding:host_id": "h1"})
    sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    assert len(statements) <= 12, statements


def test_extension_is_shown_by_alias_and_unknown_alias_returns_404(network: Network) -> None:
    aliases = [item["alias"] for item in network.get("/extensions")["extensions"]]
    for alias in aliases:
        assert network.get(f"/extensions/{alias}")["extension"]["alias"] == alias
    assert network.refusal("GET", "/extensions/trunk") == (404, "ExtensionNotFound")
