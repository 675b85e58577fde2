# SPDX-License-Identifier: Apache-2.0
"""Documents of the image service: its versions and the schemas of images."""

import falcon

from deploy.one_machine.services.image.attributes import ATTRIBUTES, READ_ONLY
from deploy.one_machine.services.web import answer

NEWEST_MINOR = 9
IMAGE = {
    "name": "image",
    "additionalProperties": {"type": "string"},
    "properties": {
        name: {"type": ["null", "string", "integer"], "readOnly": True} for name in READ_ONLY
    }
    | ATTRIBUTES,
}


class ImageVersions:
    """GET / and GET /versions, open to every client."""

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
    """GET /v2/schemas/{noun}: image or images."""

    def on_get(self, req: falcon.Request, resp: falcon.Response, noun: str) -> None:
        if noun not in ("image", "images"):
            raise falcon.HTTPNotFound(
                description=f"There is no schema '{noun[:64]}', only 'image' and 'images'."
            )
        many = {"images": {"type": "array", "items": IMAGE}, "schema": {"type": "string"}}
        answer(resp, IMAGE if noun == "image" else {"name": noun, "properties": many})
