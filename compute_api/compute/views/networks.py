# SPDX-License-Identifier: Apache-2.0
"""Networks and floating addresses as the Compute API showed them until 2.35.

Most of a network's keys belonged to a network service of Nova's own; of this one only the id and
the name are told. The other keys stand there without values, for everybody: Nova leaves some of
them out for who is no admin, which hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.json_types import JsonMapping, JsonObject

_UNKNOWN = (
    "cidr",
    "netmask",
    "gateway",
    "broadcast",
    "dns1",
    "dns2",
    "cidr_v6",
    "gateway_v6",
    "netmask_v6",
    "created_at",
    "updated_at",
    "deleted_at",
    "deleted",
    "injected",
    "bridge",
    "bridge_interface",
    "vlan",
    "vpn_public_address",
    "vpn_public_port",
    "vpn_private_address",
    "dhcp_start",
    "dhcp_server",
    "enable_dhcp",
    "project_id",
    "host",
    "multi_host",
    "share_address",
    "priority",
    "rxtx_base",
    "mtu",
)


def network(found: JsonMapping) -> JsonObject:
    """One of os-networks."""
    return {"id": found["id"], "label": found["name"], **dict.fromkeys(_UNKNOWN)}


def tenant_network(found: JsonMapping) -> JsonObject:
    """One of os-tenant-networks; its range is in its subnets, which this API does not tell: the
    word None."""
    return {"id": found["id"], "label": found["name"], "cidr": "None"}


def pool(found: JsonMapping) -> str:
    """What an external network is called as a pool of floating addresses."""
    return str(found["name"] or found["id"])


def floating_ip(
    found: JsonMapping, pools: Mapping[str, str], servers: Mapping[str, str]
) -> JsonObject:
    """One floating address; pools: names by id of the network, servers: by id of the port."""
    network_id = found["floating_network_id"]
    return {
        "id": found["id"],
        "ip": found["floating_ip_address"],
        "pool": pools.get(network_id, network_id),
        "fixed_ip": found["fixed_ip_address"],
        "instance_id": servers.get(found["port_id"]) or None,
    }
