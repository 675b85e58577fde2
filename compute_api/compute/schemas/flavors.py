# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of flavors, their access and their extra specs."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    BOOLEAN,
    COUNT,
    NAME,
    integer,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.http.validation import Document, VersionedSchema, drop, put, strict

_DESCRIPTION: Document = {
    "type": ["string", "null"],
    "minLength": 0,
    "maxLength": 65535,
    "format": "printable",
}
_FACTOR: Document = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 3.40282e38},
        {"type": "string", "pattern": r"^[0-9]{1,30}(\.[0-9]{1,30})?$"},
    ]
}

CREATE = VersionedSchema(
    wrapped(
        "flavor",
        record(
            {
                "name": NAME,
                "id": {
                    "type": ["string", "number", "null"],
                    "minLength": 1,
                    "maxLength": 255,
                    "pattern": "^[a-zA-Z0-9._-]([a-zA-Z0-9. _-]*[a-zA-Z0-9._-])?$",
                },
                "ram": integer(1),
                "vcpus": integer(1),
                "disk": integer(0),
                "OS-FLV-EXT-DATA:ephemeral": integer(0),
                "swap": integer(0),
                "rxtx_factor": _FACTOR,
                "os-flavor-access:is_public": BOOLEAN,
            },
            ("name", "ram", "vcpus", "disk"),
        ),
    ),
    ("2.55", put("flavor/description", _DESCRIPTION)),
    ("2.102", drop("flavor/rxtx_factor")),
)
UPDATE = VersionedSchema(wrapped("flavor", record({"description": _DESCRIPTION}, ("description",))))

_SORT_KEYS = [
    "created_at",
    "description",
    "disabled",
    "ephemeral_gb",
    "flavorid",
    "id",
    "is_public",
    "memory_mb",
    "name",
    "root_gb",
    "rxtx_factor",
    "swap",
    "updated_at",
    "vcpu_weight",
    "vcpus",
]
#: An empty pattern matches every name.
_PATTERN: Document = {
    "type": "string",
    "maxLength": 255,
    "anyOf": [{"maxLength": 0}, {"format": "regex"}],
}
LIST = VersionedSchema(
    query(
        {
            "limit": repeated(COUNT),
            "marker": repeated(),
            "is_public": repeated(),
            "minRam": repeated(),
            "minDisk": repeated(),
            "sort_key": repeated({"enum": _SORT_KEYS}),
            "sort_dir": repeated({"enum": ["asc", "desc"]}),
        }
    ),
    ("2.75", strict),
    (
        "2.102",
        put("sort_key", repeated({"enum": [key for key in _SORT_KEYS if key != "rxtx_factor"]})),
        put("name", repeated(_PATTERN)),
    ),
)

_VALUE: Document = {"type": ["string", "number"], "maxLength": 255}
_SPECS: Document = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^[a-zA-Z0-9_:. -]{1,255}$": _VALUE},
}
ADD_SPECS = VersionedSchema(wrapped("extra_specs", _SPECS))
PUT_SPEC = VersionedSchema({**_SPECS, "minProperties": 1, "maxProperties": 1})

_TENANT = record({"tenant": {"type": "string", "minLength": 1, "maxLength": 255}}, ("tenant",))
ACTION = VersionedSchema(
    record(
        {"addTenantAccess": _TENANT, "removeTenantAccess": _TENANT},
        minProperties=1,
        maxProperties=1,
    )
)
