# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of actions on hosts, an extension of Kilonova."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, query, record, repeated
from compute_api.http.validation import Document, VersionedSchema, strict

MAX_PARALLEL = 100
_FLAG: Document = {"type": "boolean"}
_PARALLEL: Document = {"type": "integer", "minimum": 1, "maximum": MAX_PARALLEL}

LIST = VersionedSchema(query({"limit": repeated(COUNT)}), ("2.75", strict))
CREATE = VersionedSchema(
    record(
        {
            "drain": record({"cold": _FLAG, "parallel": _PARALLEL, "wait": _FLAG}),
            "evacuate": record({"parallel": _PARALLEL, "force": _FLAG}),
        },
        minProperties=1,
        maxProperties=1,
    )
)
