# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxy to the image service (until 2.35, metadata until 2.38)."""
from __future__ import annotations

from compute_api.schemas.common import COUNT, METADATA, query, repeated, wrapped
from compute_api.validation import Versioned

LIST = Versioned(query({"limit": repeated(COUNT), "page_size": repeated(COUNT), "offset": repeated(COUNT),
                        "marker": repeated()}))
ALL = Versioned(wrapped("metadata", METADATA))
ITEM = Versioned(wrapped("meta", {**METADATA, "minProperties": 1, "maxProperties": 1}))
