# SPDX-License-Identifier: Apache-2.0
"""Queries of instance actions."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, query, repeated
from compute_api.http.validation import VersionedSchema, put, strict

_TIME = {"type": "string", "format": "date-time"}

LIST = VersionedSchema(
    query(),
    (
        "2.58",
        put("limit", repeated(COUNT, 1)),
        put("marker", repeated(most=1)),
        put("changes-since", repeated(_TIME, 1)),
        strict,
    ),
    ("2.66", put("changes-before", repeated(_TIME, 1))),
)
