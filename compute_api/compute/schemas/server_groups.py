# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of server groups."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    COUNT,
    NAME,
    integer,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.http.validation import Document, VersionedSchema, put, strict

_HARD = ["anti-affinity", "affinity"]
_SOFT = [*_HARD, "soft-anti-affinity", "soft-affinity"]


def _policies(words: list[str]) -> Document:
    return {"type": "array", "minItems": 1, "maxItems": 1, "items": {"enum": words}}


CREATE = VersionedSchema(
    wrapped(
        "server_group", record({"name": NAME, "policies": _policies(_HARD)}, ("name", "policies"))
    ),
    ("2.15", put("server_group/policies", _policies(_SOFT))),
    (
        "2.64",
        put(
            "server_group",
            record(
                {
                    "name": NAME,
                    "policy": {"enum": _SOFT},
                    "rules": record({"max_server_per_host": integer(1)}),
                },
                ("name", "policy"),
            ),
        ),
    ),
)
LIST = VersionedSchema(
    query({"all_projects": repeated(), "limit": repeated(COUNT), "offset": repeated(COUNT)}),
    ("2.75", strict),
)
