# SPDX-License-Identifier: Apache-2.0
"""What the image service says about itself: versions, schemas, stores and import methods."""

import falcon

from deploy.standalone.image.attributes import ATTRIBUTES, READ_ONLY
from deploy.standalone.web import answer

NEWEST_MINOR = 9
IMAGE = {
    "name": "image",
    "additionalProperties": {"type": "string"},
    "properties": {
        name: {"type": ["null", "string", "integer"], "readOnly": True} for name in READ_ONLY
    }
    | ATTRIBUTES,
}
MEMBER = {
    "name": "member",
    "properties": {
        name: {"type": "string"}
        for name in ("image_id", "member_id", "status", "created_at", "updated_at", "schema")
    },
}
SCHEMAS = {one["name"]: one for one in (IMAGE, MEMBER)}


class ImageVersions:
    """GET / and GET /versions: open to everyone."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        links = [{"rel": "self", "href": f"{req.prefix}/v2/"}]
        resp.status = falcon.HTTP_200 if req.path == "/versions" else falcon.HTTP_300
        answer(
            resp,
            {
                "versions": [
                    {
                        "id": f"v2.{minor}",
                        "status": "CURRENT" if minor == NEWEST_MINOR else "SUPPORTED",
                        "links": links,
                    }
                    for minor in range(NEWEST_MINOR, -1, -1)
                ]
            },
        )


class ImageSchemas:
    """GET /v2/schemas/{noun}: image, images, member or members."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, noun: str) -> None:
        singular = noun.removesuffix("s")
        if singular not in SCHEMAS:
            raise falcon.HTTPNotFound(
                description="The schemas are image, images, member and members."
            )
        many = {noun: {"type": "array", "items": SCHEMAS[singular]}, "schema": {"type": "string"}}
        answer(resp, SCHEMAS[noun] if noun in SCHEMAS else {"name": noun, "properties": many})


class StoreInfo:
    """GET /v2/info/stores and /v2/info/import: one store, and no way to import but the upload."""

    def on_get_stores(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"stores": [{"id": "file", "default": "true"}]})

    def on_get_import(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(
            resp,
            {
                "import-methods": {
                    "description": "Import methods available.",
                    "type": "array",
                    "value": [],
                }
            },
        )
