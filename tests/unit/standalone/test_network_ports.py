# SPDX-License-Identifier: Apache-2.0
"""What the network service makes of networks, subnets, ports and security groups: addresses,
refusals, lists, cost."""

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


def test_a_port_gets_the_lowest_free_address_and_gives_it_back(network: Network) -> None:
    net, _ = network.wired("10.0.0.0/29")
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
def test_unavailable_address_is_refused_and_leaves_nothing(
    network: Network, fixed: dict[str, str], refused: tuple[int, str]
) -> None:
    net, _ = network.wired()
    before = network.get("/ports")
    assert network.refusal("POST", "/ports", port_body(net, fixed_ips=[fixed])) == refused
    assert network.get("/ports") == before


def test_a_bulk_create_is_all_or_nothing(network: Network) -> None:
    net, _ = network.wired()
    wish = {"network_id": net, "fixed_ips": [{"ip_address": "10.0.0.9"}]}
    assert network.refusal("POST", "/ports", {"ports": [wish, wish]}) == (409, "IpAddressInUse")
    assert addresses(network.create("port", **wish)) == ["10.0.0.9"]


def test_slaac_subnet_gives_the_address_of_the_mac(network: Network) -> None:
    net, _ = network.wired()
    network.create("subnet", network_id=net, cidr="fd00::/64", ip_version=6, **V6)
    port = network.create("port", network_id=net, mac_address="fa:16:3e:00:00:01")
    assert sorted(addresses(port)) == ["10.0.0.3", "fd00::f816:3eff:fe00:1"]


def test_many_at_a_time_get_addresses_of_their_own(network: Network) -> None:
    net, _ = network.wired("10.0.0.0/16")
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(lambda _: addresses(network.create("port", network_id=net))[0], range(40))
        )
    assert len(set(made)) == 40


def test_a_mac_address_that_another_port_has_is_drawn_again(network: Network) -> None:
    net, _ = network.wired()
    held = network.create("port", network_id=net)["mac_address"]
    drawn = iter([bytes.fromhex(held.replace(":", ""))[3:], b"\x01\x02\x03"])
    with network.fabric.database.read() as connection:
        assert free_mac(connection, net, lambda: next(drawn)) == "fa:16:3e:01:02:03"


def test_the_addresses_of_a_port_change_and_what_stays_is_kept(network: Network) -> None:
    net, subnet = network.wired()
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
def test_a_dns_name_is_a_host_name(network: Network, name: Any) -> None:
    net, _ = network.wired()
    port = network.create("port", network_id=net)
    assert network.refusal("POST", "/ports", port_body(net, dns_name=name)) == (
        400,
        "HTTPBadRequest",
    )
    refused = network.refusal("PUT", f"/ports/{port['id']}", {"port": {"dns_name": name}})
    assert refused == (400, "HTTPBadRequest")


@pytest.mark.parametrize("name", ["web.example.com", "1.b", "x" * 63 + "." + "y" * 63, "1"])
def test_a_dns_name_may_have_a_domain(network: Network, name: str) -> None:
    port = network.create("port", network_id=network.wired()[0], dns_name=name)
    assert port["dns_name"] == name
    assert port["dns_assignment"][0]["fqdn"] == f"{name}.openstacklocal."


