# SPDX-License-Identifier: Apache-2.0
"""/v3/types: kinds of volumes with extra specs, and which projects may use them.

One property does something here: `multiattach`, `<is> True`. A project may have a default type of
its own (/v3/default-types, 3.62); `__DEFAULT__` is everybody's.
"""

from collections.abc import Callable

import falcon
from sqlalchemy import ColumnElement, Connection, delete, insert, select, true
from sqlalchemy.exc import IntegrityError

from deploy.standalone.database import DbRow, DbValues
from deploy.standalone.listing import value_of
from deploy.standalone.resource import AnyService, Body, Collection, Item, Resource
from deploy.standalone.schemas import (
    NOT_EMPTY,
    TRUTH,
    TRUTHS,
    BodySchema,
    Document,
    mapping,
    nullable,
    text,
)
from deploy.standalone.volume.caller import VolumeCaller
from deploy.standalone.volume.faults import fault
from deploy.standalone.volume.listing import listed_of, of_pairs
from deploy.standalone.volume.schema import default_types, snapshots, type_access, types, volumes
from deploy.standalone.volume.service import (
    DEFAULT_TYPE,
    VolumeChange,
    VolumeService,
    count,
    default_type,
    may_use,
)
from deploy.standalone.volume.versions import require
from deploy.standalone.volume.volumes import find_type
from deploy.standalone.web import answer, part_of, read_json, read_object

SPECS: Document = {
    "type": "object",
    "maxProperties": 128,
    "propertyNames": {"pattern": r"^[a-zA-Z0-9_:. -]{1,255}$"},
    "additionalProperties": {"type": ["string", "null"], "maxLength": 255},
}
FORM = BodySchema(SPECS)
ATTRIBUTES = {
    "name": text(minLength=1, pattern=NOT_EMPTY),
    "description": nullable(text()),
    "os-volume-type-access:is_public": TRUTH,
    "is_public": TRUTH,
}
CREATE = BodySchema(mapping(ATTRIBUTES | {"extra_specs": nullable(SPECS)}, "name"))
UPDATE = BodySchema(mapping(ATTRIBUTES | {"name": nullable(ATTRIBUTES["name"])}))
PROJECT = BodySchema(mapping({"project": text(minLength=1)}, "project"))
DEFAULT = BodySchema(mapping({"volume_type": text(minLength=1)}, "volume_type"))
#: What also others than admins see of the extra specs.
VISIBLE_SPECS = ("RESKEY:availability_zones", "multiattach", "replication_enabled")


FILTERS = {
    **dict.fromkeys(("id", "name", "description")),
    "is_public": lambda value: true(),
    "extra_specs": of_pairs(types.c.extra_specs),
}


