# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxies to the block storage service, /os-volumes and /os-snapshots."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    BOOLEAN,
    COUNT,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.http.validation import Document, VersionedSchema

LIST = VersionedSchema(query({"limit": repeated(COUNT), "offset": repeated(COUNT)}))
_TEXT: Document = {"type": "string", "maxLength": 255}
_WORDS: Document = {"display_name": _TEXT, "display_description": _TEXT}
VOLUME = VersionedSchema(
    wrapped(
        "volume",
        record(
            {
                "size": {
                    "type": ["integer", "string"],
                    "pattern": "^0*[1-9][0-9]{0,9}$",
                    "maxLength": 19,
                    "minimum": 1,
                },
                "volume_type": _TEXT,
                "snapshot_id": _TEXT,
                "availability_zone": _TEXT,
                "metadata": {"type": "object"},
                **_WORDS,
            },
            ("size",),
        ),
    )
)
SNAPSHOT = VersionedSchema(
    wrapped("snapshot", record({"volume_id": _TEXT, "force": BOOLEAN, **_WORDS}, ("volume_id",)))
)
