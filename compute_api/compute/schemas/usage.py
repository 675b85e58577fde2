# SPDX-License-Identifier: Apache-2.0
"""Queries of the usage of projects."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, query, repeated
from compute_api.http.validation import VersionedSchema, put, strict

_PAGING = (put("limit", repeated(COUNT)), put("marker", repeated()))
LIST = VersionedSchema(
    query({"start": repeated(), "end": repeated(), "detailed": repeated()}),
    ("2.40", *_PAGING),
    ("2.75", strict),
)
SHOW = VersionedSchema(
    query({"start": repeated(), "end": repeated()}), ("2.40", *_PAGING), ("2.75", strict)
)
