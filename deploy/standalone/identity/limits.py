# SPDX-License-Identifier: Apache-2.0
"""/v3/registered_limits, /v3/limits and /v3/limits/model: what projects may have of the services' resources.

A registered limit is the default of a service's resource, in one region or in all; a limit is another number for one
project or domain, and stands on a registered one, which meanwhile can neither be changed nor removed. The model is
"flat": no limit looks at another. Admins write; a caller sees the limits of their own project, and those who may read
the whole cloud see all.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import falcon
from sqlalchemy import Connection, Row, Select, Table, delete, insert, select, update

from deploy.standalone.fields import Field, check
from deploy.standalone.identity import schema
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.schema import limits, registered_limits
from deploy.standalone.web import answer, read_object

MODEL = {"name": "flat", "description": "Limits of projects and domains are compared with nothing but what they "
                                        "themselves use."}
AT_ONCE = 100                       # limits in one request
ID = Field(str, size=64, null=True)
NUMBER = Field(int, required=True, least=-1)
KEY = {"service_id": Field(str, required=True, size=64), "region_id": ID,
       "resource_name": Field(str, required=True, empty=False)}
DESCRIPTION = {"description": Field(str, null=True, size=4096)}
REGISTERED = KEY | {"default_limit": NUMBER} | DESCRIPTION
CHANGES = {"resource_limit": NUMBER} | DESCRIPTION
LIMIT = KEY | CHANGES | {"project_id": ID, "domain_id": ID}
Values = dict[str, Any]


class Registered:
    """GET and POST /v3/registered_limits; GET, PATCH and DELETE of one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.caller(req)
        with self._gate.database.read() as connection:
            rows = connection.execute(_filtered(req, select(registered_limits), KEY)).all()
        _list(req, resp, "registered_limits", [_view(req, "registered_limits", row._mapping) for row in rows])

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.admin(req)
        new = [check(one, REGISTERED, "registered_limits") for one in _several(req, "registered_limits")]
        made = []
        with self._gate.database.write() as connection:
            for body in new:
                values = {"id": uuid.uuid4().hex, **dict.fromkeys(REGISTERED), **body}
                _check_key(connection, values)
                connection.execute(insert(registered_limits).values(values))
                made.append(_view(req, "registered_limits", values))
        resp.status = falcon.HTTP_201
        answer(resp, {"registered_limits": made})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.caller(req)
        with self._gate.database.read() as connection:
            row = _one(connection, registered_limits, key)
        answer(resp, {"registered_limit": _view(req, "registered_limits", row._mapping)})

    def on_patch_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        body = check(read_object(req, "registered_limit"), REGISTERED, "registered_limit", partial=True)
        with self._gate.database.write() as connection:
            old = _one(connection, registered_limits, key)._mapping
            new: Values = {**old, **body}
            if any(new[name] != old[name] for name in KEY):
                _refuse_used(connection, key)
                _check_key(connection, new)
            connection.execute(update(registered_limits).where(registered_limits.c.id == key).values(new))
        answer(resp, {"registered_limit": _view(req, "registered_limits", new)})

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        with self._gate.database.write() as connection:
            _one(connection, registered_limits, key)
            _refuse_used(connection, key)
            connection.execute(delete(registered_limits).where(registered_limits.c.id == key))
        resp.status = falcon.HTTP_204


