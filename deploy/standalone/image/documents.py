# SPDX-License-Identifier: Apache-2.0
"""What the image service says about itself: versions, schemas, stores and import methods."""

from typing import Any

import falcon

from deploy.standalone.fields import WORDS, Field
from deploy.standalone.image.attributes import FIELDS, READ_ONLY
from deploy.standalone.web import answer

NEWEST, OLDEST = 9, 0
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}
assert JSON_TYPES.keys() == WORDS.keys()


class Versions:
    """GET / and GET /versions: open to everyone."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        links = [{"rel": "self", "href": f"{req.prefix}/v2/"}]
        resp.status = falcon.HTTP_200 if req.path == "/versions" else falcon.HTTP_300
        answer(resp, {"versions": [
            {"id": f"v2.{minor}", "status": "CURRENT" if minor == NEWEST else "SUPPORTED", "links": links}
            for minor in range(NEWEST, OLDEST - 1, -1)]})


class Schemas:
    """GET /v2/schemas/{noun}: image, images, member or members."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, noun: str) -> None:
        single = {"image": _image(), "member": _member()}
        if noun in single:
            answer(resp, single[noun])
        elif noun.removesuffix("s") in single:
            items = {"type": "array", "items": single[noun[:-1]]}
            answer(resp, {"name": noun, "properties": {noun: items, "schema": {"type": "string"}}})
        else:
            raise falcon.HTTPNotFound(description="The schemas are image, images, member and members.")


class Info:
    """GET /v2/info/stores and /v2/info/import: one store, and no way to import but the upload."""

    def on_get_stores(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"stores": [{"id": "file", "default": "true"}]})

    def on_get_import(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"import-methods": {
            "description": "Import methods available.", "type": "array", "value": []}})


def _property(field: Field) -> dict[str, Any]:
    kind = JSON_TYPES[field.kind]
    schema: dict[str, Any] = {"type": ["null", kind] if field.null else kind}
    if field.choices:
        schema["enum"] = [None, *field.choices] if field.null else list(field.choices)
    return schema


def _image() -> dict[str, Any]:
    writable = {name: _property(field) for name, field in FIELDS.items()}
    fixed = {name: {"type": ["null", "string", "integer"], "readOnly": True} for name in READ_ONLY}
    return {"name": "image", "properties": fixed | writable, "additionalProperties": {"type": "string"}}


def _member() -> dict[str, Any]:
    names = ("image_id", "member_id", "status", "created_at", "updated_at", "schema")
    return {"name": "member", "properties": {name: {"type": "string"} for name in names}}
