# SPDX-License-Identifier: Apache-2.0
"""The network's host part without a kernel: names, nftables rules, dnsmasq files, hostile input."""

from __future__ import annotations

import hmac
import itertools
import re
import socket
import sys
import threading
import uuid
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.one_machine.services.network.host.description import Description, parse
from deploy.one_machine.services.network.host.desired import (
    DesiredState,
    HostPlace,
    Namespace,
    desire,
)
from deploy.one_machine.services.network.host.dnsmasq_processes import find_reassigned, stale_leases
from deploy.one_machine.services.network.host.host_part import Loop
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.metadata import MetadataUpstream
from deploy.one_machine.services.network.host.names import Names, bridge, tap
from deploy.one_machine.services.network.host.state import MAX_NUMBER, StateFolder, assign

NETWORK, PORT, ROUTER, SUBNET = (str(uuid.UUID(int=number << 100)) for number in (1, 2, 3, 4))
OUTSIDE = str(uuid.UUID(int=5 << 100))
MAX_DEVICE_NAME = 15  # characters
GROUP = str(uuid.UUID(int=6 << 100))
NAMES = Names("abcdef")
PLACE = HostPlace(NAMES, ip_address("192.168.5.1"), external_gateway=True)


# fmt: off
def new_description() -> dict[str, Any]:
    subnet = {"cidr": "10.0.0.0/24", "version": 4, "gateway": "10.0.0.1", "dhcp": True, "dns": [], "routes": [
        {"destination": "10.9.0.0/16", "nexthop": "10.0.0.254"}], "ipv6_mode": None}
    return {
        "revision": 7, "host": "h1", "dns": ["1.1.1.1"],
        "networks": {
            NETWORK: {"vni": 5, "mtu": 1450, "external": False, "peers": ["192.168.5.2"], "subnets": {SUBNET: subnet},
                      "dhcp": {"mac": "fa:16:3e:00:00:02", "addresses": ["10.0.0.2/24"], "port": "p"}},
            OUTSIDE: {"vni": 6, "mtu": 1500, "external": True, "peers": [], "dhcp": None, "subnets": {
                SUBNET: {"cidr": "172.24.4.0/24", "version": 4, "gateway": "172.24.4.1", "dhcp": False}}}},
        "ports": {PORT: {"network": NETWORK, "mac": "fa:16:3e:00:00:05", "hostname": "vm1", "security": True,
                         "addresses": [{"address": "10.0.0.5", "subnet": SUBNET}], "allowed_pairs": [],
                         "groups": [GROUP], "server": PORT, "project_id": "a" * 32, "up": True}},
        "groups": {GROUP: {"members": ["10.0.0.5"], "rules": [
            {"direction": "ingress", "version": 4, "protocol": "tcp", "port_min": 22, "port_max": 22,
             "remote_prefix": "10.1.0.0/16", "remote_group": None},
            {"direction": "egress", "version": 6, "protocol": None, "remote_group": GROUP}]}},
        "routers": {ROUTER: {
            "external": {"network": OUTSIDE, "mac": "fa:16:3e:00:00:06", "addresses": ["172.24.4.5/24"],
                         "gateway": "172.24.4.1", "snat": True},
            "interfaces": [{"port": "p", "network": NETWORK, "mac": "fa:16:3e:00:00:07", "address": "10.0.0.1/24"}],
            "floating": [{"floating": "172.24.4.9", "fixed": "10.0.0.5"}], "routes": []}}}
# fmt: on


def build_state(tree: dict[str, Any], ports: dict[str, int] | None = None) -> DesiredState:
    description = parse(tree)
    return desire(
        PLACE,
        description,
        assign(ports or {}, description.ports),
        assign({}, [bridge(network) for network in description.networks]),
    )


def build_rules(tree: dict[str, Any]) -> str:
    return build_state(tree).rules