class Limits:
    """GET and POST /v3/limits; GET, PATCH and DELETE of one; GET /v3/limits/model."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_get_model(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.caller(req)
        answer(resp, {"model": MODEL})

    def on_head_model(self, req: falcon.Request, resp: falcon.Response) -> None:
        self.on_get_model(req, resp)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        token = self._gate.caller(req)
        query = _filtered(req, _WHOLE, {**KEY, "project_id": ID, "domain_id": ID})
        if not token.reads_all:
            query = query.where(limits.c.domain_id == token.row.domain_id if token.row.domain_id else
                                limits.c.project_id == token.row.project_id)
        with self._gate.database.read() as connection:
            rows = connection.execute(query).all()
        _list(req, resp, "limits", [_view(req, "limits", row._mapping) for row in rows])

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.admin(req)
        new = [check(one, LIMIT, "limits") for one in _several(req, "limits")]
        made = []
        with self._gate.database.write() as connection:
            for body in new:
                values = {"id": uuid.uuid4().hex, **_target(connection, body), "resource_limit": body["resource_limit"],
                          "registered_limit_id": _reference(connection, body), "description": body.get("description")}
                connection.execute(insert(limits).values(values))
                made.append(_view(req, "limits", _one(connection, limits, values["id"])._mapping))
        resp.status = falcon.HTTP_201
        answer(resp, {"limits": made})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        token = self._gate.caller(req)
        with self._gate.database.read() as connection:
            row = _one(connection, limits, key)
        self._gate.allow(token, lambda token: token.reads_all or (
            row.project_id == token.row.project_id if row.project_id else row.domain_id == token.row.domain_id))
        answer(resp, {"limit": _view(req, "limits", row._mapping)})

    def on_patch_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        body = check(read_object(req, "limit"), CHANGES, "limit", partial=True)
        with self._gate.database.write() as connection:
            _one(connection, limits, key)
            if body:
                connection.execute(update(limits).where(limits.c.id == key).values(body))
            row = _one(connection, limits, key)
        answer(resp, {"limit": _view(req, "limits", row._mapping)})

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.admin(req)
        with self._gate.database.write() as connection:
            _one(connection, limits, key)
            connection.execute(delete(limits).where(limits.c.id == key))
        resp.status = falcon.HTTP_204


_WHOLE = select(limits, *(registered_limits.c[name] for name in KEY)).join(registered_limits)


def _several(req: falcon.Request, plural: str) -> list[Any]:
    """The list of the body. Raises 400."""
    found = read_object(req, plural)
    if not isinstance(found, list) or not 0 < len(found) <= AT_ONCE:
        raise falcon.HTTPBadRequest(description=f"'{plural}' must be a list of 1 to {AT_ONCE} limits.")
    return found


def _filtered(req: falcon.Request, query: Select[Any], names: Mapping[str, Field]) -> Select[Any]:
    columns = query.selected_columns
    for name in names:
        if (value := req.get_param(name)) is not None:
            query = query.where(columns[name] == value)
    return query.order_by(columns.resource_name, columns.id)


def _list(req: falcon.Request, resp: falcon.Response, plural: str, rows: list[Values]) -> None:
    answer(resp, {plural: rows, "links": {"self": f"{req.prefix}{req.path}", "next": None, "previous": None}})


def _view(req: falcon.Request, plural: str, row: Any) -> Values:
    names = REGISTERED if plural == "registered_limits" else LIMIT
    return {"id": row["id"], **{name: row[name] for name in names},
            "links": {"self": f"{req.prefix}/v3/{plural}/{row['id']}"}}


def _one(connection: Connection, table: Table, key: str) -> Row[Any]:
    """The row. Raises 404."""
    query = _WHOLE if table is limits else select(table)
    row = connection.execute(query.where(table.c.id == key)).first()
    if row is None:
        raise falcon.HTTPNotFound(description=f"Could not find {table.name[:-1].replace('_', ' ')} for {key[:64]}.")
    return row


def _find(connection: Connection, key: Mapping[str, Any]) -> Row[Any] | None:
    """The registered limit of a service's resource in a region."""
    return connection.execute(select(registered_limits).where(
        *(registered_limits.c[name].is_not_distinct_from(key.get(name)) for name in KEY))).first()


def _require(connection: Connection, body: Mapping[str, Any], **tables: Table) -> None:
    """What the body names must be there. Raises 400."""
    for name, table in tables.items():
        wanted = body.get(name)
        if wanted is not None and connection.execute(select(table.c.id).where(table.c.id == wanted)).first() is None:
            raise falcon.HTTPBadRequest(description=f"'{name}': there is no {table.name[:-1]} {wanted[:64]}.")


def _check_key(connection: Connection, values: Mapping[str, Any]) -> None:
    """Raises 400 when service or region are not there, 409 when another registered limit is of the same resource."""
    _require(connection, values, service_id=schema.services, region_id=schema.regions)
    found = _find(connection, values)
    if found is not None and found.id != values["id"]:
        raise falcon.HTTPConflict(description=f"A registered limit of {values['resource_name']} exists already for "
                                              "this service and region.")


def _refuse_used(connection: Connection, key: str) -> None:
    if connection.execute(select(limits.c.id).where(limits.c.registered_limit_id == key)).first() is not None:
        raise falcon.HTTPForbidden(description=f"Unable to update or delete registered limit {key} because there are "
                                               "project limits associated with it.")


def _target(connection: Connection, body: Mapping[str, Any]) -> Values:
    """Whose limit it will be. Raises 400 unless it is exactly one project or domain that is there."""
    if (body.get("project_id") is None) == (body.get("domain_id") is None):
        raise falcon.HTTPBadRequest(description="'limits' must hold exactly one of project_id and domain_id.")
    _require(connection, body, project_id=schema.projects, domain_id=schema.domains)
    return {"project_id": body.get("project_id"), "domain_id": body.get("domain_id")}


def _reference(connection: Connection, body: Mapping[str, Any]) -> str:
    """The registered limit that the new one stands on. Raises 403 without one, 409 when the target has its own."""
    found = _find(connection, body)
    if found is None:
        raise falcon.HTTPForbidden(description="Unable to create a limit that has no corresponding registered limit.")
    same = connection.execute(select(limits.c.id).where(
        limits.c.registered_limit_id == found.id,
        limits.c.project_id.is_not_distinct_from(body.get("project_id")),
        limits.c.domain_id.is_not_distinct_from(body.get("domain_id")))).first()
    if same is not None:
        raise falcon.HTTPConflict(description=f"A limit of {body['resource_name']} exists already for this project or "
                                              "domain.")
    return str(found.id)
