# SPDX-License-Identifier: Apache-2.0
"""The query of a server's volumes."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, query, repeated
from compute_api.edge.validation import VersionedSchema, strict

LIST = VersionedSchema(
    query({"limit": repeated(COUNT), "offset": repeated(COUNT)}), ("2.75", strict)
)
