# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of /servers/{id}/shares. Lists have no parameters."""

from __future__ import annotations

from compute_api.compute.schemas.common import UUID, query, record
from compute_api.http.validation import Document, VersionedSchema

_TAG: Document = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[a-zA-Z0-9-]*$"}

CREATE = VersionedSchema(
    record({"share": record({"share_id": UUID, "tag": _TAG}, ("share_id",))}, ("share",))
)
READ = VersionedSchema(query(additionalProperties=False))
