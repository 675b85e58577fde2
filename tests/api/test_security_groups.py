# SPDX-License-Identifier: Apache-2.0
"""The security groups of a server: list with rules, add and remove."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from tests.api.conftest import OTHER, PROJECT, Cloud
from tests.api.networks import Networks


def rule_id(number: int) -> str:
    return f"{number}0000000-0000-4000-8000-000000000000"


def rule(group: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": rule_id(number),
        "security_group_id": group,
        "direction": "ingress",
        "ethertype": "IPv4",
        "protocol": None,
        "port_range_min": None,
        "port_range_max": None,
        "remote_group_id": None,
        "remote_ip_prefix": None,
        "project_id": PROJECT,
        **more,
    }


def create_server_with_port(cloud: Cloud, networks: Networks, *groups: str) -> str:
    """Create a server with one port in these groups, and return the server's id."""
    server, red = cloud.create(mv="2.37"), networks.add_network("red", PROJECT)
    port = networks.add_port(red, PROJECT, device_id=server, security_groups=list(groups))
    cloud.set_state(server, interfaces=[to_wire(Interface(port, red, "red"))])
    return server


def change_group(cloud: Cloud, server: str, key: str, name: str, token: str = "user") -> Any:
    return cloud.call("POST", f"/servers/{server}/action", {key: {"name": name}}, token=token)


def test_server_security_groups_show_ingress_rules(
    networked_cloud: Cloud, networks: Networks
) -> None:
    db = networks.add_group("db", PROJECT)
    web = networks.add_group("web", PROJECT)
    networks.groups[-1]["security_group_rules"] = [
        rule(
            web,
            1,
            protocol="tcp",
            port_range_min=80,
            port_range_max=81,
            remote_ip_prefix="10.0.0.0/8",
        ),
        rule(web, 2, protocol="udp"),
        rule(web, 3, protocol="icmp"),
        rule(web, 4, remote_group_id=db),
        rule(web, 5, direction="egress"),
        rule(web, 6, ethertype="IPv6"),
    ]
    server = create_server_with_port(networked_cloud, networks, web)

    def rule_view(
        number: int,
        protocol: str | None,
        minimum: int | None,
        maximum: int | None,
        cidr: str | None,
    ) -> Any:
        return {
            "id": rule_id(number),
            "parent_group_id": web,
            "ip_protocol": protocol,
            "from_port": minimum,
            "to_port": maximum,
            "ip_range": {"cidr": cidr} if cidr else {},
            "group": {} if cidr else {"name": "db", "tenant_id": PROJECT},
        }

    answer = networked_cloud.call("GET", f"/servers/{server}/os-security-groups")
    assert answer.json == {
        "security_groups": [
            {
                "id": web,
                "name": "web",
                "description": "the group web",
                "tenant_id": PROJECT,
                "rules": [
                    rule_view(1, "tcp", 80, 81, "10.0.0.0/8"),
                    rule_view(2, "udp", 1, 65535, "0.0.0.0/0"),
                    rule_view(3, "icmp", -1, -1, "0.0.0.0/0"),
                    rule_view(4, None, None, None, None),
                    rule_view(6, None, None, None, "::/0"),
                ],
            }
        ]
    }
    assert (
        networked_cloud.call(
            "GET", f"/servers/{server}/os-security-groups", token="stranger"
        ).status_code
        == 404
    )


def test_server_security_groups_without_ports_are_empty(
    networked_cloud: Cloud, cloud: Cloud
) -> None:
    for any_cloud in (networked_cloud, cloud):
        answer = any_cloud.call("GET", f"/servers/{any_cloud.create()}/os-security-groups")
        assert answer.json == {"security_groups": []}


