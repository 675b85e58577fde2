# SPDX-License-Identifier: Apache-2.0
"""Bodies of the proxy for floating IPs."""

from __future__ import annotations

from compute_api.http.validation import VersionedSchema

FLOATING_IP = VersionedSchema(
    {"type": ["object", "null"], "properties": {"pool": {"type": ["string", "null"]}}}
)
