# SPDX-License-Identifier: Apache-2.0
"""/v2.0/quotas: limits of the projects for each resource.

The usage is counted in the transaction that adds an object.
"""

import falcon
from sqlalchemy import ScalarSelect, Table, func, select

from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.attributes import Attribute, Attributes, number
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.fabric import Change, Fabric
from deploy.one_machine.services.network.faults import fault
from deploy.one_machine.services.resource import Handler
from deploy.one_machine.services.web import answer, read_object

#: Resource -> (the default limit of a project, its table).
RESOURCES: dict[str, tuple[int, Table]] = {
    "network": (100, schema.networks),
    "subnet": (100, schema.subnets),
    "port": (500, schema.ports),
    "router": (10, schema.routers),
    "floatingip": (50, schema.floating_ips),
    "security_group": (10, schema.security_groups),
    "security_group_rule": (100, schema.security_group_rules),
}
DEFAULTS = {name: default for name, (default, _) in RESOURCES.items()}
ATTRIBUTES = Attributes({name: Attribute(number(-1, 2**31 - 1), post=False) for name in RESOURCES})
QUOTAS = schema.quotas


def spend(change: Change, project_id: str, resource: str, count: int = 1) -> None:
    """Check that the project may have `count` more objects. The caller then inserts the objects.

    This stores nothing, because the usage is the number of rows. A negative limit permits any
    number.

    Raises:
        Fault: 409 OverQuota, the limit would be exceeded.
    """
    columns = QUOTAS.table.c
    limit = select(columns.limit).where(
        columns.project_id == project_id, columns.resource == resource
    )
    used = _usage_query(project_id, resource)
    row = change.execute(select(limit.scalar_subquery().label("limit"), used.label("used"))).one()
    allowed = DEFAULTS[resource] if row.limit is None else row.limit
    if 0 <= allowed < row.used + count:
        raise fault("OverQuota", resource=resource)


def _usage_query(project_id: str, resource: str) -> ScalarSelect[int]:
    _, table = RESOURCES[resource]
    query = select(func.count()).select_from(table).where(table.c.project_id == project_id)
    return query.scalar_subquery()


class NetworkQuotas(Handler[Fabric]):
    """GET, PUT and DELETE /v2.0/quotas/{project_id}, and GET .../default and .../details."""

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _require_owner(req.context.caller, project_id)
        with self._service.database.read() as connection:
            answer(resp, {"quota": QUOTAS.of(connection, project_id, DEFAULTS)})

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        caller: NetworkCaller = req.context.caller
        caller.require_admin("(rule:update_quota)")
        limits = ATTRIBUTES.validate(read_object(req, "quota"), "quota", caller, new=False)
        with self._service.change() as change:
            QUOTAS.change(change.connection, project_id, limits)
        self.on_get_one(req, resp, project_id)

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        req.context.caller.require_admin("(rule:delete_quota)")
        with self._service.change() as change:
            QUOTAS.forget(change.connection, project_id)
        resp.status = falcon.HTTP_204

    def on_get_default(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _require_owner(req.context.caller, project_id)
        answer(resp, {"quota": DEFAULTS})

    def on_get_details(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _require_owner(req.context.caller, project_id)
        with self._service.database.read() as connection:
            limits = QUOTAS.of(connection, project_id, DEFAULTS)
            used = connection.execute(
                select(*(_usage_query(project_id, name).label(name) for name in limits))
            ).one()
        quota = {
            name: {"limit": limit, "used": used._mapping[name], "reserved": 0}
            for name, limit in limits.items()
        }
        answer(resp, {"quota": quota})


def _require_owner(caller: NetworkCaller, project_id: str) -> None:
    if not caller.owns(project_id):
        raise fault("PolicyNotAuthorized", rule="(rule:get_quota)")
