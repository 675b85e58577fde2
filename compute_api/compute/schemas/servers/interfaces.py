# SPDX-License-Identifier: Apache-2.0
"""Bodies of /servers/{id}/os-interface."""

from __future__ import annotations

from compute_api.compute.schemas.common import IPV4, IPV6, TAG, UUID, record
from compute_api.http.validation import Document, VersionedSchema, put

_ADDRESS: Document = {"anyOf": [IPV4, IPV6]}

CREATE = VersionedSchema(
    record(
        {
            "interfaceAttachment": record(
                {
                    "net_id": UUID,
                    "port_id": UUID,
                    "fixed_ips": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 1,
                        "items": record({"ip_address": _ADDRESS}, ("ip_address",)),
                    },
                }
            )
        }
    ),
    ("2.49", put("interfaceAttachment/tag", TAG)),
)
