# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of services."""

from __future__ import annotations

from compute_api.compute.schemas.common import BOOLEAN, HOST, query, record, repeated
from compute_api.http.validation import Document, VersionedSchema, strict

_BINARY: Document = {"type": "string", "minLength": 1, "maxLength": 255}
_REASON: Document = {"type": "string", "minLength": 1, "maxLength": 255}

LIST = VersionedSchema(query({"host": repeated(), "binary": repeated()}), ("2.75", strict))
#: Before 2.53 the path names the change, and the handler checks the keys that the change needs.
BY_HOST = VersionedSchema(
    record({"host": HOST, "binary": _BINARY, "disabled_reason": _REASON}, ("host", "binary"))
)
BY_HOST_FORCED = VersionedSchema(
    record(
        {"host": HOST, "binary": _BINARY, "disabled_reason": _REASON, "forced_down": BOOLEAN},
        ("host", "binary"),
    )
)
BY_UUID = VersionedSchema(
    record(
        {
            "status": {"enum": ["enabled", "disabled"]},
            "disabled_reason": _REASON,
            "forced_down": BOOLEAN,
        }
    )
)
