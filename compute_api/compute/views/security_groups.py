# SPDX-License-Identifier: Apache-2.0
"""Security groups as the Compute API shows them: the network service's, with the rules for what
comes in.

A rule without ports means all of them, which the API writes as 1 to 65535 for TCP and UDP and as -1
for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.domain.json_types import JsonMapping, JsonObject

_WITH_PORTS = ("tcp", "udp")
_EVERYWHERE = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}


def group(found: JsonMapping, known: Iterable[JsonMapping]) -> JsonObject:
    """One group; ``known`` are those that its rules may name."""
    by_id = {one["id"]: one for one in known}
    return {
        "id": found["id"],
        "name": found["name"],
        "description": found.get("description"),
        "tenant_id": found["project_id"],
        "rules": [
            rule(one, by_id)
            for one in found.get("security_group_rules") or ()
            if one["direction"] == "ingress"
        ],
    }


def rule(found: JsonMapping, by_id: Mapping[str, JsonMapping]) -> JsonObject:
    """One rule; where it comes from is a group or a range of addresses."""
    protocol, least, most = (
        found.get("protocol"),
        found.get("port_range_min"),
        found.get("port_range_max"),
    )
    if protocol and least is None and most is None:
        least, most = (1, 65535) if protocol.lower() in _WITH_PORTS else (-1, -1)
    source = found.get("remote_group_id")
    other = by_id.get(source or "", {"name": source, "project_id": found.get("project_id")})
    cidr = found.get("remote_ip_prefix") or _EVERYWHERE[found.get("ethertype") or "IPv4"]
    return {
        "id": found["id"],
        "parent_group_id": found["security_group_id"],
        "ip_protocol": protocol,
        "from_port": least,
        "to_port": most,
        "ip_range": {} if source else {"cidr": cidr},
        "group": {"name": other["name"], "tenant_id": other["project_id"]} if source else {},
    }
