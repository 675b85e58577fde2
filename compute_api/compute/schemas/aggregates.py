# SPDX-License-Identifier: Apache-2.0
"""Bodies of aggregates, of their actions by key, and of images that hosts download in advance."""

from __future__ import annotations

from compute_api.compute.schemas.common import HOST, NAME, UUID, record, wrapped
from compute_api.http.validation import Document, VersionedSchema

_ZONE: Document = {"type": ["string", "null"], "minLength": 1, "maxLength": 255, "format": "name"}
#: The handler strips white space around a name.
_NEW_NAME: Document = {**NAME, "format": "printable", "pattern": r"\S"}
_METADATA: Document = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {
        "^[a-zA-Z0-9_:. -]{1,255}$": {"type": ["string", "null"], "maxLength": 255}
    },
}
_HOST = record({"host": HOST}, ("host",))

CREATE = VersionedSchema(
    wrapped("aggregate", record({"name": NAME, "availability_zone": _ZONE}, ("name",)))
)
UPDATE = VersionedSchema(
    wrapped("aggregate", record({"name": _NEW_NAME, "availability_zone": _ZONE}, minProperties=1))
)
#: Any body, because the handler chooses the schema by the key.
ACTION = VersionedSchema({"type": "object"})
BY_KEY: dict[str, VersionedSchema] = {
    "add_host": VersionedSchema(wrapped("add_host", _HOST)),
    "remove_host": VersionedSchema(wrapped("remove_host", _HOST)),
    "set_metadata": VersionedSchema(
        wrapped("set_metadata", record({"metadata": _METADATA}, ("metadata",)))
    ),
}
IMAGES = VersionedSchema(
    record(
        {
            "cache": {
                "type": "array",
                "minItems": 1,
                "maxItems": 100,
                "items": record({"id": UUID}, ("id",)),
            }
        },
        ("cache",),
    )
)
