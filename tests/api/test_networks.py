# SPDX-License-Identifier: Apache-2.0
"""POST /servers with networks: what the conductor is told, what the row keeps, and every
refusal."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from tests.api.conftest import IMAGE, OTHER, PROJECT, Cloud
from tests.api.networks import Networks

UNKNOWN = "deadbeef-dead-dead-dead-deaddeadbeef"
KINDS = {400: "badRequest", 403: "forbidden", 409: "conflictingRequest", 503: "serviceUnavailable"}


def order(cloud: Cloud, mv: str = "2.42", token: str = "user", **change: Any) -> Any:
    return cloud.call(
        "POST",
        "/servers",
        {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **change}},
        mv=mv,
        token=token,
    )


def made(cloud: Cloud, **change: Any) -> tuple[Any, Any]:
    """The rows of a server and its action."""
    answer = order(cloud, **change)
    assert answer.status_code == 202, answer.text
    return cloud.rows(schema.servers)[-1], cloud.rows(schema.actions)[-1]


def refused(cloud: Cloud, status: int, message: str, **change: Any) -> None:
    """The answer says this, and nothing is left behind."""
    answer = order(cloud, **change)
    assert answer.json == {KINDS[status]: {"code": status, "message": message}}
    assert cloud.rows(schema.servers) == cloud.rows(schema.actions) == []
    assert cloud.wakeup.woken == 0


def test_networks_ports_and_addresses_in_order(wired: Cloud, networks: Networks) -> None:
    red, blue = (
        networks.add_network("red", PROJECT),
        networks.add_network("blue", OTHER, "10.1.0.0/24", shared=True),
    )
    port = networks.add_port(blue, PROJECT, "10.1.0.77")
    server, action = made(
        wired,
        networks=[
            {"uuid": red, "fixed_ip": "10.0.0.9"},
            {"port": port, "tag": "data"},
            {"uuid": red},
        ],
    )
    assert action.args["networks"] == [
        {"network": red, "label": "red", "fixed_ip": "10.0.0.9"},
        {"port": port, "label": "blue", "tag": "data"},
        {"network": red, "label": "red"},
    ]
    assert action.args["security_groups"] == []
    mac = networks.ports_by_id[port]["mac_address"]
    assert server.interfaces == [to_wire(Interface(port, blue, "blue", mac, own=False, tag="data"))]
    assert wired.call("GET", f"/servers/{server.id}").json["server"]["addresses"] == {}


def test_a_network_beside_its_port_is_passed_over(wired: Cloud, networks: Networks) -> None:
    port = networks.add_port(networks.add_network("red", PROJECT), PROJECT)
    assert made(wired, networks=[{"uuid": UNKNOWN, "port": port}])[1].args["networks"] == [
        {"port": port, "label": "red"}
    ]


@pytest.mark.parametrize(
    "change", [{"networks": "none"}, {"networks": [], "mv": "2.1"}, {"mv": "2.36"}]
)
def test_without_networks_there_are_no_interfaces(wired: Cloud, change: Any) -> None:
    server, action = made(wired, **change)
    assert action.args["networks"] == []
    assert server.interfaces is None


@pytest.mark.parametrize("change", [{"networks": "auto"}, {"mv": "2.36"}, {"networks": []}])
def test_the_only_network_is_meant(wired: Cloud, networks: Networks, change: Any) -> None:
    networks.add_network("foreign", OTHER)
    red = networks.add_network("red", PROJECT)
    assert made(wired, **change)[1].args["networks"] == [{"network": red, "label": "red"}]
    networks.add_network("blue", OTHER, shared=True)
    answer = order(wired, **change)
    assert answer.status_code == 409
    assert answer.json["conflictingRequest"]["message"] == (
        "Multiple possible networks found, use a Network ID to be more specific."
    )


def test_a_server_that_may_get_ports_is_known_from_the_first(
    wired: Cloud, networks: Networks
) -> None:
    """NULL would tell a delete in the middle of the create that there is nothing to look for."""
    red = networks.add_network("red", PROJECT)
    assert made(wired, networks=[{"uuid": red}])[0].interfaces == []


def test_security_groups_by_name_and_by_id(wired: Cloud, networks: Networks) -> None:
    networks.add_network("red", PROJECT)
    web, db = networks.add_group("web", PROJECT), networks.add_group("db", PROJECT)
    networks.add_group("web", OTHER)
    server, action = made(
        wired, networks="auto", security_groups=[{"name": "web"}, {"name": db}, {"name": web}]
    )
    assert action.args["security_groups"] == [web, db]
    assert server.security_groups == [{"name": "web"}, {"name": "db"}]


def test_the_default_group_is_the_network_services_own_matter(
    wired: Cloud, networks: Networks
) -> None:
    networks.add_network("red", PROJECT)
    server, action = made(wired, networks="auto", security_groups=[{"name": "default"}])
    assert action.args["security_groups"] == []
    assert server.security_groups == [{"name": "default"}]
    assert networks.asked["groups"] == 0


def test_the_quota_of_ports_bounds_how_many_servers_there_are(
    wired: Cloud, networks: Networks
) -> None:
    red, networks.limit = networks.add_network("red", PROJECT), 5
    refused(
        wired, 403, "Maximum number of ports exceeded", networks=[{"uuid": red}] * 2, min_count=3
    )
    assert order(wired, networks=[{"uuid": red}] * 2, min_count=1, max_count=4).status_code == 202
    assert len(wired.rows(schema.servers)) == 2


def test_an_admin_may_attach_to_an_external_network(wired: Cloud, networks: Networks) -> None:
    public = networks.add_network("public", OTHER, external=True)
    refused(
        wired,
        403,
        f"It is not allowed to create an interface on external network {public}",
        networks=[{"uuid": public}],
    )
    assert order(wired, networks=[{"uuid": public}], token="admin").status_code == 202


def test_a_silent_network_service_is_said_to_be(wired: Cloud, networks: Networks) -> None:
    networks.down = True
    refused(
        wired,
        503,
        "The network service does not answer; try again later.",
        networks=[{"uuid": UNKNOWN}],
    )
    assert order(wired, networks="none").status_code == 202


def test_a_policy_may_forbid_networks(make_cloud: Any, networks: Networks, tmp_path: Any) -> None:
    (tmp_path / "policy.yaml").write_text(
        '"os_compute_api:servers:create:attach_network": "role:admin"\n'
    )
    cloud = make_cloud(networks=networks, policy_file=str(tmp_path / "policy.yaml"))
    networks.add_network("red", PROJECT)
    refused(
        cloud,
        403,
        "Policy doesn't allow os_compute_api:servers:create:attach_network to be performed.",
        networks="auto",
    )


# fmt: off
def test_what_is_wrong_with_networks(wired: Cloud, networks: Networks) -> None:
    red, foreign = networks.add_network("red", PROJECT), networks.add_network("foreign", OTHER)
    bare = networks.add_network("bare", PROJECT, None)
    used, theirs = networks.add_port(red, PROJECT, "10.0.0.7", device_id="x"), networks.add_port(red, OTHER)
    free, dry = networks.add_port(red, PROJECT), networks.add_port(red, PROJECT, "")
    networks.add_group("twice", PROJECT), networks.add_group("twice", PROJECT), networks.add_group("other", OTHER)
    none: dict[str, Any] = {"networks": "none"}
    wrong: list[tuple[int, str, dict[str, Any]]] = [
        (400, f"Network {UNKNOWN} could not be found.", {"networks": [{"uuid": UNKNOWN}]}),
        (400, f"Network {foreign} could not be found.", {"networks": [{"uuid": foreign}]}),
        (400, f"Network {bare} requires a subnet in order to boot instances on.", {"networks": [{"uuid": bare}]}),
        (400, "networks: each entry needs a port, or the uuid of a network, which None is not.", {"networks": [{}]}),
        (400, "networks: each entry needs a port, or the uuid of a network, which red is not.",
         {"networks": [{"uuid": "red"}], "mv": "2.36"}),
        (400, f"Port id {UNKNOWN} could not be found.", {"networks": [{"port": UNKNOWN}]}),
        (400, f"Port id {theirs} could not be found.", {"networks": [{"port": theirs}]}),
        (400, f"Port {theirs} is not usable: it is another project's.",
         {"networks": [{"port": theirs}], "token": "admin"}),
        (400, f"Port {dry} requires a FixedIP in order to be used.", {"networks": [{"port": dry}]}),
        (409, f"Port {used} is still in use.", {"networks": [{"port": used}]}),
        (400, f"networks: port {free} is given twice.", {"networks": [{"port": free}, {"port": free}]}),
        (400, f"networks: fixed_ip 10.0.0.9 cannot be given together with port {free}, which has its addresses "
         "already.", {"networks": [{"port": free, "fixed_ip": "10.0.0.9"}]}),
        (400, "networks: a port belongs to one server; make servers with ports of their own in separate requests.",
         {"networks": [{"port": free}], "max_count": 2}),
        (400, "networks: max_count cannot be greater than 1 if a fixed_ip is specified.",
         {"networks": [{"uuid": red, "fixed_ip": "10.0.0.9"}], "min_count": 2}),
        (400, f"Fixed IP address 10.9.9.9 is in no subnet of network {red}.",
         {"networks": [{"uuid": red, "fixed_ip": "10.9.9.9"}]}),
        (400, f"Fixed IP address fe80::1 is in no subnet of network {red}.",
         {"networks": [{"uuid": red, "fixed_ip": "fe80::1"}]}),
        (400, "Fixed IP address 10.0.0.7 is already in use on instance x.",
         {"networks": [{"uuid": red, "fixed_ip": "10.0.0.7"}]}),
        (400, "Fixed IP address 10.0.0.9 is already in use.",
         {"networks": [{"uuid": red, "fixed_ip": "10.0.0.9"}] * 2}),
        (400, "Security group nope not found.", {**none, "security_groups": [{"name": "nope"}]}),
        (400, "Security group other not found.", {**none, "security_groups": [{"name": "other"}]}),
        (409, "Multiple security_group matches found for name 'twice', use an ID to be more specific.",
         {**none, "security_groups": [{"name": "twice"}]}),
    ]
    for status, message, change in wrong:
        refused(wired, status, message, **change)
# fmt: on


UNSUPPORTED = {
    "vnic_type": {"binding:vnic_type": "direct"},
    "resource_request": {"resource_request": {"request_groups": [{"required": ["CUSTOM_A"]}]}},
    "numa_affinity_policy": {"numa_affinity_policy": "required"},
    "device_profile": {"device_profile": "fpga"},
    "bandwidth": {"qos_policy_id": {"type": "minimum_bandwidth", "min_kbps": 1000}},
    "packet_rate": {"qos_policy_id": {"type": "minimum_packet_rate", "min_kpps": 10}},
    "network_bandwidth": {"qos_network_policy_id": {"type": "minimum_bandwidth", "min_kbps": 1}},
}


def add_unsupported_port(networks: Networks, network_id: str, case: str) -> tuple[str, str]:
    """Add a port that no host can carry out. Return its id and the text that names the reason."""
    [(name, value)] = UNSUPPORTED[case].items()
    if not name.startswith("qos_"):
        text = "binding:vnic_type direct" if case == "vnic_type" else name
        return networks.add_port(network_id, PROJECT, **{name: value}), text
    policy = networks.add_qos_policy(PROJECT, {"type": "dscp_marking", "dscp_mark": 16}, value)
    port = networks.add_port(network_id, PROJECT, **{name: policy})
    return port, f"{value['type']} of QoS policy {policy}"


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_create_with_unsupported_port_returns_400_by_name(
    wired: Cloud, networks: Networks, case: str
) -> None:
    port, reason = add_unsupported_port(networks, networks.add_network("red", PROJECT), case)
    message = f"Port {port} cannot be used: no host supports its {reason}."
    refused(wired, 400, message, networks=[{"port": port}])


def test_create_with_network_of_minimum_bandwidth_returns_400_by_name(
    wired: Cloud, networks: Networks
) -> None:
    red = networks.add_network("red", PROJECT)
    policy = networks.add_qos_policy(PROJECT, {"type": "minimum_bandwidth", "min_kbps": 1000})
    networks.networks_by_id[red]["qos_policy_id"] = policy
    reason = f"minimum_bandwidth of QoS policy {policy}"
    message = f"Network {red} cannot be used: no host supports its {reason}."
    refused(wired, 400, message, networks=[{"uuid": red}])


def test_create_with_port_without_address_is_accepted(wired: Cloud, networks: Networks) -> None:
    bare = networks.add_network("bare", PROJECT, None)
    ports = [
        networks.add_port(bare, PROJECT, "", ip_allocation=kind) for kind in ("none", "deferred")
    ]
    _, action = made(wired, networks=[{"port": port} for port in ports])
    assert [one["port"] for one in action.args["networks"]] == ports


def test_create_with_limiting_or_invisible_qos_policy_is_accepted(
    wired: Cloud, networks: Networks
) -> None:
    """A policy that the tenant may not read is left to the conductor, which reads the port."""
    red = networks.add_network("red", PROJECT)
    limit = networks.add_qos_policy(PROJECT, {"type": "bandwidth_limit", "max_kbps": 1000})
    foreign = networks.add_qos_policy(OTHER, {"type": "minimum_bandwidth", "min_kbps": 1000})
    ports = [networks.add_port(red, PROJECT, qos_policy_id=one) for one in (limit, foreign)]
    ports.append(networks.add_port(red, PROJECT, **{"binding:vnic_type": "normal"}))
    _, action = made(wired, networks=[{"port": port} for port in ports])
    assert [one["port"] for one in action.args["networks"]] == ports


def test_auto_with_nothing_to_allocate(wired: Cloud) -> None:
    refused(
        wired,
        400,
        f"networks: unable to automatically allocate a network for project {PROJECT}; make one, or ask "
        'for "none".',
        networks="auto",
    )


@pytest.mark.parametrize(
    ("mv", "status"),
    [("2.31", 400), ("2.32", 202), ("2.36", 202), ("2.37", 400), ("2.41", 400), ("2.42", 202)],
)
def test_tags_of_networks_come_and_go_with_the_version(
    wired: Cloud, networks: Networks, mv: str, status: int
) -> None:
    red = networks.add_network("red", PROJECT)
    assert order(wired, mv=mv, networks=[{"uuid": red, "tag": "nic"}]).status_code == status


def test_from_2_37_networks_must_be_said(wired: Cloud) -> None:
    assert order(wired, mv="2.37").status_code == 400
    assert order(wired, mv="2.37", networks="some").status_code == 400


def test_a_catalogue_without_a_network_service(wired: Cloud, networks: Networks) -> None:
    networks.there = False
    refused(
        wired,
        400,
        'networks: this cloud has no network service; leave networks out, or ask for "none" or "auto".',
        networks=[{"uuid": UNKNOWN}],
    )
    assert made(wired, networks="auto")[1].args["networks"] == []
