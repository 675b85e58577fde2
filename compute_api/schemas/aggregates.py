# SPDX-License-Identifier: Apache-2.0
"""Bodies of aggregates, their actions by key, and of the images that their hosts fetch ahead."""
from __future__ import annotations

from compute_api.schemas.common import HOST, NAME, UUID, record, wrapped
from compute_api.validation import Document, Versioned

_ZONE: Document = {"type": ["string", "null"], "minLength": 1, "maxLength": 255, "format": "name"}
#: White space around a name is taken off.
_NEW_NAME: Document = {**NAME, "format": "printable", "pattern": r"\S"}
_METADATA: Document = {
    "type": "object", "additionalProperties": False,
    "patternProperties": {"^[a-zA-Z0-9_:. -]{1,255}$": {"type": ["string", "null"], "maxLength": 255}}}
_HOST = record({"host": HOST}, ("host",))

CREATE = Versioned(wrapped("aggregate", record({"name": NAME, "availability_zone": _ZONE}, ("name",))))
UPDATE = Versioned(wrapped("aggregate", record({"name": _NEW_NAME, "availability_zone": _ZONE}, minProperties=1)))
#: Any body: which key it has is judged first.
ACTION = Versioned({"type": "object"})
BY_KEY: dict[str, Versioned] = {
    "add_host": Versioned(wrapped("add_host", _HOST)),
    "remove_host": Versioned(wrapped("remove_host", _HOST)),
    "set_metadata": Versioned(wrapped("set_metadata", record({"metadata": _METADATA}, ("metadata",)))),
}
IMAGES = Versioned(record({"cache": {"type": "array", "minItems": 1, "maxItems": 100,
                                     "items": record({"id": UUID}, ("id",))}}, ("cache",)))