def read_chains(tree: dict[str, Any], start: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the statements of the chains with these prefixes, by name of chain."""
    chains = re.findall(
        r"^  chain (\w+) {\n(.*?)^  }\n", build_rules(tree), re.MULTILINE | re.DOTALL
    )
    return {
        name: [line.strip() for line in lines.splitlines()]
        for name, lines in chains
        if name.startswith(start)
    }


def read_elements(tree: dict[str, Any], name: str) -> list[str]:
    """Return the elements of a set or map in the rules."""
    match = re.search(
        rf"^  (?:set|map) {name} {{ [^;]+;(?: elements = {{ (.*) }};)? }}$",
        build_rules(tree),
        re.MULTILINE,
    )
    assert match is not None
    return match[1].split(", ") if match[1] else []


def find_namespace(tree: dict[str, Any], start: str) -> Namespace:
    return next(
        namespace
        for namespace in build_state(tree).namespaces
        if namespace.name.startswith(f"{NAMES.namespaces}{start}")
    )


@given(st.uuids(), st.integers(1, 2**24 - 1))
def test_device_names_are_unique_and_not_too_long(id_: uuid.UUID, vni: int) -> None:
    text = str(id_)
    ours = [NAMES.vxlan(vni), NAMES.dhcp(text), NAMES.plug(text, text), *NAMES.gateway(text)]
    assert max(map(len, [*ours, bridge(text), tap(text)])) <= MAX_DEVICE_NAME
    assert len({*ours, bridge(text), tap(text)}) == 7
    assert all(map(NAMES.is_ours, ours))
    assert not any(map(Names("abcdee").is_ours, [*ours, bridge(text), tap(text)]))


def test_network_device_names_depend_on_resolved_state_folder(tmp_path: Path) -> None:
    assert Names.of(tmp_path) == Names.of(tmp_path / "x" / "..")
    assert Names.of(tmp_path) != Names.of(tmp_path / "x")


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 20)), st.sets(st.text(max_size=3)))
def test_assign_keeps_numbers_and_does_not_reuse_freed_ones_at_once(
    before: dict[str, int], names: set[str]
) -> None:
    before = {
        name: number for number, name in {number: name for name, number in before.items()}.items()
    }
    after = assign(before, names)
    assert set(after) == names
    assert len(set(after.values())) == len(after)
    assert {name: after[name] for name in names & set(before)} == {
        name: before[name] for name in names & set(before)
    }
    assert not {after[name] for name in names - set(before)} & set(before.values())
    assert all(0 < number < MAX_NUMBER for number in after.values())


def test_state_folder_is_read_despite_truncated_description(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.number([PORT], ["brq1"])
    state.save_description({"revision": 3})
    reopened = StateFolder(tmp_path)
    assert (reopened.ports, reopened.zones, reopened.description()) == (
        {PORT: 1},
        {"brq1": 1},
        {"revision": 3},
    )
    reopened.number([], ["brq2"])
    assert reopened.zones == {"brq1": 1, "brq2": 2}
    reopened.forget(["brq1"])
    (tmp_path / "description.json").write_text('{"revi')
    assert (StateFolder(tmp_path).zones, StateFolder(tmp_path).description()) == ({"brq2": 2}, None)


# fmt: off
HOSTILE = ["x\ndhcp-script=/bin/sh", 'x"; drop; accept "', "x,ignore", "a b", "é", "x}\nflush ruleset", "%", "..",
           "-x", "x" * 64, "fe80::1%\nflush ruleset", "10.0.0.5\naccept", "::1%}", "", 5, None, True, ["x"], {"x": 1}]
# fmt: on
PATHS = [
    ("ports", PORT, key)
    for key in (
        "hostname",
        "mac",
        "network",
        "server",
        "project_id",
        "addresses",
        "groups",
        "allowed_pairs",
        "security",
    )
]
PATHS += [("ports", PORT, "addresses", 0, "address"), ("ports", PORT, "groups", 0)]
PATHS += [("networks", NETWORK, key) for key in ("vni", "mtu", "peers", "dhcp", "subnets")]
PATHS += [
    ("networks", NETWORK, "peers", 0),
    ("networks", NETWORK, "dhcp", "mac"),
    ("networks", NETWORK, "dhcp", "addresses", 0),
]
PATHS += [
    ("networks", NETWORK, "subnets", SUBNET, key)
    for key in ("cidr", "gateway", "dns", "routes", "ipv6_mode")
]
PATHS += [
    ("networks", NETWORK, "subnets", SUBNET, "routes", 0, key) for key in ("destination", "nexthop")
]
PATHS += [("groups", GROUP, "members", 0), ("groups", GROUP, "rules", 0)]
PATHS += [
    ("groups", GROUP, "rules", 0, key)
    for key in ("direction", "version", "protocol", "port_min", "remote_prefix", "remote_group")
]
PATHS += [("routers", ROUTER, key) for key in ("external", "interfaces", "floating", "routes")]
PATHS += [
    ("routers", ROUTER, "external", key) for key in ("network", "mac", "addresses", "gateway")
]
PATHS += [("routers", ROUTER, "floating", 0, key) for key in ("floating", "fixed")]
PATHS += [("dns", 0), ("dns",), ("networks",), ("ports",), ("groups",), ("routers",)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_hostile_value_of_description_is_in_no_rule_or_file(path: tuple[Any, ...]) -> None:
    values = [value for value in HOSTILE if is_in_state(path, value)]
    assert values == []


def is_in_state(path: tuple[Any, ...], value: Any) -> bool:
    """Return True if a hostile value at a path of the description is in a file or rule."""
    tree = new_description()
    place: Any = tree
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        state = build_state(tree)
    except ValueError as problem:
        assert len(path) == 1, problem
        return False
    texts = [
        state.rules,
        *(namespace.rules for namespace in state.namespaces),
        *map(str, state.tunnels),
        *map(str, state.gateways),
    ]
    for namespace in state.namespaces:
        dnsmasq = namespace.dnsmasq
        texts += (
            []
            if dnsmasq is None
            else [dnsmasq.fixed, dnsmasq.hosts, dnsmasq.names, dnsmasq.options]
        )
        texts.append(str((namespace.pairs, namespace.routes, namespace.local)))
    words = ("script", "flush", "ignore,", "%")
    if isinstance(value, str) and len(value) > 4:
        words += (value,)
    return any(word in text for text in texts for word in words)


@pytest.mark.parametrize("key", ["ports", "networks", "groups", "routers"])
def test_description_object_with_hostile_id_is_left_out(key: str) -> None:
    for hostile_id in ('x"; accept', "../../etc", "x\ny", "a" * 65, ""):
        tree = new_description()
        tree[key][hostile_id] = next(iter(tree[key].values()))
        description = parse(tree)
        assert hostile_id not in getattr(description, key)
        assert len(getattr(description, key)) >= 1
        assert (
            hostile_id in description.failed
            if key == "ports"
            else any(text.startswith(f"{hostile_id}: ") for text in description.warnings)
        )


@pytest.mark.parametrize("tree", [None, [], {}, {"revision": "7"}, 5, "x"])
def test_parse_refuses_invalid_description(tree: Any) -> None:
    with pytest.raises(ValueError, match="is no object with"):
        parse(tree)


def test_parse_description_leaves_out_only_invalid_port() -> None:
    tree = new_description()
    tree["ports"]["another-port-1"] = tree["ports"][PORT] | {"mac": "ff:ff:ff:ff:ff:ff"}
    tree["ports"]["another-port-2"] = tree["ports"][PORT] | {"network": "unknown-network"}
    tree["ports"]["another-port-3"] = tree["ports"][PORT] | {"up": False}
    description = parse(tree)
    assert list(description.ports) == [PORT]
    assert set(description.failed) == {"another-port-1", "another-port-2"}


@pytest.mark.parametrize(
    "invalid",
    [
        {"floating": "172.24.4.10", "fixed": None},
        {"floating": None, "fixed": "10.0.0.6"},
        {"floating": "172.24.4.10"},
        {"floating": "172.24.4.10", "fixed": "::1"},
        None,
    ],
)
def test_parse_description_leaves_out_only_invalid_floating_ip(invalid: Any) -> None:
    tree = new_description()
    tree["routers"][ROUTER]["floating"].insert(0, invalid)
    description = parse(tree)
    assert [
        (str(floating), str(fixed)) for floating, fixed in description.routers[ROUTER].floating
    ] == [("172.24.4.9", "10.0.0.5")]
    assert description.routers[ROUTER].external is not None
    assert [text.split(": ")[0] for text in description.warnings] == [ROUTER]


def test_nftables_rules_have_addresses_and_allowed_pairs_of_port() -> None:
    text = build_rules(new_description())
    for element in (
        f'"{tap(PORT)}" . fa:16:3e:00:00:05 . 10.0.0.5',
        f'"{tap(PORT)}" . fa:16:3e:00:00:05 . fe80::f816:3eff:fe00:5',
        f'"{NAMES.dhcp(NETWORK)}"',
        f'"{NAMES.vxlan(5)}"',
    ):
        assert element in text
    pair = new_description()
    pair["ports"][PORT]["allowed_pairs"] = [
        {"ip_address": "10.0.0.64/26", "mac_address": "fa:16:3e:00:00:aa"},
        {"ip_address": "10.0.0.9", "mac_address": None},
    ]
    text = build_rules(pair)
    assert (
        f'iifname "{tap(PORT)}" ether saddr fa:16:3e:00:00:aa ip saddr 10.0.0.64/26 return' in text
    )
    assert f'"{tap(PORT)}" . fa:16:3e:00:00:05 . 10.0.0.9' in text


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ({"protocol": None}, "meta nfproto ipv4 return"),
        (
            {"protocol": "tcp", "port_min": 80, "port_max": 90},
            "meta nfproto ipv4 ct original protocol 6 ct original proto-dst 80-90 return",
        ),
        (
            {"protocol": "udp", "port_min": 53, "port_max": 53},
            "meta nfproto ipv4 ct original protocol 17 ct original proto-dst 53 return",
        ),
        ({"protocol": "112"}, "meta nfproto ipv4 ct original protocol 112 return"),
        (
            {"protocol": "icmp", "port_min": 8, "port_max": 0},
            "meta nfproto ipv4 ct original protocol 1 icmp type 8 icmp code 0 return",
        ),
        (
            {"protocol": "icmp", "version": 6, "port_min": 128},
            "meta nfproto ipv6 ct original protocol 58 icmpv6 type 128 return",
        ),
        (
            {"remote_prefix": "10.1.2.3/16"},
            "meta nfproto ipv4 ct original ip saddr 10.1.0.0/16 return",
        ),
        ({"remote_prefix": "0.0.0.0/0"}, "meta nfproto ipv4 return"),
        (
            {"direction": "egress", "remote_prefix": "10.1.0.0/16"},
            "meta nfproto ipv4 ct original ip daddr 10.1.0.0/16 return",
        ),
        ({"protocol": "esp", "port_min": 1}, None),
        ({"protocol": "999"}, None),
        ({"protocol": "tcp", "port_min": 70000}, None),
        ({"remote_prefix": "::/0"}, None),
        ({"direction": "both"}, None),
        ({"version": 5}, None),
    ],
)
def test_security_group_rule_becomes_nftables_statement_unless_invalid(
    rule: dict[str, Any], line: str | None
) -> None:
    tree = new_description()
    tree["groups"][GROUP]["rules"] = [{"direction": "ingress", "version": 4, **rule}]
    lines = [
        statement
        for lines in read_chains(tree, ("egress_", "ingress_")).values()
        for statement in lines
    ]
    assert lines == (
        ["drop", line, "drop"]
        if line and rule.get("direction") != "egress"
        else [line, "drop", "drop"]
        if line
        else ["drop", "drop"]
    )


def test_port_without_groups_drops_ingress_and_with_security_off_is_open() -> None:
    closed, opened = new_description(), new_description()
    closed["ports"][PORT]["groups"] = []
    opened["ports"][PORT] |= {"security": False, "groups": []}
    assert set(itertools.chain(*read_chains(closed, ("ingress_",)).values())) == {"drop"}
    assert read_elements(opened, "unguarded") == [f'"{tap(PORT)}"']
    assert f'"{tap(PORT)}" : 0x0000ffff' in read_elements(opened, "numbers")
    assert read_elements(opened, "ingress") == []


def test_nftables_stamp_changes_with_rules_or_members_of_security_group() -> None:
    def stamp(tree: dict[str, Any]) -> str:
        return read_chains(tree, ("stamp",))["stamp"][0]

    other = new_description()
    other["groups"][GROUP]["rules"].pop()
    assert stamp(new_description()) == stamp(new_description())
    assert stamp(new_description()) != stamp(other)
    members = new_description()
    members["groups"][GROUP]["members"] = []
    assert stamp(new_description()) != stamp(members)


def test_dnsmasq_files_have_address_name_and_options_of_guest() -> None:
    dnsmasq = find_namespace(new_description(), "net").dnsmasq
    assert dnsmasq is not None
    assert dnsmasq.hosts == "fa:16:3e:00:00:05,id:*,10.0.0.5,vm1\n"
    assert dnsmasq.names == "10.0.0.5 vm1.openstacklocal vm1\n"
    for part in (
        "option:mtu,1450",
        "option:router,10.0.0.1",
        "option:dns-server,10.0.0.2,1.1.1.1",
        "classless-static-route,10.9.0.0/16,10.0.0.254,169.254.169.254/32,10.0.0.2,0.0.0.0/0,10.0.0.1",
    ):
        assert part in dnsmasq.options
    isolated = new_description()
    isolated["networks"][NETWORK]["subnets"][SUBNET] |= {
        "gateway": None,
        "dns": ["9.9.9.9"],
        "routes": [],
    }
    dnsmasq = find_namespace(isolated, "net").dnsmasq
    assert dnsmasq is not None
    assert "option:router\n" in dnsmasq.options
    assert "dns-server,9.9.9.9\n" in dnsmasq.options
    assert "0.0.0.0/0" not in dnsmasq.options


def test_dnsmasq_hosts_file_has_ipv4_and_ipv6_address_in_one_line() -> None:
    tree = new_description()
    other = {
        "cidr": "2001:db8::/64",
        "version": 6,
        "gateway": None,
        "dhcp": True,
        "ipv6_mode": "slaac",
    }
    tree["networks"][NETWORK]["subnets"]["another-subnet"] = other
    tree["ports"][PORT]["addresses"] = [
        {"address": address} for address in ("2001:db8::5", "10.0.0.5", "10.0.0.6", "10.7.7.7")
    ]
    dnsmasq = find_namespace(tree, "net").dnsmasq
    assert dnsmasq is not None
    assert dnsmasq.hosts == (
        "fa:16:3e:00:00:05,id:*,10.0.0.5,[2001:db8::5],vm1\nfa:16:3e:00:00:05,id:*,10.0.0.6,vm1\n"
    )
    assert "dhcp-range=set:s" in dnsmasq.fixed
    assert ",2001:db8::,ra-only,64,86400\n" in dnsmasq.fixed
    assert dnsmasq.reserved == (
        ("2001:db8::5", "fa:16:3e:00:00:05"),
        ("10.0.0.5", "fa:16:3e:00:00:05"),
        ("10.0.0.6", "fa:16:3e:00:00:05"),
    )


@pytest.mark.parametrize(
    ("name", "resolved_name"),
    [
        ("ignore", "ignore"),
        ("Infinite", "Infinite"),
        ("3600", "3600"),
        ("45m", "45m"),
        ("x,y", "host-10-0-0-5"),
        ("", "host-10-0-0-5"),
    ],
)
def test_dnsmasq_hosts_file_replaces_keyword_or_invalid_host_name(
    name: str, resolved_name: str
) -> None:
    tree = new_description()
    tree["ports"][PORT]["hostname"] = name
    dnsmasq = find_namespace(tree, "net").dnsmasq
    assert dnsmasq is not None
    assert dnsmasq.hosts == "fa:16:3e:00:00:05,id:*,10.0.0.5,host-10-0-0-5\n"
    assert dnsmasq.names == f"10.0.0.5 {resolved_name}.openstacklocal {resolved_name}\n"


def test_dnsmasq_resolves_whole_host_name_with_domain() -> None:
    tree = new_description()
    tree["ports"][PORT]["hostname"] = "web.example.com"
    dnsmasq = find_namespace(tree, "net").dnsmasq
    assert dnsmasq is not None
    assert dnsmasq.hosts == "fa:16:3e:00:00:05,id:*,10.0.0.5,web\n"
    assert dnsmasq.names == "10.0.0.5 web.example.com.openstacklocal web.example.com\n"


def test_stale_dhcp_leases_are_leases_without_matching_owner() -> None:
    owners = {
        "10.0.0.5": "fa:16:3e:00:00:05",
        "10.0.0.6": "fa:16:3e:00:00:06",
        "2001:db8::5": "fa:16:3e:00:00:05",
    }
    good = [
        "9 fa:16:3e:00:00:05 10.0.0.5 vm1 *",
        "9 06-fa:16:3e:00:00:06 10.0.0.6 * ff:01",
        "duid 00:01:02",
        "9 7 2001:db8::5 vm1 00:03",
        "",
        "nonsense",
        "9 x",
    ]
    bad = [
        "9 fa:16:3e:00:00:07 10.0.0.7 vm2 01:aa",
        "9 fa:16:3e:00:00:07 10.0.0.6 * *",
        "9 T7 2001:db8::6 * 00:03",
    ]
    leases = stale_leases([*good, *bad], owners, set())
    assert [lease.line for lease in leases] == bad
    assert [(lease.mac, lease.client_id) for lease in leases] == [
        ("fa:16:3e:00:00:07", "01:aa"),
        ("fa:16:3e:00:00:07", "*"),
        ("", "00:03"),
    ]
    assert [lease.line for lease in stale_leases(good, owners, {"2001:db8::5"})] == [
        "9 7 2001:db8::5 vm1 00:03"
    ]


def test_find_reassigned_returns_dhcp_addresses_with_changed_mac() -> None:
    dnsmasq = find_namespace(new_description(), "net").dnsmasq
    assert dnsmasq is not None
    lines = "fa:16:3e:00:00:05,id:*,10.0.0.5,[2001:db8::5],vm1\n\nx\n"
    assert find_reassigned(
        lines, {"10.0.0.5": "fa:16:3e:00:00:05", "2001:db8::5": "fa:16:3e:00:00:09"}
    ) == {"2001:db8::5"}
    assert find_reassigned(dnsmasq.hosts, dict(dnsmasq.reserved)) == set()


def test_router_rules_translate_floating_ips_and_drop_other_packets() -> None:
    router = find_namespace(new_description(), "router")
    assert [pair.inner for pair in router.pairs][-1] == "out"
    assert router.pairs[-1].addresses == ("172.24.4.5/24", "172.24.4.9/32")
    assert router.routes == (("0.0.0.0/0", "172.24.4.1"),)
    for line in (
        "dnat ip to ip daddr map { 172.24.4.9 : 10.0.0.5 }",
        'oifname "out" snat ip to ip saddr map { 10.0.0.5 : 172.24.4.9 }',
        'oifname "out" snat ip to 172.24.4.5',
        'iifname "out" meta nfproto ipv4 drop',
    ):
        assert f"\n{line}\n" in router.rules
    closed = new_description()
    closed["routers"][ROUTER]["external"]["snat"] = False
    assert '\noifname "out" snat ip to 172.24.4.5\n' not in find_namespace(closed, "router").rules
    twice = new_description()
    leg = twice["routers"][ROUTER]["interfaces"][0]
    twice["routers"][ROUTER]["interfaces"].append(leg | {"address": "10.0.1.1/24"})
    assert find_namespace(twice, "router").pairs[0].addresses == ("10.0.0.1/24", "10.0.1.1/24")


def test_external_gateway_is_only_on_gateway_host() -> None:
    state = build_state(new_description())
    assert [pair.addresses for pair in state.gateways] == [("172.24.4.1/24",)]
    assert "ip saddr 172.24.4.0/24 masquerade" in state.rules
    description = parse(new_description())
    other = desire(
        HostPlace(NAMES, ip_address("192.168.5.1")),
        description,
        assign({}, description.ports),
        assign({}, [bridge(network) for network in description.networks]),
    )
    assert other.gateways == ()
    assert "masquerade" not in other.rules


def test_nftables_rules_drop_tunnel_packets_except_from_described_hosts() -> None:
    assert "ip daddr 192.168.5.1 udp dport 4789 ip saddr != { 192.168.5.2 } drop" in build_rules(
        new_description()
    )
    assert "ip daddr 192.168.5.1 udp dport 4789 drop" in desire(PLACE, Description(), {}, {}).rules


def test_metadata_request_is_signed_with_key_of_host() -> None:
    port = parse(new_description()).ports[PORT]
    upstream = MetadataUpstream("http://127.0.0.1:1", "h1", "secret")
    headers = upstream.headers(port, "10.0.0.5")
    assert headers["X-Instance-Host"] == "h1" and "secret" not in repr(upstream)
    assert headers["X-Instance-ID"] == PORT
    assert headers["X-Forwarded-For"] == "10.0.0.5"
    assert (
        headers["X-Instance-ID-Signature"] == hmac.digest(b"secret", PORT.encode(), "sha256").hex()
    )


class FakeRoutes:
    """The routes of a namespace. As in the kernel, "replace" replaces the route by destination."""

    def __init__(self) -> None:
        self.hops: dict[str, str] = {}

    def get_routes(self, family: int, proto: int) -> list[dict[str, Any]]:
        return [
            {"dst": destination[: -len(length) - 1], "dst_len": int(length), "gateway": hop}
            for destination, hop in self.hops.items()
            for length in [destination.partition("/")[2]]
            if (":" in destination) == (family == socket.AF_INET6)
        ]

    def route(self, command: str, dst: str, gateway: str, **options: Any) -> None:
        if command == "replace":
            self.hops[dst] = gateway
        elif self.hops.get(dst) == gateway:
            del self.hops[dst]
        else:
            raise KernelError("No such process")


def test_set_routes_changes_next_hop_and_keeps_one_of_two_to_same_destination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes, kernel = FakeRoutes(), Kernel(None)
    monkeypatch.setattr(kernel, "_netlink", lambda act, namespace: act(routes))
    kernel.set_routes("r", {("0.0.0.0/0", "10.0.0.2"), ("10.8.0.0/16", "10.0.0.2")})
    kernel.set_routes("r", {("0.0.0.0/0", "10.0.0.3"), ("2001:db8::/48", "2001:db8:1::2")})
    assert routes.hops == {"0.0.0.0/0": "10.0.0.3", "2001:db8::/48": "2001:db8:1::2"}
    for _ in range(2):
        kernel.set_routes("r", {("10.8.0.0/16", "10.0.0.3"), ("10.8.0.0/16", "10.0.0.4")})
        assert routes.hops == {"10.8.0.0/16": "10.0.0.4"}
    kernel.set_routes("r", set())
    assert routes.hops == {}


def test_loop_stop_in_signal_handler_ends_wait_at_any_moment() -> None:
    """A signal may arrive while the main thread itself reads its queue and holds a lock there."""
    loop = Loop(cast("Any", None), lambda seen, wait: None, lambda revision, failed: None)
    is_stopped = False

    def interrupt(frame: Any, event: str, argument: object) -> None:
        nonlocal is_stopped
        if frame.f_code.co_name == "_qsize" and not is_stopped:
            is_stopped = True
            loop.stop()

    def wait() -> None:
        sys.setprofile(interrupt)
        loop._next(0.1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
