# SPDX-License-Identifier: Apache-2.0
"""Floating IPs and their pools in responses, until 2.35."""

from __future__ import annotations

from collections.abc import Mapping

from common.domain.json_types import JsonMapping, JsonObject


def pool(network: JsonMapping) -> str:
    """Return the name that the API shows for a pool: the network's name, or else its id."""
    return str(network["name"] or network["id"])


def floating_ip(
    record: JsonMapping, pools: Mapping[str, str], servers: Mapping[str, str]
) -> JsonObject:
    """Return the body of one floating IP.

    Args:
        record: The floating IP, in the format of the network service.
        pools: Names of pools by the id of the network. The default is the id.
        servers: Ids of servers by the id of the port.
    """
    network_id = record["floating_network_id"]
    return {
        "id": record["id"],
        "ip": record["floating_ip_address"],
        "pool": pools.get(network_id, network_id),
        "fixed_ip": record["fixed_ip_address"],
        "instance_id": servers.get(record["port_id"]) or None,
    }
