# SPDX-License-Identifier: Apache-2.0
"""Queries of hypervisors."""

from __future__ import annotations

from compute_api.compute.schemas.common import BOOLEAN, COUNT, query, repeated
from compute_api.http.validation import Document, VersionedSchema, put, replace

_PATTERN: Document = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[a-zA-Z0-9._-]*$",
}
_SERVERS = {"with_servers": repeated(BOOLEAN, 1)}

LIST = VersionedSchema(
    query(),
    ("2.33", put("limit", repeated(COUNT)), put("marker", repeated())),
    (
        "2.53",
        replace(
            {
                **query(
                    {
                        "limit": repeated(COUNT, 1),
                        "marker": repeated(most=1),
                        **_SERVERS,
                        "hypervisor_hostname_pattern": repeated(_PATTERN, 1),
                    }
                ),
                "additionalProperties": False,
            }
        ),
    ),
)
SHOW = VersionedSchema(
    query(), ("2.53", replace({**query(_SERVERS), "additionalProperties": False}))
)
