# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxies for security groups, which ignore unknown keys."""

from __future__ import annotations

from compute_api.compute.schemas.common import ANY, COUNT, UUID, query, repeated
from compute_api.http.validation import Document, VersionedSchema

_TEXT: Document = {"type": "string", "maxLength": 255}


def _open(name: str, properties: Document, required: tuple[str, ...]) -> VersionedSchema:
    """Return the schema of a body with the object ``name``. Unknown keys are valid in both.

    ``properties`` and ``required`` are those of the object.
    """
    return VersionedSchema(
        {
            "type": "object",
            "required": [name],
            "properties": {
                name: {"type": "object", "properties": properties, "required": list(required)}
            },
        }
    )


GROUPS = VersionedSchema(
    query({"limit": repeated(COUNT), "offset": repeated(COUNT), "all_tenants": repeated()})
)
GROUP = _open("security_group", {"name": _TEXT, "description": _TEXT}, ("name", "description"))
RULE = _open(
    "security_group_rule",
    {
        "parent_group_id": UUID,
        "group_id": {"anyOf": [{"type": "null"}, UUID]},
        "ip_protocol": ANY,
        "from_port": ANY,
        "to_port": ANY,
        "cidr": ANY,
    },
    ("parent_group_id",),
)
