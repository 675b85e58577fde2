# SPDX-License-Identifier: Apache-2.0
"""Bodies of consoles, including types that no host offers, which have separate errors."""

from __future__ import annotations

from compute_api.compute.schemas.common import query, record, wrapped
from compute_api.http.validation import Document, VersionedSchema, put, strict

_PROTOCOLS = ["vnc", "spice", "serial", "rdp"]
_TYPES = ["novnc", "xvpvnc", "spice-html5", "serial", "rdp-html5"]


def _one_of(names: list[str]) -> Document:
    return {"enum": names}


CREATE = VersionedSchema(
    wrapped(
        "remote_console",
        record({"protocol": _one_of(_PROTOCOLS), "type": _one_of(_TYPES)}, ("protocol", "type")),
    ),
    (
        "2.8",
        put("remote_console/protocol", _one_of([*_PROTOCOLS, "mks"])),
        put("remote_console/type", _one_of([*_TYPES, "webmks"])),
    ),
    ("2.99", put("remote_console/type", _one_of([*_TYPES, "webmks", "spice-direct"]))),
)

#: Key of an action before 2.6 -> schema with the allowed types.
ACTIONS: dict[str, VersionedSchema] = {
    key: VersionedSchema(wrapped(key, record({"type": _one_of(types)}, ("type",))))
    for key, types in {
        "os-getVNCConsole": ["novnc", "xvpvnc"],
        "os-getSPICEConsole": ["spice-html5"],
        "os-getSerialConsole": ["serial"],
    }.items()
}

SHOW_TOKEN = VersionedSchema(query(), ("2.99", strict))
