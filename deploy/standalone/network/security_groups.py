# SPDX-License-Identifier: Apache-2.0
"""/v2.0/security-groups. A project's default group, with its four rules, is made the first time somebody needs it."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import JSON, Row, Select, func, select, type_coerce

from deploy.standalone.network import schema
from deploy.standalone.network.attributes import STANDARD, Attribute, Body, truth
from deploy.standalone.network.caller import Caller
from deploy.standalone.network.fabric import Change, Fabric
from deploy.standalone.network.faults import fault
from deploy.standalone.network.quotas import spend
from deploy.standalone.network.resource import Noun
from deploy.standalone.network.rules import show_rule

GROUPS, RULES = schema.security_groups, schema.security_group_rules
ETHERTYPES = ("IPv4", "IPv6")


class SecurityGroups(Noun):
    """Security groups."""

    name, plural, table, missing = "security_group", "security-groups", GROUPS, "SecurityGroupNotFound"
    attributes = STANDARD | {"stateful": Attribute(truth, True)}

    def before_list(self, fabric: Fabric, caller: Caller) -> None:
        if not caller.project_id:
            return
        with fabric.database.read() as connection:
            known = connection.execute(_default(caller.project_id)).first()
        if known is None:
            with fabric.change() as change:
                default_group(change, caller.project_id)

    def select(self) -> Select[Any]:
        each: list[Any] = []
        for column in RULES.c:
            each += [column.name, func.json(column) if column.name == "tags" else column]
        rules = select(func.json_group_array(func.json_object(*each))).where(RULES.c.security_group_id == GROUPS.c.id)
        return select(GROUPS, type_coerce(rules.scalar_subquery(), JSON).label("rules"))

    def show(self, row: Mapping[Any, Any], caller: Caller) -> Body:
        rules = sorted(row["rules"], key=lambda rule: (rule["created_at"], rule["id"]))
        return super().show(row, caller) | {"shared": False, "security_group_rules": list(map(show_rule, rules))}

    def create(self, change: Change, caller: Caller, body: Body) -> str:
        if body["name"] == "default":
            raise fault("SecurityGroupDefaultAlreadyExists")
        _require_stateful(body)
        default_group(change, body["project_id"])
        spend(change, body["project_id"], "security_group")
        return _add(change, body, open_inside=False)

    def update(self, change: Change, caller: Caller, row: Row[Any], body: Body) -> None:
        if row.name == "default" and body.get("name", "default") != "default":
            raise fault("SecurityGroupCannotUpdateDefault")
        if row.name != "default" and body.get("name") == "default":
            raise fault("SecurityGroupDefaultAlreadyExists")
        _require_stateful(body)
        change.set(GROUPS, row.id, body)

    def delete(self, change: Change, caller: Caller, row: Row[Any]) -> None:
        if row.name == "default" and not caller.is_admin:
            raise fault("SecurityGroupCannotRemoveDefault")
        users = select(schema.port_groups.c.port_id).where(schema.port_groups.c.group_id == row.id)
        if change.connection.execute(users).first() is not None:
            raise fault("SecurityGroupInUse", id=row.id)
        naming = select(RULES.c.security_group_id).where(RULES.c.remote_group_id == row.id)
        change.touch(groups=change.connection.execute(naming).scalars())
        change.remove(GROUPS, row.id)


def default_group(change: Change, project_id: str) -> str:
    """The id of the project's default group."""
    found = change.connection.execute(_default(project_id)).scalar()
    return found or _add(change, {"project_id": project_id, "name": "default",
                                  "description": "Default security group"}, open_inside=True)


def require_groups(change: Change, caller: Caller, groups: list[str], project_id: str) -> None:
    """Raises 404 for a group that neither the caller nor the port's project owns."""
    known = select(GROUPS.c.id).where(GROUPS.c.id.in_(groups))
    if not caller.is_admin:
        known = known.where(GROUPS.c.project_id.in_([caller.project_id, project_id]))
    missing = sorted(set(groups) - set(change.connection.execute(known).scalars())) if groups else []
    if missing:
        raise fault("SecurityGroupNotFound", id=missing[0])


def _default(project_id: str) -> Any:
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
        raise fault("InvalidInput", why="stateless security groups are not served here")

