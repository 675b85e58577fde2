# SPDX-License-Identifier: Apache-2.0
"""Networks as the Compute API showed them until 2.35.

Most of a network's keys belonged to a network service of Nova's own; of this one only the id and
the name are told. The other keys stand there without values, for everybody: Nova leaves some of
them out for who is no admin, which hides nothing.
"""

from __future__ import annotations

from common.domain.json_types import JsonMapping, JsonObject

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
