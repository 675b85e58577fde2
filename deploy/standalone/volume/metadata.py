# SPDX-License-Identifier: Apache-2.0
""".../metadata of a volume or a snapshot: pairs of strings, changed together or one by one."""

from collections.abc import Callable

import falcon
from sqlalchemy import Connection, Table, select

from deploy.standalone.database import DbRow
from deploy.standalone.resource import Body
from deploy.standalone.schemas import BodySchema, Document
from deploy.standalone.volume.caller import VolumeCaller
from deploy.standalone.volume.faults import fault
from deploy.standalone.volume.service import VolumeChange, VolumeService
from deploy.standalone.web import answer, read_json, read_object

MAX_PAIRS = 128
PAIRS: Document = {
    "type": "object",
    "maxProperties": MAX_PAIRS,
    "propertyNames": {"minLength": 1, "maxLength": 255},
    "additionalProperties": {"type": "string", "maxLength": 255},
}
FORM = BodySchema(PAIRS)


class PairsOf:
    """GET, POST and PUT /v3/{plural}/{key}/metadata; GET, PUT and DELETE .../metadata/{name}."""

    def __init__(self, service: VolumeService, table: Table, missing: str) -> None:
        self._service, self._table, self._missing = service, table, missing

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        answer(resp, {"metadata": self._read(req, key)})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        given = FORM.checked(read_object(req, "metadata"), "metadata")
        answer(resp, {"metadata": self._write(req, key, lambda old: old | given)})

    def on_put(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        given = FORM.checked(read_object(req, "metadata"), "metadata")
        answer(resp, {"metadata": self._write(req, key, lambda old: given)})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, name: str) -> None:
        found = self._read(req, key)
        if name not in found:
            raise self._no_pair(key, name)
        answer(resp, {"meta": {name: found[name]}})

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str, name: str) -> None:
        body = read_json(req)
        part = body.get("meta", body.get("metadata")) if isinstance(body, dict) else None
        given = FORM.checked(part, "meta")
        if list(given) != [name]:
            raise fault("BadRequest", why="Request body and URI mismatch")
        self._write(req, key, lambda old: old | given)
        answer(resp, {"meta": given})

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, name: str
    ) -> None:
        def without(old: Body) -> Body:
            if name not in old:
                raise self._no_pair(key, name)
            return {one: value for one, value in old.items() if one != name}

        self._write(req, key, without)
        resp.status = falcon.HTTP_200

    def _no_pair(self, key: str, name: str) -> falcon.HTTPError:
        what = self._table.name.removesuffix("s").title()
        return fault("MetadataNotFound", what=what, id=key, key=name)

    def _find(self, connection: Connection, caller: VolumeCaller, key: str) -> DbRow:
        row = connection.execute(
            select(self._table).where(self._table.c.id == key, caller.sees(self._table))
        ).first()
        if row is None:
            raise fault(self._missing, id=key)
        found: DbRow = row
        return found

    def _read(self, req: falcon.Request, key: str) -> Body:
        with self._service.database.read() as connection:
            return dict(self._find(connection, req.context.caller, key).metadata)

    def _write(self, req: falcon.Request, key: str, turn: Callable[[Body], Body]) -> Body:
        caller: VolumeCaller = req.context.caller
        with self._service.change() as change:
            row = self._find(change.connection, caller, key)
            caller.require_member(f"volume:update_{self._table.name}_metadata")
            return set_pairs(change, self._table, row.id, turn(dict(row.metadata)))


def set_pairs(change: VolumeChange, table: Table, key: str, pairs: Body) -> Body:
    """Give a thing these pairs. Raises 413 for too many."""
    if len(pairs) > MAX_PAIRS:
        raise falcon.HTTPContentTooLarge(description=f"There may be {MAX_PAIRS} pairs at most.")
    change.set(table, key, {"metadata": pairs})
    return pairs
