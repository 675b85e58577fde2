# SPDX-License-Identifier: Apache-2.0
"""The query and the body of hosts (until 2.42)."""

from __future__ import annotations

from compute_api.compute.schemas.common import query, record, repeated
from compute_api.http.validation import Document, VersionedSchema

_SWITCH: Document = {"enum": ["enable", "disable", "Enable", "Disable", "ENABLE", "DISABLE"]}

LIST = VersionedSchema(query({"zone": repeated()}))
UPDATE = VersionedSchema(record({"status": _SWITCH, "maintenance_mode": _SWITCH}, minProperties=1))