class TypesApi(Resource):
    """Types."""

    name, plural, table, bulk = "volume_type", "types", types, False
    collection = "volume_types"

    def visible(self, caller: VolumeCaller) -> ColumnElement[bool]:
        return true() if caller.is_admin else may_use(caller.project_id)

    def admit(self, caller: VolumeCaller, action: str, key: str = "") -> None:
        if action not in ("list", "show"):
            caller.require_admin(f"volume_extension:type_{action}")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault("TypeNotFound", id=key)

    def conflict(self, action: str, error: IntegrityError) -> falcon.HTTPError:
        if action == "delete":
            return fault("TypeInUse", id="")
        return fault("Conflict", why="there is a volume type of this name")

    def checked(self, caller: VolumeCaller, body: object, *, new: bool) -> Body:
        found: Body = (CREATE if new else UPDATE).checked(body, "volume_type")
        if "os-volume-type-access:is_public" in found:
            found["is_public"] = found.pop("os-volume-type-access:is_public")
        if not new and not any(value is not None for value in found.values()):
            raise fault("BadRequest", why="Specify volume type name, description, is_public.")
        return found

    def page(self, service: AnyService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        caller: VolumeCaller = req.context.caller
        rules = [self.visible(caller)]
        public = wanted_public(req) if caller.is_admin else None
        if public is not None:
            rules.append(types.c.is_public.is_(public))
        return listed_of(service, req, types, FILTERS, "volume_type", rules)

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        caller: VolumeCaller = req.context.caller
        specs = dict(row["extra_specs"])
        if not caller.is_admin:
            specs = {name: specs[name] for name in VISIBLE_SPECS if name in specs}
        found = {
            "id": row["id"],
            "name": row["name"],
            "is_public": row["is_public"],
            "description": row["description"],
            "extra_specs": specs,
        }
        # The rest are Cinder's extensions, which do not add to every answer.
        if req.method != "PUT":
            found["os-volume-type-access:is_public"] = row["is_public"]
        if req.method == "GET" and caller.is_admin:
            found["qos_specs_id"] = None
        return found

    def create(self, change: VolumeChange, caller: VolumeCaller, body: Body) -> str:
        specs = body.get("extra_specs") or {}
        return change.add(types, body | {"name": body["name"].strip(), "extra_specs": specs})

    def update(self, change: VolumeChange, caller: VolumeCaller, row: DbRow, body: Body) -> None:
        given = {name: value for name, value in body.items() if value is not None}
        if row.name == DEFAULT_TYPE and given.get("name", row.name) != row.name:
            raise fault("InvalidType", why=f"{DEFAULT_TYPE} is the default type of all projects")
        change.set(types, row.id, given)

    def delete(self, change: VolumeChange, caller: VolumeCaller, row: DbRow) -> None:
        connection = change.connection
        is_chosen = count(connection, default_types, default_types.c.type_id == row.id)
        if row.name == DEFAULT_TYPE or is_chosen:
            raise fault("TypeIsDefault", id=row.id)
        used = (count(connection, one, one.c.type_id == row.id) for one in (volumes, snapshots))
        if any(used):
            raise fault("TypeInUse", id=row.id)
        change.remove(types, row.id)


class TypeCollection(Collection):
    """GET and POST /v3/types: 200 for a new one, as in Cinder."""

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        super().on_post(req, resp)
        resp.status = falcon.HTTP_200


class TypeItem(Item):
    """GET, PUT and DELETE /v3/types/{key}; POST .../action; "default" is the project's default."""

    def __init__(self, service: VolumeService, api: TypesApi) -> None:
        super().__init__(service, api)
        self._types, self._api = service, api

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        if key == "default":
            with self._types.database.read() as connection:
                key = default_type(connection, req.context.caller.project_id)
        super().on_get(req, resp, key)

    def on_put(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._update(req, resp, key)

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        super().on_delete(req, resp, key)
        resp.status = falcon.HTTP_202

    def on_post_action(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: VolumeCaller = req.context.caller
        caller.require_admin("volume_extension:volume_type_access")
        body = read_json(req)
        is_added = isinstance(body, dict) and "addProjectAccess" in body
        name = "addProjectAccess" if is_added else "removeProjectAccess"
        project = PROJECT.checked(part_of(body, name), name)["project"]
        access = type_access.c
        with self._types.change() as change:
            row = self._api.find(change.connection, caller, key)
            if row.is_public:
                why = "Type access modification is not applicable to public volume type."
                raise fault("Conflict", why=why)
            if is_added:
                try:
                    change.connection.execute(
                        insert(type_access).values(type_id=row.id, project_id=project)
                    )
                except IntegrityError as error:
                    raise fault("TypeAccessExists", id=row.id, project=project) from error
            else:
                gone = change.connection.execute(
                    delete(type_access).where(
                        access.type_id == row.id, access.project_id == project
                    )
                )
                if not gone.rowcount:
                    raise fault("TypeAccessNotFound", id=row.id, project=project)
        resp.status = falcon.HTTP_202

    def on_get_access(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: VolumeCaller = req.context.caller
        caller.require_admin("volume_extension:volume_type_access")
        with self._types.database.read() as connection:
            row = self._api.find(connection, caller, key)
            if row.is_public:
                raise fault("TypeNotFound", id=key)
            projects = connection.execute(
                select(type_access.c.project_id).where(type_access.c.type_id == row.id)
            ).scalars()
            found = [{"volume_type_id": row.id, "project_id": one} for one in projects]
        answer(resp, {"volume_type_access": found})

    def on_get_encryption(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """Volumes are not encrypted here."""
        with self._types.database.read() as connection:
            self._api.find(connection, req.context.caller, key)
        answer(resp, {})

    def on_post_encryption(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        req.context.caller.require_admin("volume_extension:volume_type_encryption:create")
        raise fault("BadRequest", why="Volumes are not encrypted here.")


class ExtraSpecs:
    """GET and POST /v3/types/{key}/extra_specs; GET, PUT and DELETE .../{name}."""

    def __init__(self, service: VolumeService, api: TypesApi) -> None:
        self._service, self._api = service, api

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        with self._service.database.read() as connection:
            row = self._api.find(connection, req.context.caller, key)
        answer(resp, {"extra_specs": self._api.show(req, row._mapping)["extra_specs"]})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        given = FORM.checked(read_object(req, "extra_specs"), "extra_specs")
        self._change(req, key, "create", lambda specs: specs | given)
        answer(resp, {"extra_specs": given})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, name: str) -> None:
        with self._service.database.read() as connection:
            row = self._api.find(connection, req.context.caller, key)
        specs = self._api.show(req, row._mapping)["extra_specs"]
        if name not in specs:
            raise fault("ExtraSpecNotFound", id=key, key=name)
        answer(resp, {name: specs[name]})

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str, name: str) -> None:
        given = FORM.checked(read_json(req), "extra_specs")
        if list(given) != [name]:
            raise fault("BadRequest", why="Request body and URI mismatch")
        self._change(req, key, "update", lambda specs: specs | given)
        answer(resp, given)

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, name: str
    ) -> None:
        def without(specs: Body) -> Body:
            if name not in specs:
                raise fault("ExtraSpecNotFound", id=key, key=name)
            return {one: value for one, value in specs.items() if one != name}

        self._change(req, key, "delete", without)
        resp.status = falcon.HTTP_202

    def _change(
        self, req: falcon.Request, key: str, action: str, turn: Callable[[Body], Body]
    ) -> None:
        caller: VolumeCaller = req.context.caller
        caller.require_admin(f"volume_extension:types_extra_specs:{action}")
        with self._service.change() as change:
            row = self._api.find(change.connection, caller, key)
            specs = turn(dict(row.extra_specs))
            is_used = count(change.connection, volumes, volumes.c.type_id == row.id)
            if is_used and specs.get("multiattach") != row.extra_specs.get("multiattach"):
                why = f"Volume Type {row.id} is currently in use."
                raise fault("BadRequest", why=why)
            change.set(types, row.id, {"extra_specs": specs})


class DefaultTypes:
    """GET /v3/default-types; GET, PUT and DELETE .../{project_id}."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        _admit(req)
        with self._service.database.read() as connection:
            rows = connection.execute(select(default_types)).all()
        found = [{"project_id": row.project_id, "volume_type_id": row.type_id} for row in rows]
        answer(resp, {"default_types": found})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _admit(req)
        with self._service.database.read() as connection:
            answer(resp, {"default_type": _default(connection, project_id)})

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _admit(req)
        body = DEFAULT.checked(read_object(req, "default_type"), "default_type")
        with self._service.change() as change:
            kind = find_type(change.connection, req.context.caller, body["volume_type"])
            own = default_types.c.project_id == project_id
            change.connection.execute(delete(default_types).where(own))
            change.connection.execute(
                insert(default_types).values(project_id=project_id, type_id=kind.id)
            )
            found = _default(change.connection, project_id)
        answer(resp, {"default_type": found})

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, project_id: str) -> None:
        _admit(req)
        with self._service.change() as change:
            _default(change.connection, project_id)
            own = default_types.c.project_id == project_id
            change.connection.execute(delete(default_types).where(own))
        resp.status = falcon.HTTP_204


def _admit(req: falcon.Request) -> None:
    require(req, 62)
    req.context.caller.require_admin("volume_extension:default_get_all")


def _default(connection: Connection, project_id: str) -> Body:
    row = connection.execute(
        select(default_types).where(default_types.c.project_id == project_id)
    ).first()
    if row is None:
        raise fault("DefaultTypeNotFound", id=project_id)
    return {"project_id": project_id, "volume_type_id": row.type_id}


def wanted_public(req: falcon.Request) -> bool | None:
    """Which types an admin lists: public ones, others, or (None) both."""
    word = value_of(req.params, "is_public", "true").lower()
    return None if word == "none" else TRUTHS.get(word, True)
