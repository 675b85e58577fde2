# SPDX-License-Identifier: Apache-2.0
"""/v2.0/security-groups and /v2.0/security-group-rules: permitted traffic of ports.

A project's default group with four rules is created at the first use. Rules never
change, and the rules of a group are unique.
"""

import ipaddress
from typing import Any

from sqlalchemy import Select, func, select

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.listing import collect
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.attributes import (
    ID,
    NAME,
    REQUIRED,
    STANDARD,
    Attribute,
    Attributes,
    number,
)
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import fault, invalid, malformed
from deploy.one_machine.services.network.host.description import PROTOCOLS, WITH_PORTS
from deploy.one_machine.services.network.quotas import spend
from deploy.one_machine.services.network.resource import NetworkResource
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import TRUTH, nullable, one_of, text

GROUPS, RULES = schema.security_groups, schema.security_group_rules
ETHERTYPES = ("IPv4", "IPv6")
ONLY_IPV6 = {41, 43, 44, 58, 59, 60}
RULE_KEY = (
    "direction",
    "ethertype",
    "protocol",
    "port_range_min",
    "port_range_max",
    "remote_ip_prefix",
    "remote_group_id",
)


class SecurityGroupsApi(NetworkResource):
    """The API of security groups, /v2.0/security-groups."""

    name, plural, table = "security_group", "security-groups", GROUPS
    missing = "SecurityGroupNotFound"
    constant = {"shared": False}
    attributes = Attributes({**STANDARD, "stateful": Attribute(TRUTH, True)})

    def before_list(self, fabric: Fabric, caller: NetworkCaller) -> None:
        if (
            caller.project_id
            and fabric.database.first(_default_group_query(caller.project_id)) is None
        ):
            with fabric.change() as change:
                default_group(change, caller.project_id)

    def select(self) -> DbSelect:
        pairs: list[Any] = []
        for column in RULES.c:
            pairs += [column.name, func.json(column) if column.name == "tags" else column]
        rules = collect(func.json_object(*pairs), RULES.c.security_group_id == GROUPS.c.id)
        return select(GROUPS, rules.label("rules"))

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        rules = sorted(row["rules"], key=lambda rule: (rule["created_at"], rule["id"]))
        views = [SecurityGroupRulesApi().view(rule, caller) for rule in rules]
        return super().view(row, caller) | {"security_group_rules": views}

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        if body["name"] == "default":
            raise fault("SecurityGroupDefaultAlreadyExists")
        _require_stateful(body)
        default_group(change, body["project_id"])
        spend(change, body["project_id"], "security_group")
        return _add(change, body, open_inside=False)

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        if row.name == "default" and body.get("name", "default") != "default":
            raise fault("SecurityGroupCannotUpdateDefault")
        if row.name != "default" and body.get("name") == "default":
            raise fault("SecurityGroupDefaultAlreadyExists")
        _require_stateful(body)
        change.set(GROUPS, row.id, body)

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        if row.name == "default" and not caller.is_admin:
            raise fault("SecurityGroupCannotRemoveDefault")
        port_query = select(schema.port_groups.c.port_id).where(
            schema.port_groups.c.group_id == row.id
        )
        if change.has(port_query):
            raise fault("SecurityGroupInUse", id=row.id)
        referring_groups = select(RULES.c.security_group_id).where(
            RULES.c.remote_group_id == row.id
        )
        change.touch(groups=change.scalars(referring_groups))
        change.remove(GROUPS, row.id)


def default_group(change: Change, project_id: str) -> str:
    """Return the id of the project's default group, which is created with its rules if missing."""
    group = {"project_id": project_id, "name": "default", "description": "Default security group"}
    return change.scalar(_default_group_query(project_id)) or _add(change, group, open_inside=True)


def require_groups(
    change: Change, caller: NetworkCaller, groups: list[str], project_id: str
) -> None:
    """Check that a caller may use these groups for a port of a project.

    Raises:
        Fault: 404, a group does not exist, or belongs neither to the caller's project nor to the
            port's. An admin may use all groups.
    """
    query = select(GROUPS.c.id).where(GROUPS.c.id.in_(groups))
    if not caller.is_admin:
        query = query.where(GROUPS.c.project_id.in_([caller.project_id, project_id]))
    missing = sorted(set(groups) - set(change.scalars(query))) if groups else []
    if missing:
        raise fault("SecurityGroupNotFound", id=missing[0])


def _default_group_query(project_id: str) -> Select[tuple[str]]:
    return select(GROUPS.c.id).where(GROUPS.c.project_id == project_id, GROUPS.c.name == "default")


def _add(change: Change, body: Body, *, open_inside: bool) -> str:
    key = change.add(GROUPS, body)
    for ethertype in ETHERTYPES:
        rule = {"project_id": body["project_id"], "security_group_id": key, "ethertype": ethertype}
        change.add(RULES, rule | {"direction": "egress"})
        if open_inside:
            change.add(RULES, rule | {"direction": "ingress", "remote_group_id": key})
    return key


def _require_stateful(body: Body) -> None:
    if body.get("stateful") is False:
        raise invalid("stateless security groups are not supported")


