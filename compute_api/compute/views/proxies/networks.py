# SPDX-License-Identifier: Apache-2.0
"""Networks in responses, until 2.35.

Only the id and the name have values. The other keys belong to Nova's former network service, and
are null for all callers. Nova omits some of them unless the caller is an administrator.
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


def network(record: JsonMapping) -> JsonObject:
    """Return the body of a network in /os-networks. All keys but id and label are null."""
    return {"id": record["id"], "label": record["name"], **dict.fromkeys(_UNKNOWN)}


def tenant_network(record: JsonMapping) -> JsonObject:
    """Return the body of a network in /os-tenant-networks.

    The API does not read subnets, so ``cidr`` is the text "None".
    """
    return {"id": record["id"], "label": record["name"], "cidr": "None"}