@pytest.mark.parametrize(
    ("port_groups", "names"),
    [
        ([["web"], ["web", "db"]], ["web", "web", "db"]),
        ([[], ["db"]], ["db"]),
        ([[], []], None),
        ([], None),
        ([["web"], None], ["asked"]),
    ],
)
def test_server_shows_security_groups_of_ports_or_if_unknown_of_request(
    networked_cloud: Cloud,
    networks: Networks,
    port_groups: list[list[str] | None],
    names: list[str] | None,
) -> None:
    networks.add_group("asked", PROJECT)
    server = networked_cloud.create(mv="2.37", networks="none", security_groups=[{"name": "asked"}])
    assert "security_groups" not in networked_cloud.call("GET", f"/servers/{server}").json["server"]
    networked_cloud.set_state(
        server,
        interfaces=[
            to_wire(Interface(str(number), groups=groups))
            for number, groups in enumerate(port_groups)
        ],
    )
    views = [
        networked_cloud.call("GET", f"/servers/{server}").json["server"],
        networked_cloud.call("GET", "/servers/detail").json["servers"][0],
        networked_cloud.call(
            "PUT", f"/servers/{server}", {"server": {"name": "n"}}, mv="2.75"
        ).json["server"],
    ]
    for view in views:
        assert view.get("security_groups") == (names and [{"name": name} for name in names])
        assert ("security_groups" in view) == (names is not None)


@pytest.mark.parametrize("key", ["addSecurityGroup", "removeSecurityGroup"])
@pytest.mark.parametrize("by_id", [True, False])
def test_security_group_action_accepts_name_or_id(
    networked_cloud: Cloud, networks: Networks, key: str, by_id: bool
) -> None:
    web = networks.add_group("web", PROJECT)
    server = create_server_with_port(networked_cloud, networks, web)
    answer = change_group(networked_cloud, server, key, web if by_id else "web")
    assert (answer.status_code, answer.text) == (202, "")
    action = networked_cloud.rows(schema.actions)[-1]
    assert (action.name, action.args) == (key, {"was": "active", "group": web, "name": "web"})


@pytest.mark.parametrize("key", ["addSecurityGroup", "removeSecurityGroup"])
def test_security_group_action_refuses_unknown_foreign_or_ambiguous_group(
    networked_cloud: Cloud, networks: Networks, key: str
) -> None:
    (
        networks.add_group("twice", PROJECT),
        networks.add_group("twice", PROJECT),
        networks.add_group("foreign", OTHER),
    )
    server, before = (
        create_server_with_port(networked_cloud, networks),
        len(networked_cloud.rows(schema.actions)),
    )
    for status, name, message in [
        (404, "nope", "Security group nope not found."),
        (404, "foreign", "Security group foreign not found."),
        (
            409,
            "twice",
            "Multiple security_group matches found for name 'twice', use an ID to be more specific.",
        ),
    ]:
        answer = change_group(networked_cloud, server, key, name)
        assert [answer.status_code, [fault["message"] for fault in answer.json.values()]] == [
            status,
            [message],
        ]
    assert change_group(networked_cloud, server, key, "").status_code == 400
    assert change_group(networked_cloud, server, key, "nope", "stranger").status_code == 404
    assert change_group(networked_cloud, server, key, "nope", "reader").status_code == 403
    assert len(networked_cloud.rows(schema.actions)) == before


def test_remove_security_group_of_no_port_returns_404(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.add_group("web", PROJECT)
    server = create_server_with_port(networked_cloud, networks)
    answer = change_group(networked_cloud, server, "removeSecurityGroup", "web")
    assert (
        answer.json["itemNotFound"]["message"]
        == f"Security group web is not associated with server {server}."
    )


def test_add_security_group_to_server_without_ports_returns_404(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.add_group("web", PROJECT)
    server = networked_cloud.create()
    networked_cloud.set_state(server)
    assert change_group(networked_cloud, server, "addSecurityGroup", "web").json["itemNotFound"][
        "message"
    ] == (f"Server {server} has no port for a security group; attach an interface first.")


def test_add_security_group_without_network_service_returns_404(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    assert change_group(cloud, server, "addSecurityGroup", "web").status_code == 404
