# SPDX-License-Identifier: Apache-2.0
"""/v3/types: volume types with extra specs. Only admins see types that are not public.

Only the extra spec `multiattach` has an effect: with `<is> True`, several servers can attach a
volume of the type. Volumes that are created without a type have the type `__DEFAULT__`.
"""

import falcon
from sqlalchemy import ColumnElement, true
from sqlalchemy.exc import IntegrityError

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.listing import value_of
from deploy.one_machine.services.resource import AnyService, Body, Collection, Item, Resource
from deploy.one_machine.services.schemas import (
    NOT_EMPTY,
    TRUTH,
    TRUTHS,
    BodySchema,
    Document,
    mapping,
    nullable,
    text,
)
from deploy.one_machine.services.volume.caller import VolumeCaller
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.listing import list_matching, of_pairs
from deploy.one_machine.services.volume.schema import snapshots, types, volumes
from deploy.one_machine.services.volume.service import (
    DEFAULT_TYPE,
    VolumeChange,
    VolumeService,
    count,
    default_type,
)
from deploy.one_machine.services.web import answer, read_object

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
#: The extra specs that callers without the role admin see too.
VISIBLE_SPECS = ("RESKEY:availability_zones", "multiattach", "replication_enabled")


FILTERS = {
    **dict.fromkeys(("id", "name", "description")),
    "is_public": lambda value: true(),
    "extra_specs": of_pairs(types.c.extra_specs),
}


class TypesApi(Resource):
    """Volume types."""

    name, plural, table, bulk = "volume_type", "types", types, False
    collection = "volume_types"

    def visible(self, caller: VolumeCaller) -> ColumnElement[bool]:
        return true() if caller.is_admin else types.c.is_public.is_(True)

    def admit(self, caller: VolumeCaller, action: str, key: str = "") -> None:
        if action not in ("list", "show"):
            caller.require_admin(f"volume_extension:type_{action}")

    def not_found(self, key: str) -> falcon.HTTPError:
        return fault("TypeNotFound", id=key)

    def conflict(self, action: str, error: IntegrityError) -> falcon.HTTPError:
        if action == "delete":
            return fault("TypeInUse", id="")
        return fault("Conflict", why="another volume type has this name")

    def validate(self, caller: VolumeCaller, body: object, *, new: bool) -> Body:
        values: Body = CREATE.validate(body, "volume_type")
        if "os-volume-type-access:is_public" in values:
            values["is_public"] = values.pop("os-volume-type-access:is_public")
        return values

    def page(self, service: AnyService, req: falcon.Request) -> tuple[list[DbRow], Body]:
        caller: VolumeCaller = req.context.caller
        rules = [self.visible(caller)]
        public = read_is_public(req) if caller.is_admin else None
        if public is not None:
            rules.append(types.c.is_public.is_(public))
        return list_matching(service, req, types, FILTERS, "volume_type", rules)

    def show(self, req: falcon.Request, row: DbValues) -> Body:
        caller: VolumeCaller = req.context.caller
        specs = dict(row["extra_specs"])
        if not caller.is_admin:
            specs = {name: specs[name] for name in VISIBLE_SPECS if name in specs}
        fields = {
            "id": row["id"],
            "name": row["name"],
            "is_public": row["is_public"],
            "description": row["description"],
            "extra_specs": specs,
            "os-volume-type-access:is_public": row["is_public"],
        }
        # Other fields belong to Cinder's extensions, which do not extend every response.
        if req.method == "GET" and caller.is_admin:
            fields["qos_specs_id"] = None
        return fields

    def create(self, change: VolumeChange, caller: VolumeCaller, body: Body) -> str:
        specs = body.get("extra_specs") or {}
        return change.add(types, body | {"name": body["name"].strip(), "extra_specs": specs})

    def delete(self, change: VolumeChange, caller: VolumeCaller, row: DbRow) -> None:
        connection = change.connection
        if row.name == DEFAULT_TYPE:
            raise fault("TypeIsDefault", id=row.id)
        used = (
            count(connection, table, table.c.type_id == row.id) for table in (volumes, snapshots)
        )
        if any(used):
            raise fault("TypeInUse", id=row.id)
        change.remove(types, row.id)


class TypeCollection(Collection):
    """GET and POST /v3/types. As in Cinder, POST returns 200."""

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        super().on_post(req, resp)
        resp.status = falcon.HTTP_200


class TypeItem(Item):
    """GET and DELETE /v3/types/{key}, GET .../encryption, POST .../extra_specs.

    The key "default" stands for the type `__DEFAULT__`.
    """

    def __init__(self, service: VolumeService, api: TypesApi) -> None:
        super().__init__(service, api)
        self._types, self._api = service, api

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        if key == "default":
            with self._types.database.read() as connection:
                key = default_type(connection)
        super().on_get(req, resp, key)

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        super().on_delete(req, resp, key)
        resp.status = falcon.HTTP_202

    def on_get_encryption(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        """Answer {}, because no type has encryption.

        Raises:
            Fault: 404, the type is unknown.
        """
        with self._types.database.read() as connection:
            self._api.find(connection, req.context.caller, key)
        answer(resp, {})

    def on_post_extra_specs(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        specs = FORM.validate(read_object(req, "extra_specs"), "extra_specs")
        caller: VolumeCaller = req.context.caller
        caller.require_admin("volume_extension:types_extra_specs:create")
        with self._types.change() as change:
            row = self._api.find(change.connection, caller, key)
            is_used = count(change.connection, volumes, volumes.c.type_id == row.id)
            new_specs = row.extra_specs | specs
            if is_used and new_specs.get("multiattach") != row.extra_specs.get("multiattach"):
                raise fault("BadRequest", why=f"Volume Type {row.id} is currently in use.")
            change.set(types, row.id, {"extra_specs": new_specs})
        answer(resp, {"extra_specs": specs})


def read_is_public(req: falcon.Request) -> bool | None:
    """Return the query parameter is_public: True (the default), False, or None for "none".

    None requests both public types and others. Any other word counts as True.
    """
    word = value_of(req.params, "is_public", "true").lower()
    return None if word == "none" else TRUTHS.get(word, True)
