# SPDX-License-Identifier: Apache-2.0
"""Bodies of a server's metadata and tags."""
from __future__ import annotations

from compute_api.schemas.common import METADATA, TAG, wrapped
from compute_api.validation import Versioned

ALL = Versioned(wrapped("metadata", METADATA))
ITEM = Versioned(wrapped("meta", {**METADATA, "minProperties": 1, "maxProperties": 1}))
TAGS = Versioned(wrapped("tags", {"type": "array", "maxItems": 50, "items": TAG}))
