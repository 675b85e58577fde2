# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxy to the image service (until 2.35, metadata until 2.38)."""

from __future__ import annotations

from compute_api.compute.schemas.common import METADATA, query, repeated, wrapped
from compute_api.http.validation import VersionedSchema

_NOT_ZERO = repeated({"type": "string", "pattern": "^0*[1-9][0-9]{0,18}$", "maxLength": 19})
LIST = VersionedSchema(
    query({"limit": _NOT_ZERO, "page_size": _NOT_ZERO, "offset": _NOT_ZERO, "marker": repeated()})
)
ALL = VersionedSchema(wrapped("metadata", METADATA))
ITEM = VersionedSchema(wrapped("meta", {**METADATA, "minProperties": 1, "maxProperties": 1}))
