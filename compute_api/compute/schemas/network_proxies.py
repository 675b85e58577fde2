# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxies to the network service, which were never strict: unknown keys
are passed over."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    ANY,
    COUNT,
    IPV4,
    IPV6,
    UUID,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.edge.validation import Document, VersionedSchema

_TEXT: Document = {"type": "string", "maxLength": 255}
_ADDRESS: Document = {"anyOf": [IPV4, IPV6]}


def _open(name: str, properties: Document, required: tuple[str, ...]) -> VersionedSchema:
    """A body whose content may hold more than what is known."""
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
FLOATING_IP = VersionedSchema(
    {"type": ["object", "null"], "properties": {"pool": {"type": ["string", "null"]}}}
)

#: Actions on servers.
ACTIONS: dict[str, VersionedSchema] = {
    "addFixedIp": VersionedSchema(
        wrapped(
            "addFixedIp",
            record(
                {
                    "networkId": {
                        "anyOf": [
                            {"type": "string", "minLength": 1, "maxLength": 36},
                            {"type": "number"},
                        ]
                    }
                },
                ("networkId",),
            ),
        )
    ),
    "removeFixedIp": VersionedSchema(
        wrapped("removeFixedIp", record({"address": _ADDRESS}, ("address",)))
    ),
    "addFloatingIp": VersionedSchema(
        wrapped(
            "addFloatingIp", record({"address": _ADDRESS, "fixed_address": _ADDRESS}, ("address",))
        )
    ),
    "removeFloatingIp": VersionedSchema(
        wrapped("removeFloatingIp", record({"address": _ADDRESS}, ("address",)))
    ),
}
