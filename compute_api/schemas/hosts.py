# SPDX-License-Identifier: Apache-2.0
"""The query and the body of hosts (until 2.42)."""
from __future__ import annotations

from compute_api.schemas.common import query, record, repeated
from compute_api.validation import Document, Versioned

_SWITCH: Document = {"enum": ["enable", "disable", "Enable", "Disable", "ENABLE", "DISABLE"]}

LIST = Versioned(query({"zone": repeated()}))
UPDATE = Versioned(record({"status": _SWITCH, "maintenance_mode": _SWITCH}, minProperties=1))
