# SPDX-License-Identifier: Apache-2.0
"""The query of migrations, and the body of the action force_complete."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, query, repeated, wrapped
from compute_api.http.validation import VersionedSchema, put, strict

_TIME = {"type": "string", "format": "date-time"}

LIST = VersionedSchema(
    query(
        {
            name: repeated()
            for name in (
                "hidden",
                "host",
                "instance_uuid",
                "source_compute",
                "status",
                "migration_type",
            )
        }
    ),
    (
        "2.59",
        put("limit", repeated(COUNT, 1)),
        put("marker", repeated(most=1)),
        put("changes-since", repeated(_TIME, 1)),
        strict,
    ),
    ("2.66", put("changes-before", repeated(_TIME, 1))),
    ("2.80", put("user_id", repeated(most=1)), put("project_id", repeated(most=1))),
)
FORCE_COMPLETE = VersionedSchema(wrapped("force_complete", {"type": "null"}))
