# SPDX-License-Identifier: Apache-2.0
"""The addresses of a server in its record, and filters by address."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from common.store.servers.servers import refresh_interfaces
from tests.api.conftest import Cloud


def address(text: str, *floating: str, **more: Any) -> dict[str, Any]:
    return {
        "address": text,
        "version": 6 if ":" in text else 4,
        "prefix": 24,
        "subnet": "s",
        "gateway": "10.0.0.1",
        "dns": ["192.0.2.53"],
        "routes": [],
        "dhcp": True,
        "floating": list(floating),
        **more,
    }


RED = Interface(
    "p1", "n1", "red", "fa:16:3e:00:00:01", [address("10.0.0.5", "172.24.4.9"), address("10.0.0.6")]
)
BLUE = Interface("p2", "n2", "blue", "fa:16:3e:00:00:02", [address("2001:db8::5")])
RED_TOO = Interface("p3", "n1", "red", "fa:16:3e:00:00:03", [address("10.0.0.7")])
BARE = Interface("p4", "n4", "bare", "fa:16:3e:00:00:04")


def create_server(cloud: Cloud, *interfaces: Interface, name: str = "vm") -> str:
    server = cloud.create(name)
    cloud.set_state(server, interfaces=[to_wire(interface) for interface in interfaces])
    return server


def test_server_addresses_are_grouped_by_network_with_floating_last(cloud: Cloud) -> None:
    server = create_server(cloud, RED, BLUE, RED_TOO, BARE)

    def address_of(version: int, text: str, kind: str, mac: str) -> dict[str, Any]:
        return {
            "version": version,
            "addr": text,
            "OS-EXT-IPS:type": kind,
            "OS-EXT-IPS-MAC:mac_addr": mac,
        }

    addresses = cloud.call("GET", f"/servers/{server}").json["server"]["addresses"]
    assert addresses == {
        "red": [
            address_of(4, "10.0.0.5", "fixed", RED.mac),
            address_of(4, "10.0.0.6", "fixed", RED.mac),
            address_of(4, "10.0.0.7", "fixed", RED_TOO.mac),
            address_of(4, "172.24.4.9", "floating", RED.mac),
        ],
        "blue": [address_of(6, "2001:db8::5", "fixed", BLUE.mac)],
    }
    assert cloud.call("GET", "/servers/detail").json["servers"][0]["addresses"] == addresses
    plain = {
        label: [{"version": item["version"], "addr": item["addr"]} for item in items]
        for label, items in addresses.items()
    }
    assert cloud.call("GET", f"/servers/{server}/ips").json == {"addresses": plain}
    assert cloud.call("GET", f"/servers/{server}/ips/red").json == {"red": plain["red"]}


def test_show_server_ips_of_network_without_interface_returns_404(cloud: Cloud) -> None:
    server = create_server(cloud, RED)
    answer = cloud.call("GET", f"/servers/{server}/ips/blue")
    assert answer.json == {
        "itemNotFound": {
            "code": 404,
            "message": f"Server {server} has no interface in network blue.",
        }
    }


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("ip=10.0.0.5", ["a"]),
        ("ip=10.0.0", ["b", "a"]),
        ("ip=^10.0", ["b", "a"]),
        ("ip=0.5$", ["a"]),
        ("ip=^10\\.0\\.0\\.17$", ["b"]),
        ("ip=10.*7", ["b"]),
        ("ip=10.0.0.1", ["b"]),
        ("ip=172.24.4.9", []),
        ("ip=192.0.2.53", []),
        ("ip=^0", []),
        ("ip=(10|11)", []),
        ("ip6=2001:DB8", ["c"]),
        ("ip6=::5", ["c"]),
        ("ip6=10", []),
        ("ip=2001", []),
        ("ip6=10.0.0.5", []),
        ("ip=10.0.0.5&name=b", []),
    ],
)
def test_list_servers_filters_by_ip_pattern(cloud: Cloud, query: str, names: list[str]) -> None:
    create_server(cloud, RED, name="a")
    create_server(cloud, Interface("p5", "n1", "red", "m", [address("10.0.0.17")]), name="b")
    create_server(cloud, BLUE, name="c")
    cloud.create("d")
    answer = cloud.call("GET", f"/servers?{query}", mv="2.5")
    assert [server["name"] for server in answer.json["servers"]] == names


def test_list_servers_ip6_filter_applies_to_users_from_2_5(cloud: Cloud) -> None:
    create_server(cloud, BLUE)
    assert len(cloud.call("GET", "/servers?ip6=::9", mv="2.4").json["servers"]) == 1
    assert len(cloud.call("GET", "/servers?ip6=::9", mv="2.5").json["servers"]) == 0


def test_refresh_interfaces_updates_only_fields_of_network_service(cloud: Cloud) -> None:
    old = Interface(
        "p1",
        "n1",
        "red",
        "m",
        [address("10.0.0.5")],
        1450,
        "tag",
        own=False,
        vif_type="bridge",
        device="tap",
        bridge="brq",
    )
    server = create_server(cloud, old, RED_TOO)
    before = cloud.rows(schema.servers)[0]
    cloud.store.write(lambda tx: refresh_interfaces(tx, server, [old, RED_TOO]))
    assert cloud.rows(schema.servers)[0] == before
    now = Interface(
        "p1",
        "nx",
        "pink",
        "mx",
        [address("10.0.0.8")],
        1400,
        "",
        True,
        "ovs",
        "x",
        "y",
        True,
        ["web"],
    )
    cloud.store.write(lambda tx: refresh_interfaces(tx, server, [now, BLUE]))
    assert cloud.rows(schema.servers)[0].interfaces == [
        to_wire(
            Interface(
                "p1",
                "n1",
                "pink",
                "m",
                [address("10.0.0.8")],
                1400,
                "tag",
                own=False,
                vif_type="bridge",
                device="tap",
                bridge="brq",
                active=True,
                groups=["web"],
            )
        ),
        to_wire(RED_TOO),
    ]
    cloud.store.write(lambda tx: refresh_interfaces(tx, "gone", [now]))


@pytest.mark.parametrize(
    ("mv", "keys"),
    [
        ("2.74", {"version", "addr"}),
        ("2.75", {"version", "addr", "OS-EXT-IPS:type", "OS-EXT-IPS-MAC:mac_addr"}),
    ],
)
def test_update_server_shows_type_and_mac_of_addresses_from_2_75(
    cloud: Cloud, mv: str, keys: set[str]
) -> None:
    server = create_server(cloud, BLUE)
    addresses = cloud.call("PUT", f"/servers/{server}", {"server": {"name": "new"}}, mv=mv).json[
        "server"
    ]["addresses"]
    assert set(addresses["blue"][0]) == keys
