# SPDX-License-Identifier: Apache-2.0
"""Bodies of a server's metadata and tags."""

from __future__ import annotations

from compute_api.compute.schemas.common import METADATA, TAG, wrapped
from compute_api.http.validation import VersionedSchema

ALL = VersionedSchema(wrapped("metadata", METADATA))
ITEM = VersionedSchema(wrapped("meta", {**METADATA, "minProperties": 1, "maxProperties": 1}))
TAGS = VersionedSchema(wrapped("tags", {"type": "array", "maxItems": 50, "items": TAG}))
