# SPDX-License-Identifier: Apache-2.0
"""POST /servers with networks: arguments of the create, interfaces in the row, and refusals."""

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


def request_create(cloud: Cloud, mv: str = "2.42", token: str = "user", **change: Any) -> Any:
    return cloud.call(
        "POST",
        "/servers",
        {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **change}},
        mv=mv,
        token=token,
    )


def create_and_read(cloud: Cloud, **change: Any) -> tuple[Any, Any]:
    """Create a server, and return the newest server row and action row."""
    answer = request_create(cloud, **change)
    assert answer.status_code == 202, answer.text
    return cloud.rows(schema.servers)[-1], cloud.rows(schema.actions)[-1]


def assert_refused(cloud: Cloud, status: int, message: str, **change: Any) -> None:
    """Check that a create is refused with this message and leaves no rows."""
    answer = request_create(cloud, **change)
    assert answer.json == {KINDS[status]: {"code": status, "message": message}}
    assert cloud.rows(schema.servers) == cloud.rows(schema.actions) == []
    assert cloud.wakeup.count == 0


def test_create_server_keeps_order_of_networks_and_ports(
    networked_cloud: Cloud, networks: Networks
) -> None:
    red, blue = (
        networks.add_network("red", PROJECT),
        networks.add_network("blue", OTHER, "10.1.0.0/24", shared=True),
    )
    port = networks.add_port(blue, PROJECT, "10.1.0.77")
    server, action = create_and_read(
        networked_cloud,
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
    assert networked_cloud.call("GET", f"/servers/{server.id}").json["server"]["addresses"] == {}


def test_create_server_with_port_ignores_network_uuid(
    networked_cloud: Cloud, networks: Networks
) -> None:
    port = networks.add_port(networks.add_network("red", PROJECT), PROJECT)
    assert create_and_read(networked_cloud, networks=[{"uuid": UNKNOWN, "port": port}])[1].args[
        "networks"
    ] == [{"port": port, "label": "red"}]


@pytest.mark.parametrize(
    "change", [{"networks": "none"}, {"networks": [], "mv": "2.1"}, {"mv": "2.36"}]
)
def test_create_server_has_no_interfaces_if_no_network_is_requested_or_exists(
    networked_cloud: Cloud, change: Any
) -> None:
    server, action = create_and_read(networked_cloud, **change)
    assert action.args["networks"] == []
    assert server.interfaces is None


@pytest.mark.parametrize("change", [{"networks": "auto"}, {"mv": "2.36"}, {"networks": []}])
def test_create_server_auto_uses_only_network_and_refuses_several(
    networked_cloud: Cloud, networks: Networks, change: Any
) -> None:
    networks.add_network("foreign", OTHER)
    red = networks.add_network("red", PROJECT)
    assert create_and_read(networked_cloud, **change)[1].args["networks"] == [
        {"network": red, "label": "red"}
    ]
    networks.add_network("blue", OTHER, shared=True)
    answer = request_create(networked_cloud, **change)
    assert answer.status_code == 409
    assert answer.json["conflictingRequest"]["message"] == (
        "Multiple possible networks found, use a Network ID to be more specific."
    )


def test_create_server_with_network_stores_empty_interfaces_and_not_null(
    networked_cloud: Cloud, networks: Networks
) -> None:
    """With NULL a delete during the create would not look for ports."""
    red = networks.add_network("red", PROJECT)
    assert create_and_read(networked_cloud, networks=[{"uuid": red}])[0].interfaces == []


def test_create_server_resolves_security_groups_by_name_and_id(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.add_network("red", PROJECT)
    web, db = networks.add_group("web", PROJECT), networks.add_group("db", PROJECT)
    networks.add_group("web", OTHER)
    server, action = create_and_read(
        networked_cloud,
        networks="auto",
        security_groups=[{"name": "web"}, {"name": db}, {"name": web}],
    )
    assert action.args["security_groups"] == [web, db]
    assert server.security_groups == [{"name": "web"}, {"name": "db"}]


def test_create_server_with_default_security_group_sends_no_lookup(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.add_network("red", PROJECT)
    server, action = create_and_read(
        networked_cloud, networks="auto", security_groups=[{"name": "default"}]
    )
    assert action.args["security_groups"] == []
    assert server.security_groups == [{"name": "default"}]
    assert networks.queries["groups"] == 0


def test_create_servers_are_limited_by_port_quota(
    networked_cloud: Cloud, networks: Networks
) -> None:
    red, networks.limit = networks.add_network("red", PROJECT), 5
    assert_refused(
        networked_cloud,
        403,
        "Maximum number of ports exceeded",
        networks=[{"uuid": red}] * 2,
        min_count=3,
    )
    assert (
        request_create(
            networked_cloud, networks=[{"uuid": red}] * 2, min_count=1, max_count=4
        ).status_code
        == 202
    )
    assert len(networked_cloud.rows(schema.servers)) == 2


def test_create_server_on_external_network_needs_admin(
    networked_cloud: Cloud, networks: Networks
) -> None:
    public = networks.add_network("public", OTHER, external=True)
    assert_refused(
        networked_cloud,
        403,
        f"It is not allowed to create an interface on external network {public}",
        networks=[{"uuid": public}],
    )
    assert (
        request_create(networked_cloud, networks=[{"uuid": public}], token="admin").status_code
        == 202
    )


def test_create_server_returns_503_when_network_service_is_down(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.down = True
    assert_refused(
        networked_cloud,
        503,
        "The network service does not answer; try again later.",
        networks=[{"uuid": UNKNOWN}],
    )
    assert request_create(networked_cloud, networks="none").status_code == 202


def test_create_server_with_networks_forbidden_by_policy_returns_403(
    make_cloud: Any, networks: Networks, tmp_path: Any
) -> None:
    (tmp_path / "policy.yaml").write_text(
        '"os_compute_api:servers:create:attach_network": "role:admin"\n'
    )
    cloud = make_cloud(networks=networks, policy_file=str(tmp_path / "policy.yaml"))
    networks.add_network("red", PROJECT)
    assert_refused(
        cloud,
        403,
        "Policy doesn't allow os_compute_api:servers:create:attach_network to be performed.",
        networks="auto",
    )


# fmt: off
def test_create_server_with_unusable_networks_is_refused(networked_cloud: Cloud, networks: Networks) -> None:
    red, foreign = networks.add_network("red", PROJECT), networks.add_network("foreign", OTHER)
    bare = networks.add_network("bare", PROJECT, None)
    used, foreign_port = networks.add_port(red, PROJECT, "10.0.0.7", device_id="x"), networks.add_port(red, OTHER)
    free, dry = networks.add_port(red, PROJECT), networks.add_port(red, PROJECT, "")
    networks.add_group("twice", PROJECT), networks.add_group("twice", PROJECT), networks.add_group("other", OTHER)
    without_networks: dict[str, Any] = {"networks": "none"}
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, f"Network {UNKNOWN} could not be found.", {"networks": [{"uuid": UNKNOWN}]}),
        (400, f"Network {foreign} could not be found.", {"networks": [{"uuid": foreign}]}),
        (400, f"Network {bare} requires a subnet in order to boot instances on.", {"networks": [{"uuid": bare}]}),
        (400, "networks: each entry needs a port, or a network's UUID as uuid; None is not a UUID.",
         {"networks": [{}]}),
        (400, "networks: each entry needs a port, or a network's UUID as uuid; red is not a UUID.",
         {"networks": [{"uuid": "red"}], "mv": "2.36"}),
        (400, f"Port id {UNKNOWN} could not be found.", {"networks": [{"port": UNKNOWN}]}),
        (400, f"Port id {foreign_port} could not be found.", {"networks": [{"port": foreign_port}]}),
        (400, f"Port {foreign_port} is not usable: it belongs to another project.",
         {"networks": [{"port": foreign_port}], "token": "admin"}),
        (400, f"Port {dry} requires a FixedIP in order to be used.", {"networks": [{"port": dry}]}),
        (409, f"Port {used} is still in use.", {"networks": [{"port": used}]}),
        (400, f"networks: port {free} is given twice.", {"networks": [{"port": free}, {"port": free}]}),
        (400, f"networks: fixed_ip 10.0.0.9 cannot be given together with port {free}, which has its addresses "
         "already.", {"networks": [{"port": free, "fixed_ip": "10.0.0.9"}]}),
        (400, "networks: a port can belong to one server only; create servers with existing ports in separate "
         "requests.",
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
        (400, "Security group nope not found.", {**without_networks, "security_groups": [{"name": "nope"}]}),
        (400, "Security group other not found.", {**without_networks, "security_groups": [{"name": "other"}]}),
        (409, "Multiple security_group matches found for name 'twice', use an ID to be more specific.",
         {**without_networks, "security_groups": [{"name": "twice"}]}),
    ]
    for status, message, change in cases:
        assert_refused(networked_cloud, status, message, **change)
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
    """Add a port that no host supports, and return its id and the reason in the error."""
    [(name, value)] = UNSUPPORTED[case].items()
    if not name.startswith("qos_"):
        text = "binding:vnic_type direct" if case == "vnic_type" else name
        return networks.add_port(network_id, PROJECT, **{name: value}), text
    policy = networks.add_qos_policy(PROJECT, {"type": "dscp_marking", "dscp_mark": 16}, value)
    port = networks.add_port(network_id, PROJECT, **{name: policy})
    return port, f"{value['type']} of QoS policy {policy}"


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_create_server_with_unsupported_port_returns_400_with_reason(
    networked_cloud: Cloud, networks: Networks, case: str
) -> None:
    port, reason = add_unsupported_port(networks, networks.add_network("red", PROJECT), case)
    message = f"Port {port} cannot be used: no host supports its {reason}."
    assert_refused(networked_cloud, 400, message, networks=[{"port": port}])


def test_create_server_on_network_with_minimum_bandwidth_returns_400(
    networked_cloud: Cloud, networks: Networks
) -> None:
    red = networks.add_network("red", PROJECT)
    policy = networks.add_qos_policy(PROJECT, {"type": "minimum_bandwidth", "min_kbps": 1000})
    networks.networks_by_id[red]["qos_policy_id"] = policy
    reason = f"minimum_bandwidth of QoS policy {policy}"
    message = f"Network {red} cannot be used: no host supports its {reason}."
    assert_refused(networked_cloud, 400, message, networks=[{"uuid": red}])


def test_create_server_with_ip_allocation_none_or_deferred_is_accepted(
    networked_cloud: Cloud, networks: Networks
) -> None:
    bare = networks.add_network("bare", PROJECT, None)
    ports = [
        networks.add_port(bare, PROJECT, "", ip_allocation=kind) for kind in ("none", "deferred")
    ]
    _, action = create_and_read(networked_cloud, networks=[{"port": port} for port in ports])
    assert [network["port"] for network in action.args["networks"]] == ports


def test_create_server_accepts_port_with_bandwidth_limit_or_unreadable_qos(
    networked_cloud: Cloud, networks: Networks
) -> None:
    """The conductor checks the policy that the tenant may not read."""
    red = networks.add_network("red", PROJECT)
    limit = networks.add_qos_policy(PROJECT, {"type": "bandwidth_limit", "max_kbps": 1000})
    foreign = networks.add_qos_policy(OTHER, {"type": "minimum_bandwidth", "min_kbps": 1000})
    ports = [networks.add_port(red, PROJECT, qos_policy_id=policy) for policy in (limit, foreign)]
    ports.append(networks.add_port(red, PROJECT, **{"binding:vnic_type": "normal"}))
    _, action = create_and_read(networked_cloud, networks=[{"port": port} for port in ports])
    assert [network["port"] for network in action.args["networks"]] == ports


def test_create_server_auto_without_any_network_returns_400(networked_cloud: Cloud) -> None:
    assert_refused(
        networked_cloud,
        400,
        f"networks: unable to automatically allocate a network for project {PROJECT}; create a "
        'network, or give "none".',
        networks="auto",
    )


@pytest.mark.parametrize(
    ("mv", "status"),
    [("2.31", 400), ("2.32", 202), ("2.36", 202), ("2.37", 400), ("2.41", 400), ("2.42", 202)],
)
def test_create_server_accepts_network_tags_in_2_32_to_2_36_and_from_2_42(
    networked_cloud: Cloud, networks: Networks, mv: str, status: int
) -> None:
    red = networks.add_network("red", PROJECT)
    assert (
        request_create(networked_cloud, mv=mv, networks=[{"uuid": red, "tag": "nic"}]).status_code
        == status
    )


def test_create_server_requires_networks_from_2_37(networked_cloud: Cloud) -> None:
    assert request_create(networked_cloud, mv="2.37").status_code == 400
    assert request_create(networked_cloud, mv="2.37", networks="some").status_code == 400


def test_create_server_without_network_service_refuses_networks(
    networked_cloud: Cloud, networks: Networks
) -> None:
    networks.has_endpoint = False
    assert_refused(
        networked_cloud,
        400,
        'networks: this cloud has no network service; leave networks out, or give "none" or "auto".',
        networks=[{"uuid": UNKNOWN}],
    )
    assert create_and_read(networked_cloud, networks="auto")[1].args["networks"] == []
