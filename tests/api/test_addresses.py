# SPDX-License-Identifier: Apache-2.0
"""A server's addresses as they are shown and searched."""

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


def plugged(cloud: Cloud, *interfaces: Interface, name: str = "vm") -> str:
    server = cloud.create(name)
    cloud.rest(server, interfaces=[to_wire(one) for one in interfaces])
    return server


def test_addresses_by_network_the_floating_ones_last(cloud: Cloud) -> None:
    server = plugged(cloud, RED, BLUE, RED_TOO, BARE)

    def shown(version: int, text: str, kind: str, mac: str) -> dict[str, Any]:
        return {
            "version": version,
            "addr": text,
            "OS-EXT-IPS:type": kind,
            "OS-EXT-IPS-MAC:mac_addr": mac,
        }

    found = cloud.call("GET", f"/servers/{server}").json["server"]["addresses"]
    assert found == {
        "red": [
            shown(4, "10.0.0.5", "fixed", RED.mac),
            shown(4, "10.0.0.6", "fixed", RED.mac),
            shown(4, "10.0.0.7", "fixed", RED_TOO.mac),
            shown(4, "172.24.4.9", "floating", RED.mac),
        ],
        "blue": [shown(6, "2001:db8::5", "fixed", BLUE.mac)],
    }
    assert cloud.call("GET", "/servers/detail").json["servers"][0]["addresses"] == found
    plain = {
        label: [{"version": one["version"], "addr": one["addr"]} for one in each]
        for label, each in found.items()
    }
    assert cloud.call("GET", f"/servers/{server}/ips").json == {"addresses": plain}
    assert cloud.call("GET", f"/servers/{server}/ips/red").json == {"red": plain["red"]}


def test_a_network_that_the_server_is_not_on(cloud: Cloud) -> None:
    answer = cloud.call("GET", f"/servers/{plugged(cloud, RED)}/ips/blue")
    assert answer.json == {
        "itemNotFound": {"code": 404, "message": "Network blue is not one of the server's."}
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
def test_servers_by_address(cloud: Cloud, query: str, names: list[str]) -> None:
    plugged(cloud, RED, name="a")
    plugged(cloud, Interface("p5", "n1", "red", "m", [address("10.0.0.17")]), name="b")
    plugged(cloud, BLUE, name="c")
    cloud.create("d")
    answer = cloud.call("GET", f"/servers?{query}", mv="2.5")
    assert [server["name"] for server in answer.json["servers"]] == names


def test_ip6_is_for_everybody_from_2_5_on(cloud: Cloud) -> None:
    plugged(cloud, BLUE)
    assert len(cloud.call("GET", "/servers?ip6=::9", mv="2.4").json["servers"]) == 1
    assert len(cloud.call("GET", "/servers?ip6=::9", mv="2.5").json["servers"]) == 0


def test_only_what_the_network_service_decides_is_refreshed(cloud: Cloud) -> None:
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
    server = plugged(cloud, old, RED_TOO)
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
def test_update_shows_whole_addresses_since_2_75(cloud: Cloud, mv: str, keys: set[str]) -> None:
    server = plugged(cloud, BLUE)
    found = cloud.call("PUT", f"/servers/{server}", {"server": {"name": "new"}}, mv=mv).json[
        "server"
    ]["addresses"]
    assert set(found["blue"][0]) == keys