def normalize_protocol(value: str | int | None) -> str | None:
    """Return the text to store for a protocol: a name in lower case, or a number.

    A number has no leading zeros. The result is None for None, "any" and 0, which mean any
    protocol.

    Raises:
        Fault: 400, the protocol is unknown.
    """
    name = str(value).lower()
    is_number = name.isascii() and name.isdigit() and len(name) < 4
    name = str(int(name)) if is_number else name
    if value is None or name in ("any", "0"):
        return None
    if name in PROTOCOLS or (is_number and int(name) <= 255):
        return name
    names = ", ".join(PROTOCOLS)
    why = f"'{name[:64]}' is not a protocol: use a number from 0 to 255 or one of {names}"
    raise malformed(why)


class SecurityGroupRulesApi(NetworkResource):
    """Rules of security groups."""

    name, plural, table = "security_group_rule", "security-group-rules", RULES
    missing = "SecurityGroupRuleNotFound"
    constant = {"remote_address_group_id": None, "belongs_to_default_sg": False}
    attributes = Attributes(
        {
            "project_id": STANDARD["project_id"],
            "description": Attribute(NAME, "", put=False),
            "security_group_id": Attribute(ID, REQUIRED, put=False),
            "direction": Attribute(one_of("ingress", "egress"), REQUIRED, put=False),
            "ethertype": Attribute(one_of("IPv4", "IPv6"), "IPv4", put=False),
            "protocol": Attribute({"type": ["string", "integer", "null"]}, None, put=False),
            "port_range_min": Attribute(nullable(number(-1, 65535)), None, put=False),
            "port_range_max": Attribute(nullable(number(-1, 65535)), None, put=False),
            "remote_ip_prefix": Attribute(nullable(text(format="prefix")), None, put=False),
            "remote_group_id": Attribute(nullable(ID), None, put=False),
        }
    )

    def view(self, row: DbValues, caller: NetworkCaller) -> Body:
        prefix = row["remote_ip_prefix"]
        cidr = str(ipaddress.ip_network(prefix, strict=False)) if prefix else None
        return super().view(row, caller) | {"normalized_cidr": cidr}

    def validate(self, caller: NetworkCaller, body: object, *, new: bool) -> Body:
        values = super().validate(caller, body, new=new)
        return (
            values | {"protocol": normalize_protocol(values["protocol"])}
            if "protocol" in values
            else values
        )

    def create(self, change: Change, caller: NetworkCaller, body: Body) -> str:
        group = self._group(change, caller, body["security_group_id"])
        body["project_id"] = group.project_id
        if body["remote_group_id"] is not None:
            self._group(change, caller, body["remote_group_id"])
        _check_rule(body)
        query = select(RULES.c.id).where(
            RULES.c.security_group_id == group.id,
            *[RULES.c[name].is_not_distinct_from(body[name]) for name in RULE_KEY],
        )
        equal_rule = change.scalar(query)
        if equal_rule is not None:
            raise fault("SecurityGroupRuleExists", id=equal_rule)
        spend(change, group.project_id, "security_group_rule")
        change.touch(groups=[group.id])
        change.set(GROUPS, group.id, {})
        return change.add(RULES, body)

    def update(self, change: Change, caller: NetworkCaller, row: DbRow, body: Body) -> None:
        why = f"Security group rule {row.id} cannot be changed: delete the rule and create another"
        raise malformed(why)

    def delete(self, change: Change, caller: NetworkCaller, row: DbRow) -> None:
        change.touch(groups=[row.security_group_id])
        change.set(GROUPS, row.security_group_id, {})
        change.remove(RULES, row.id)

    def _group(self, change: Change, caller: NetworkCaller, key: str) -> DbRow:
        query = select(GROUPS).where(GROUPS.c.id == key)
        if not caller.is_admin:
            query = query.where(GROUPS.c.project_id == caller.project_id)
        row = change.first(query)
        if row is None:
            raise fault("SecurityGroupNotFound", id=key)
        return row


def protocol_number(name: str | None) -> int | None:
    """Return the number of a protocol from `normalize_protocol`, or None for any protocol."""
    return None if name is None else PROTOCOLS[name] if name in PROTOCOLS else int(name)


def _check_rule(body: Body) -> None:
    """Check that the attributes of a rule do not contradict each other.

    Raises:
        Fault: 400, for example for ports with a protocol that has no ports.
    """
    low, high, kind = (
        body["port_range_min"],
        body["port_range_max"],
        protocol_number(body["protocol"]),
    )
    if body["remote_ip_prefix"] and body["remote_group_id"]:
        raise fault("SecurityGroupRemoteGroupAndRemoteIpPrefix")
    if body["remote_ip_prefix"]:
        version = ipaddress.ip_interface(body["remote_ip_prefix"]).version
        if body["ethertype"] != f"IPv{version}":
            words = {"ethertype": body["ethertype"], "cidr": body["remote_ip_prefix"]}
            raise fault("SecurityGroupRuleParameterConflict", **words)
    if kind in ONLY_IPV6 and body["ethertype"] == "IPv4":
        words = {"ethertype": "IPv4", "protocol": body["protocol"]}
        raise fault("SecurityGroupEthertypeConflictWithProtocol", **words)
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
