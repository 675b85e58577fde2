# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of /servers/{id}/os-volume_attachments."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    BOOLEAN,
    COUNT,
    TAG,
    UUID,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.http.validation import Document, VersionedSchema, put, strict

LIST = VersionedSchema(
    query({"limit": repeated(COUNT), "offset": repeated(COUNT)}), ("2.75", strict)
)
#: Unknown parameters are ignored here even after 2.102, as in Nova.
SHOW = VersionedSchema(query())
_ATTACHMENT = "volumeAttachment"
_DEVICE: Document = {
    "type": ["string", "null"],
    "maxLength": 255,
    "pattern": "(^/dev/x{0,1}[a-z]{0,1}d{0,1})([a-z]+)[0-9]*$",
}


def _body(known: Document) -> Document:
    return wrapped(_ATTACHMENT, record({"volumeId": UUID, **known}, ("volumeId",)))


CREATE = VersionedSchema(
    _body({"device": _DEVICE}),
    ("2.49", put(f"{_ATTACHMENT}/tag", TAG)),
    ("2.79", put(f"{_ATTACHMENT}/delete_on_termination", BOOLEAN)),
)
UPDATE = VersionedSchema(
    _body({}),
    (
        "2.85",
        put(f"{_ATTACHMENT}/device", _DEVICE),
        put(f"{_ATTACHMENT}/tag", TAG),
        put(f"{_ATTACHMENT}/delete_on_termination", BOOLEAN),
        put(f"{_ATTACHMENT}/serverId", UUID),
        put(f"{_ATTACHMENT}/id", UUID),
    ),
)
