# SPDX-License-Identifier: Apache-2.0
"""/v3/registered_limits, /v3/limits and /v3/limits/model: limits on the services' resources.

A registered limit is the default for a service's resource, in one region or in all. A limit is
another number for one project or domain. A limit belongs to a registered limit, which then cannot
be removed, and whose service, region and resource cannot be changed. The model is "flat": limits
are independent. Only admins write. A caller sees the limits of the project or domain of the token,
and admins and readers of the whole cloud see all.
"""

import uuid

import falcon
from sqlalchemy import ColumnElement, Table, insert, select, true, update

from deploy.one_machine.services.database import DbRow, DbSelect, DbValues
from deploy.one_machine.services.identity import schema
from deploy.one_machine.services.identity.resources import DESCRIPTION, ID, NAME, IdentityResource
from deploy.one_machine.services.identity.schema import limits, registered_limits
from deploy.one_machine.services.identity.tokens import Token
from deploy.one_machine.services.resource import Body, Transaction
from deploy.one_machine.services.schemas import integer, nullable
from deploy.one_machine.services.web import answer

MODEL = {
    "name": "flat",
    "description": "Limits of projects and domains are compared with nothing but what they "
    "themselves use.",
}
KEY = {"service_id": ID, "region_id": nullable(ID), "resource_name": NAME}
LIMIT = integer(-1)


class _LimitResource(IdentityResource):
    takes_others, bulk = False, True

    def is_shown_to(self, token: Token) -> bool:
        return True

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        return {
            "id": row["id"],
            **{name: row[name] for name in self.fields},
            "links": {"self": f"{req.prefix}/v3/{self.plural}/{row['id']}"},
        }


class RegisteredLimits(_LimitResource):
    """Default limits."""

    name, plural, table = "registered_limit", "registered_limits", registered_limits
    fields = {**KEY, "default_limit": LIMIT, "description": DESCRIPTION}
    required, filters = ("service_id", "resource_name", "default_limit"), tuple(KEY)

    def create(self, change: Transaction, caller: Token, body: Body) -> str:
        values = {"id": uuid.uuid4().hex, **body}
        self._check_key(change, values)
        change.execute(insert(registered_limits).values(values))
        return str(values["id"])

    def update(self, change: Transaction, caller: Token, row: DbRow, body: Body) -> None:
        new = {**row._mapping, **body}
        if any(new[name] != row._mapping[name] for name in KEY):
            self._require_unused(change, row)
            self._check_key(change, new)
        statement = update(registered_limits).where(registered_limits.c.id == row.id)
        change.execute(statement.values(new))

    def delete(self, change: Transaction, caller: Token, row: DbRow) -> None:
        self._require_unused(change, row)
        super().delete(change, caller, row)

    def _check_key(self, change: Transaction, values: DbValues) -> None:
        """Check the service, the region and the uniqueness of a registered limit.

        Raises:
            HTTPBadRequest: The service or the region does not exist.
            HTTPConflict: Another registered limit has the same resource, service and region.
        """
        _require(change, values, service_id=schema.services, region_id=schema.regions)
        registered = _find_registered(change, values)
        if registered is not None and registered.id != values["id"]:
            raise falcon.HTTPConflict(
                description=f"A registered limit of {values['resource_name']} exists already for "
                "this service and region."
            )

    def _require_unused(self, change: Transaction, row: DbRow) -> None:
        if change.has(select(limits.c.id).where(limits.c.registered_limit_id == row.id)):
            raise falcon.HTTPForbidden(
                description=f"Unable to update or delete registered limit {row.id} because there"
                " are project limits associated with it."
            )


class ProjectLimits(_LimitResource):
    """Limits of projects and domains."""

    name, plural, table = "limit", "limits", limits
    fields = {
        **KEY,
        "resource_limit": LIMIT,
        "description": DESCRIPTION,
        "project_id": nullable(ID),
        "domain_id": nullable(ID),
    }
    required, filters = (
        ("service_id", "resource_name", "resource_limit"),
        (*KEY, "project_id", "domain_id"),
    )

    def select(self) -> DbSelect:
        return select(limits, *(registered_limits.c[name] for name in KEY)).join(registered_limits)

    def visible(self, caller: Token) -> ColumnElement[bool]:
        if caller.reads_all:
            return true()
        target = "domain_id" if caller.row.domain_id else "project_id"
        own: ColumnElement[bool] = limits.c[target] == caller.row._mapping[target]
        return own

    def validate(self, caller: Token, body: object, *, new: bool) -> Body:
        changes = super().validate(caller, body, new=new)
        if (
            fixed_names := sorted(changes.keys() - {"resource_limit", "description"})
            if not new
            else []
        ):
            raise falcon.HTTPBadRequest(description=f"'limit.{fixed_names[0]}' cannot be changed.")
        return changes

    def create(self, change: Transaction, caller: Token, body: Body) -> str:
        target = {name: body.get(name) for name in ("project_id", "domain_id")}
        if (target["project_id"] is None) == (target["domain_id"] is None):
            raise falcon.HTTPBadRequest(
                description="'limits' must hold exactly one of project_id and domain_id."
            )
        _require(change, body, project_id=schema.projects, domain_id=schema.domains)
        registered = _find_registered(change, body)
        if registered is None:
            raise falcon.HTTPForbidden(
                description="Unable to create a limit that has no corresponding registered limit."
            )
        is_same = [limits.c[name].is_not_distinct_from(value) for name, value in target.items()]
        if change.has(
            select(limits).where(limits.c.registered_limit_id == registered.id, *is_same)
        ):
            raise falcon.HTTPConflict(
                description=f"A limit of {body['resource_name']} exists already for this project "
                "or domain."
            )
        row = {"id": uuid.uuid4().hex, "registered_limit_id": registered.id}
        row |= {name: body.get(name) for name in ("resource_limit", "description")}
        change.execute(insert(limits).values(row | target))
        return str(row["id"])

    def update(self, change: Transaction, caller: Token, row: DbRow, body: Body) -> None:
        if body:
            change.execute(update(limits).where(limits.c.id == row.id).values(body))


class LimitModel:
    """GET /v3/limits/model."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"model": MODEL})


def _find_registered(change: Transaction, key: DbValues) -> DbRow | None:
    """Return the registered limit with the service, region and resource in `key`, or None.

    A missing region means the limit for all regions.
    """
    is_same = [registered_limits.c[name].is_not_distinct_from(key.get(name)) for name in KEY]
    return change.first(select(registered_limits).where(*is_same))


def _require(change: Transaction, body: DbValues, **tables: Table) -> None:
    """Check that the rows exist to which the body refers.

    Args:
        change: The transaction.
        body: The body. A field without a value is not checked.
        tables: Field of the body -> the table of the row with this id.

    Raises:
        HTTPBadRequest: A row does not exist.
    """
    for name, table in tables.items():
        row_id = body.get(name)
        if row_id is not None and change.one(table, row_id) is None:
            raise falcon.HTTPBadRequest(
                description=f"'{name}': there is no {table.name[:-1]} {row_id[:64]}."
            )
