# SPDX-License-Identifier: Apache-2.0
"""/v2.0/security-group-rules: what a group lets in and out. A rule never changes; two of a group are never alike."""

import ipaddress
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row, or_, select

from deploy.standalone.network import schema
from deploy.standalone.network.attributes import (
    REQUIRED,
    STANDARD,
    Attribute,
    Body,
    identifier,
    number,
    one_of,
    optional,
    prefix,
    words,
)
from deploy.standalone.network.caller import Caller
from deploy.standalone.network.fabric import Change
from deploy.standalone.network.faults import fault
from deploy.standalone.network.quotas import spend
from deploy.standalone.network.resource import Noun, standard

RULES, GROUPS = schema.security_group_rules, schema.security_groups
#: What a protocol may be called, and its number.
PROTOCOLS = {"ah": 51, "dccp": 33, "egp": 8, "esp": 50, "gre": 47, "icmp": 1, "icmpv6": 58, "igmp": 2, "ipip": 4,
             "ipv6-encap": 41, "ipv6-frag": 44, "ipv6-icmp": 58, "ipv6-nonxt": 59, "ipv6-opts": 60, "ipv6-route": 43,
             "ospf": 89, "pgm": 113, "rsvp": 46, "sctp": 132, "tcp": 6, "udp": 17, "udplite": 136, "vrrp": 112}
WITH_PORTS = {6, 17, 33, 132, 136}
ONLY_IPV6 = {41, 43, 44, 58, 59, 60}
SAME = ("direction", "ethertype", "protocol", "port_range_min", "port_range_max", "remote_ip_prefix",
        "remote_group_id")


def protocol(value: Any) -> str | None:
    """A protocol's name or number as it is stored; "any" is none."""
    said = str(value).lower()
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"'{said[:64]}' is not a protocol")
    if said == "any":
        return None
    if said not in PROTOCOLS and not (said.isascii() and said.isdigit() and int(said[:4]) <= 255 and len(said) < 4):
        raise ValueError(f"'{said[:64]}' is not a protocol: use a number from 0 to 255 or one of"
                         f" {', '.join(PROTOCOLS)}")
    return None if said == "0" else said


class SecurityGroupRules(Noun):
    """Rules of security groups."""

    name, plural, table = "security_group_rule", "security-group-rules", RULES
    missing = "SecurityGroupRuleNotFound"
    attributes = {
        "project_id": STANDARD["project_id"],
        "description": Attribute(words, "", put=False),
        "security_group_id": Attribute(identifier, REQUIRED, put=False),
        "direction": Attribute(one_of("ingress", "egress"), REQUIRED, put=False),
        "ethertype": Attribute(one_of("IPv4", "IPv6"), "IPv4", put=False),
        "protocol": Attribute(optional(protocol), None, put=False),
        "port_range_min": Attribute(optional(number(-1, 65535)), None, put=False),
        "port_range_max": Attribute(optional(number(-1, 65535)), None, put=False),
        "remote_ip_prefix": Attribute(optional(prefix), None, put=False),
        "remote_group_id": Attribute(optional(identifier), None, put=False),
    }

    def show(self, row: Mapping[Any, Any], caller: Caller) -> Body:
        return show_rule(row)

    def create(self, change: Change, caller: Caller, body: Body) -> str:
        group = self._group(change, caller, body["security_group_id"])
        body["project_id"] = group.project_id
        if body["remote_group_id"] is not None:
            self._group(change, caller, body["remote_group_id"])
        _check(body)
        alike = select(RULES.c.id).where(RULES.c.security_group_id == group.id,
                                         *[RULES.c[name].is_not_distinct_from(body[name]) for name in SAME])
        known = change.connection.execute(alike).scalar()
        if known is not None:
            raise fault("SecurityGroupRuleExists", id=known)
        spend(change, group.project_id, "security_group_rule")
        change.touch(groups=[group.id])
        change.set(GROUPS, group.id, {})
        return change.add(RULES, body)

    def update(self, change: Change, caller: Caller, row: Row[Any], body: Body) -> None:
        raise fault("HTTPBadRequest", why="A security group rule cannot be changed: delete it and make another")

    def delete(self, change: Change, caller: Caller, row: Row[Any]) -> None:
        change.touch(groups=[row.security_group_id])
        change.set(GROUPS, row.security_group_id, {})
        change.remove(RULES, row.id)

    def _group(self, change: Change, caller: Caller, key: str) -> Row[Any]:
        query = select(GROUPS).where(GROUPS.c.id == key)
        if not caller.is_admin:
            query = query.where(or_(GROUPS.c.project_id == caller.project_id))
        row = change.connection.execute(query).first()
        if row is None:
            raise fault("SecurityGroupNotFound", id=key)
        return row


def show_rule(row: Mapping[Any, Any]) -> Body:
    """A rule as the API shows it."""
    told = row["remote_ip_prefix"]
    return standard(row) | {name: row[name] for name in ("security_group_id", *SAME)} | {
        "normalized_cidr": str(ipaddress.ip_network(told, strict=False)) if told else None,
        "remote_address_group_id": None, "belongs_to_default_sg": False}


def number_of(name: str | None) -> int | None:
    """The number of a protocol; None for any."""
    return None if name is None else PROTOCOLS[name] if name in PROTOCOLS else int(name)


def _check(body: Body) -> None:
    """Raises 400 for parts that do not fit each other."""
    low, high, kind = body["port_range_min"], body["port_range_max"], number_of(body["protocol"])
    if body["remote_ip_prefix"] and body["remote_group_id"]:
        raise fault("SecurityGroupRemoteGroupAndRemoteIpPrefix")
    if body["remote_ip_prefix"]:
        version = ipaddress.ip_interface(body["remote_ip_prefix"]).version
        if body["ethertype"] != f"IPv{version}":
            raise fault("SecurityGroupRuleParameterConflict", ethertype=body["ethertype"],
                        cidr=body["remote_ip_prefix"])
    if kind in ONLY_IPV6 and body["ethertype"] == "IPv4":
        raise fault("SecurityGroupEthertypeConflictWithProtocol", ethertype="IPv4", protocol=body["protocol"])
    if kind in (1, 58):
        _check_icmp(low, high)
    elif low is None and high is None:
        return
    elif kind is None:
        raise fault("SecurityGroupProtocolRequiredWithPorts")
    elif kind not in WITH_PORTS:
        raise fault("SecurityGroupInvalidProtocolForPort", protocol=body["protocol"])
    elif low is None or high is None or low > high:
        raise fault("SecurityGroupInvalidPortRange")
    elif low < 1:
        raise fault("SecurityGroupInvalidPortValue", port=low)


def _check_icmp(kind: int | None, code: int | None) -> None:
    for attr, field, value in (("port_range_min", "type", kind), ("port_range_max", "code", code)):
        if value is not None and not 0 <= value <= 255:
            raise fault("SecurityGroupInvalidIcmpValue", field=field, attr=attr, value=value)
    if kind is None and code is not None:
        raise fault("SecurityGroupMissingIcmpType", value=code)
