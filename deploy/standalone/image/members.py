# SPDX-License-Identifier: Apache-2.0
"""/v2/images/{key}/members: projects that an image with visibility shared is shown to.

The owner adds and removes members; only the member itself accepts or rejects, which decides whether
its lists hold it.
"""

import falcon
from sqlalchemy import Delete, Update, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from deploy.standalone.database import DbRow
from deploy.standalone.image.caller import ImageCaller
from deploy.standalone.image.schema import members
from deploy.standalone.image.store import ImageStore
from deploy.standalone.json_types import Body
from deploy.standalone.resource import Handler, moment
from deploy.standalone.schemas import NOT_EMPTY, BodySchema, mapping, one_of, text
from deploy.standalone.web import answer, read_json

STATUS = BodySchema(
    mapping({"status": one_of("pending", "accepted", "rejected")}, "status", others=True)
)
MEMBER = BodySchema(mapping({"member": text(pattern=NOT_EMPTY)}, "member"))


class ImageMembers(Handler[ImageStore]):
    """GET and POST the members of an image; GET, PUT and DELETE one of them."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        rows = self._seen(req, key)
        answer(resp, {"members": [_view(row) for row in rows], "schema": "/v2/schemas/members"})

    def on_post(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        member = MEMBER.checked(read_json(req), "member")["member"]
        image = self._service.find(req.context.caller, key)
        req.context.caller.require_owner(image)
        if image.visibility != "shared":
            raise falcon.HTTPForbidden(
                description="Only an image with visibility shared has members."
            )
        now = moment()
        row = {"image_id": key, "member_id": member, "created_at": now, "updated_at": now}
        try:
            with self._service.database.write() as connection:
                connection.execute(insert(members).values(row))
        except IntegrityError as error:
            raise falcon.HTTPConflict(description="This project is a member already.") from error
        answer(resp, _view(self._one(req, key, member)))

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str, member: str) -> None:
        answer(resp, _view(self._one(req, key, member)))

    def on_put_one(self, req: falcon.Request, resp: falcon.Response, key: str, member: str) -> None:
        caller: ImageCaller = req.context.caller
        status = STATUS.checked(read_json(req), "member")["status"]
        self._one(req, key, member)
        if caller.project_id != member:
            caller.require_admin("accept or reject an image for another project")
        self._write(update(members).values(status=status, updated_at=moment()), key, member)
        answer(resp, _view(self._one(req, key, member)))

    def on_delete_one(
        self, req: falcon.Request, resp: falcon.Response, key: str, member: str
    ) -> None:
        self._one(req, key, member)
        req.context.caller.require_owner(self._service.find(req.context.caller, key))
        self._write(delete(members), key, member)
        resp.status = falcon.HTTP_204

    def _write(self, query: Update | Delete, key: str, member: str) -> None:
        with self._service.database.write() as connection:
            connection.execute(query.filter_by(image_id=key, member_id=member))

    def _seen(self, req: falcon.Request, key: str) -> list[DbRow]:
        """The members that the caller may know of: all for the owner, themselves for a member."""
        caller: ImageCaller = req.context.caller
        image = self._service.find(caller, key)
        query = select(members).where(members.c.image_id == key).order_by(members.c.member_id)
        if not caller.is_admin and image.owner != caller.project_id:
            query = query.where(members.c.member_id == caller.project_id)
        return list(self._service.database.rows(query))

    def _one(self, req: falcon.Request, key: str, member: str) -> DbRow:
        for row in self._seen(req, key):
            if row.member_id == member:
                return row
        raise falcon.HTTPNotFound(description=f"Image {key[:64]} has no member {member[:64]}.")


def _view(row: DbRow) -> Body:
    return dict(row._mapping) | {"schema": "/v2/schemas/member"}