def test_a_port_shows_the_names_of_its_addresses(network: Network) -> None:
    net, _ = network.wired()
    network.create("subnet", network_id=net, cidr="fd00::/64", ip_version=6, **V6)
    port = network.create("port", network_id=net, mac_address="fa:16:3e:00:00:01", dns_name="VM-1")
    assert port["dns_name"] == "vm-1"
    assert {
        (one["ip_address"], one["hostname"], one["fqdn"]) for one in port["dns_assignment"]
    } == {(address, "vm-1", "vm-1.openstacklocal.") for address in addresses(port)}
    assert [one["id"] for one in network.get("/ports?dns_name=vm-1")["ports"]] == [port["id"]]
    for unset in ("", None):
        network.change("port", port["id"], dns_name="vm-1")
        shown = network.change("port", port["id"], dns_name=unset)
        assert shown["dns_name"] == ""
        assert sorted(one["fqdn"] for one in shown["dns_assignment"]) == [
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
def test_a_subnet_that_cannot_be_is_refused(
    network: Network, attributes: Any, refused: tuple[int, str]
) -> None:
    net, _ = network.wired()
    body = {"network_id": net, "ip_version": 4} | attributes
    assert network.refusal("POST", "/subnets", {"subnet": body}) == refused


def test_two_networks_may_have_the_same_addresses(network: Network) -> None:
    assert network.wired() != network.wired()


def test_a_network_in_use_stays_and_its_dhcp_goes_with_it(network: Network) -> None:
    net, subnet = network.wired()
    port = network.create("port", network_id=net)
    assert network.refusal("DELETE", f"/networks/{net}") == (409, "NetworkInUse")
    assert network.refusal("DELETE", f"/subnets/{subnet}") == (409, "SubnetInUse")
    network.delete("port", port["id"])
    network.delete("network", net)
    assert network.get("/ports") == {"ports": []}
    assert network.refusal("GET", f"/subnets/{subnet}") == (404, "SubnetNotFound")


def test_the_port_of_dhcp_follows_its_subnets(network: Network) -> None:
    _net, subnet = network.wired()
    [dhcp] = network.get("/ports?device_owner=network:dhcp")["ports"]
    assert addresses(dhcp) == ["10.0.0.2"]
    network.change("subnet", subnet, enable_dhcp=False)
    assert network.get("/ports")["ports"] == []


# Who may


def test_tenants_see_their_own_and_what_is_shared(network: Network) -> None:
    own = network.create("network")["id"]
    shared = network.create("network", role="admin", shared=True)["id"]
    external = network.create("network", role="admin", **{"router:external": True})["id"]
    seen = {item["id"] for item in network.get("/networks", project="other")["networks"]}
    assert seen == {shared, external}
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
def test_admin_attribute_is_refused_to_a_member(
    network: Network, noun: str, attributes: Any
) -> None:
    assert network.refusal("POST", f"/{noun}s", {noun: attributes}) == (403, "PolicyNotAuthorized")


def test_a_member_neither_sets_nor_sees_where_a_port_is(network: Network) -> None:
    net, _ = network.wired()
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
def test_a_member_does_not_find_out_by_filters_either(network: Network, query: str) -> None:
    assert network.refusal("GET", f"/{query}") == (400, "HTTPBadRequest")
    assert network.call("GET", f"/{query}", role="admin").status_code == 200


def test_a_reader_only_reads(network: Network) -> None:
    network.create("network")
    assert network.refusal("POST", "/networks", {"network": {}}, role="reader") == (
        403,
        "PolicyNotAuthorized",
    )
    assert len(network.get("/networks", role="reader")["networks"]) == 1


# Security groups


def test_the_default_group_comes_with_its_rules_and_stays(network: Network) -> None:
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
    made = network.refusal("POST", "/security-groups", {"security_group": {"name": "default"}})
    assert made == (409, "SecurityGroupDefaultAlreadyExists")


def test_a_group_in_use_stays_and_a_foreign_one_is_not_found(network: Network) -> None:
    net, _ = network.wired()
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
def test_a_rule_that_cannot_be_is_refused(
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
    ("told", "shown", "network_of"),
    [
        ("10.2.3.124/24", "10.2.3.124/24", "10.2.3.0/24"),
        ("10.2.3.4", "10.2.3.4/32", "10.2.3.4/32"),
        (None, None, None),
    ],
)
def test_a_range_stays_as_it_is_told(
    network: Network, told: Any, shown: Any, network_of: Any
) -> None:
    group = network.create("security_group", name="web")["id"]
    rule = network.create(
        "security_group_rule", security_group_id=group, direction="ingress", remote_ip_prefix=told
    )
    assert (rule["remote_ip_prefix"], rule["normalized_cidr"]) == (shown, network_of)


# Lists, quotas and cost


def test_lists_filter_sort_page_and_refuse_unknown_filters(network: Network) -> None:
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


def test_ports_are_found_by_what_they_have(network: Network) -> None:
    net, subnet = network.wired()
    one, two = (
        network.create("port", network_id=net, device_id=name, tags=[name]) for name in ("d1", "d2")
    )
    for query, found in (
        (f"fixed_ips=ip_address={addresses(one)[0]}", {one["id"]}),
        ("device_id=d2", {two["id"]}),
        (f"fixed_ips=subnet_id={subnet}&device_id=d1&device_id=d2", {one["id"], two["id"]}),
        ("tags=d1", {one["id"]}),
        ("not-tags=d1&device_owner=", {two["id"]}),
        (f"mac_address={two['mac_address'].upper()}", {two["id"]}),
        ("project_id=other", set()),
        (f"id={one['id']}&id={two['id']}", {one["id"], two["id"]}),
    ):
        assert {port["id"] for port in network.get(f"/ports?{query}")["ports"]} == found, query


def test_a_quota_is_exact_and_a_bulk_counts_whole(network: Network) -> None:
    net, _ = network.wired()
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


def test_a_port_that_is_made_and_bound_costs_few_statements(network: Network) -> None:
    net, _ = network.wired()
    network.create("port", network_id=net)
    statements: list[str] = []
    sa.event.listen(
        sa.Engine, "before_cursor_execute", listener := lambda *args: statements.append(args[2])
    )
    network.create("port", role="admin", network_id=net, **{"binding:host_id": "h1"})
    sa.event.remove(sa.Engine, "before_cursor_execute", listener)
    assert len(statements) <= 12, statements


def test_every_extension_is_shown_and_an_unknown_one_is_not(network: Network) -> None:
    aliases = [item["alias"] for item in network.get("/extensions")["extensions"]]
    for alias in aliases:
        assert network.get(f"/extensions/{alias}")["extension"]["alias"] == alias
    assert network.refusal("GET", "/extensions/trunk") == (404, "ExtensionNotFound")
