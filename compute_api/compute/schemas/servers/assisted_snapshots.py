# SPDX-License-Identifier: Apache-2.0
"""The body and the query of os-assisted-volume-snapshots."""

from __future__ import annotations

from compute_api.compute.schemas.common import query, record, repeated, wrapped
from compute_api.http.validation import Document, VersionedSchema, strict

_NAME: Document = {"type": "string", "minLength": 1}
CREATE = VersionedSchema(
    wrapped(
        "snapshot",
        record(
            {
                "volume_id": _NAME,
                "create_info": record(
                    {
                        "snapshot_id": _NAME,
                        "type": {"type": "string", "enum": ["qcow2"]},
                        "new_file": _NAME,
                        "id": _NAME,
                    },
                    ("snapshot_id", "type", "new_file"),
                ),
            },
            ("volume_id", "create_info"),
        ),
    )
)
DELETE = VersionedSchema(query({"delete_info": repeated()}), ("2.75", strict))
