# SPDX-License-Identifier: Apache-2.0
"""The resources of /v2/images: the collection, one image, its tasks and its data."""

import uuid
from urllib.parse import urlencode

import falcon

from deploy.one_machine.services.database import DbRow
from deploy.one_machine.services.image.attributes import (
    apply_patch,
    convert_operations,
    validate,
    view,
)
from deploy.one_machine.services.image.caller import ImageCaller
from deploy.one_machine.services.image.listing import matching, page
from deploy.one_machine.services.image.store import ImageStore
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.resource import Handler
from deploy.one_machine.services.web import answer, read_bytes, read_json

PATCH_TYPE, OLD_PATCH_TYPE = (
    f"application/openstack-images-v2.{minor}-json-patch" for minor in (1, 0)
)


class ImageCollection(Handler[ImageStore]):
    """GET and POST /v2/images."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: ImageCaller = req.context.caller
        marker_id = req.get_param("marker")
        marker = None if marker_id is None else self._service.find(caller, marker_id)
        query, limit = page(req.params, matching(req.params, caller), marker)
        rows = self._service.database.rows(query) if limit else []
        parameters = {name: value for name, value in req.params.items() if name != "marker"}
        links = {"first": parameters}
        if len(rows) > limit:
            links["next"] = parameters | {"marker": rows[limit - 1].id}
        body: Body = {
            "images": [view(row._mapping) for row in rows[:limit]],
            "schema": "/v2/schemas/images",
        }
        for name, query_of in links.items():
            suffix = f"?{urlencode(query_of, doseq=True)}" if query_of else ""
            body[name] = f"/v2/images{suffix}"
        answer(resp, body)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: ImageCaller = req.context.caller
        caller.require_writer()
        body = read_json(req)
        key = _new_id(body.pop("id", None) if isinstance(body, dict) else None)
        self._service.add({"owner": caller.project_id} | validate(body, caller) | {"id": key})
        resp.status = falcon.HTTP_201
        resp.location = f"{req.prefix}/v2/images/{key}"
        answer(resp, view(self._service.find(caller, key)._mapping))


def _new_id(requested: object) -> str:
    """Return the id of a new image: the client's choice, or a random UUID for None.

    ``ImageStore.add`` refuses an id that exists.

    Raises:
        HTTPBadRequest: The requested id is not a canonical UUID.
    """
    if requested is None:
        return str(uuid.uuid4())
    try:
        if isinstance(requested, str) and str(uuid.UUID(requested)) == requested:
            return requested
    except ValueError:
        pass
    raise falcon.HTTPBadRequest(
        description="'image.id' must be a UUID, in lower case and with hyphens."
    )


class ImageItem(Handler[ImageStore]):
    """GET, PATCH and DELETE /v2/images/{key}, and GET .../tasks."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        answer(resp, view(self._service.find(req.context.caller, key)._mapping))

    def on_patch(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        form = (req.content_type or "").partition(";")[0].strip()
        if form not in (PATCH_TYPE, OLD_PATCH_TYPE):
            raise falcon.HTTPUnsupportedMediaType(
                description=f"The Content-Type of a change must be {PATCH_TYPE} or {OLD_PATCH_TYPE}.",
                headers={"Accept-Patch": f"{PATCH_TYPE}, {OLD_PATCH_TYPE}"},
            )
        operations = read_json(req)
        if form == OLD_PATCH_TYPE:
            operations = convert_operations(operations)
        image = self._find_owned(req, key)
        columns = apply_patch(image._mapping, operations, req.context.caller)
        self._change(image, columns, properties=image.properties, status=image.status)
        self.on_get(req, resp, key)

    def on_get_tasks(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._service.find(req.context.caller, key)
        # Only imports create tasks, and this service has no imports.
        answer(resp, {"tasks": []})

    def on_delete(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._service.remove(self._find_owned(req, key))
        resp.status = falcon.HTTP_204

    def _find_owned(self, req: falcon.Request, key: str) -> DbRow:
        image = self._service.find(req.context.caller, key)
        req.context.caller.require_owner(image)
        return image

    def _change(self, image: DbRow, columns: Body, **expected_state: object) -> None:
        if not self._service.change(image.id, columns, **expected_state):
            raise falcon.HTTPConflict(
                description=f"Image {image.id} was changed or deleted meanwhile: read the image and try again."
            )


class ImageFile(Handler[ImageStore]):
    """PUT and GET /v2/images/{key}/file."""

    def on_put(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        if (req.content_type or "").partition(";")[0].strip() != "application/octet-stream":
            raise falcon.HTTPUnsupportedMediaType(
                description="The Content-Type of image data must be application/octet-stream."
            )
        image = self._service.find(req.context.caller, key)
        req.context.caller.require_owner(image)
        self._service.upload(image, req.content_length, lambda limit: read_bytes(req, limit))
        resp.status = falcon.HTTP_204

    def on_get(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        caller: ImageCaller = req.context.caller
        image = self._service.find(caller, key)
        if image.size is None:
            resp.status = falcon.HTTP_204
            return
        first, last = _range(req, image.size)
        if last - first + 1 < image.size:
            resp.status = falcon.HTTP_206
            resp.content_range = (first, last, image.size)
        file = self._service.files.open(image.upload)
        file.seek(first)
        resp.content_type = "application/octet-stream"
        resp.set_header("Content-MD5", image.checksum)
        resp.set_header("Accept-Ranges", "bytes")
        resp.set_stream(file, last - first + 1)


def _range(req: falcon.Request, size: int) -> tuple[int, int]:
    """Return the positions of the first and last byte to send, by default of the whole file.

    Raises:
        HTTPInvalidHeader: The header Range is malformed.
        HTTPRangeNotSatisfiable: The range is outside of the data.
    """
    if req.range is None:
        return 0, size - 1
    first, last = req.range
    first, last = (max(size + first, 0), size - 1) if first < 0 else (first, last)
    last = size - 1 if last < 0 else min(last, size - 1)
    if first > last:
        raise falcon.HTTPRangeNotSatisfiable(size)
    return first, last
