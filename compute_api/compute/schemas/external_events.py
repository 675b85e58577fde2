# SPDX-License-Identifier: Apache-2.0
"""The body of POST /os-server-external-events, with the names of events by microversion."""

from __future__ import annotations

from compute_api.compute.schemas.common import UUID, record, wrapped
from compute_api.http.validation import Document, VersionedSchema, put

_NETWORK = (
    "network-changed",
    "network-vif-plugged",
    "network-vif-unplugged",
    "network-vif-deleted",
)
COMPLETED = "completed"


def _names(*more: str) -> Document:
    return {"type": "string", "enum": [*_NETWORK, *more]}


_NAME = "events/*/name"
CREATE = VersionedSchema(
    wrapped(
        "events",
        {
            "type": "array",
            "minItems": 1,
            "items": record(
                {
                    "name": _names(),
                    "server_uuid": UUID,
                    "status": {"enum": ["failed", COMPLETED, "in-progress"]},
                    "tag": {"type": "string", "maxLength": 255},
                },
                ("name", "server_uuid"),
            ),
        },
    ),
    ("2.51", put(_NAME, _names("volume-extended"))),
    ("2.76", put(_NAME, _names("volume-extended", "power-update"))),
    ("2.82", put(_NAME, _names("volume-extended", "power-update", "accelerator-request-bound"))),
    (
        "2.93",
        put(
            _NAME,
            _names(
                "volume-extended", "power-update", "accelerator-request-bound", "volume-reimaged"
            ),
        ),
    ),
)
