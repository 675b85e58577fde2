# SPDX-License-Identifier: Apache-2.0
"""Bodies of the actions that change the addresses of a server."""

from __future__ import annotations

from compute_api.compute.schemas.common import IPV4, IPV6, record, wrapped
from compute_api.http.validation import Document, VersionedSchema

_ADDRESS: Document = {"anyOf": [IPV4, IPV6]}

#: Schemas by the key of the action.
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
