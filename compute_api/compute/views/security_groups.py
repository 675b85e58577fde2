# SPDX-License-Identifier: Apache-2.0
"""Security groups in responses, from the network service, with their ingress rules.

A rule without ports applies to all ports. The API shows this as 1 to 65535 for TCP and UDP, and as
-1 for other protocols. The ports of a rule without a protocol are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.domain.json_types import JsonMapping, JsonObject

_WITH_PORTS = ("tcp", "udp")
_EVERYWHERE = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}


def group(record: JsonMapping, groups: Iterable[JsonMapping]) -> JsonObject:
    """Return the body of a group with its ingress rules. Egress rules are left out.

    Args:
        record: The group, in the format of the network service.
        groups: Groups that the rules may refer to as sources.
    """
    by_id = {item["id"]: item for item in groups}
    return {
        "id": record["id"],
        "name": record["name"],
        "description": record.get("description"),
        "tenant_id": record["project_id"],
        "rules": [
            rule(item, by_id)
            for item in record.get("security_group_rules") or ()
            if item["direction"] == "ingress"
        ],
    }


def rule(record: JsonMapping, by_id: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the body of a rule. The source is a group or a range of addresses.

    Args:
        record: The rule, in the format of the network service.
        by_id: Groups by id, for the name of the source group. An unknown group has its id as name.
    """
    protocol, least, most = (
        record.get("protocol"),
        record.get("port_range_min"),
        record.get("port_range_max"),
    )
    if protocol and least is None and most is None:
        least, most = (1, 65535) if protocol.lower() in _WITH_PORTS else (-1, -1)
    source = record.get("remote_group_id")
    source_group = by_id.get(source or "", {"name": source, "project_id": record.get("project_id")})
    cidr = record.get("remote_ip_prefix") or _EVERYWHERE[record.get("ethertype") or "IPv4"]
    return {
        "id": record["id"],
        "parent_group_id": record["security_group_id"],
        "ip_protocol": protocol,
        "from_port": least,
        "to_port": most,
        "ip_range": {} if source else {"cidr": cidr},
        "group": {"name": source_group["name"], "tenant_id": source_group["project_id"]}
        if source
        else {},
    }
