# SPDX-License-Identifier: Apache-2.0
"""Floating IPs and their pools, as the Compute API shows them until 2.35."""

from __future__ import annotations

from collections.abc import Mapping

from common.domain.json_types import JsonMapping, JsonObject


def pool(found: JsonMapping) -> str:
    """Return the name of an external network as a pool of floating IPs."""
    return str(found["name"] or found["id"])


def floating_ip(
    found: JsonMapping, pools: Mapping[str, str], servers: Mapping[str, str]
) -> JsonObject:
    """Return one floating IP.

    Args:
        pools: Names by the id of the network.
        servers: Ids by the id of the port.
    """
    network_id = found["floating_network_id"]
    return {
        "id": found["id"],
        "ip": found["floating_ip_address"],
        "pool": pools.get(network_id, network_id),
        "fixed_ip": found["fixed_ip_address"],
        "instance_id": servers.get(found["port_id"]) or None,
    }
