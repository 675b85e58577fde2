# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of key pairs."""

from __future__ import annotations

from compute_api.compute.schemas.common import COUNT, NAME, query, record, repeated, wrapped
from compute_api.http.validation import Document, VersionedSchema, put, require, strict

_OLD_NAME: Document = {**NAME, "pattern": "^[a-zA-Z0-9 _-]*$"}
_NAME: Document = {**NAME, "pattern": "^[a-zA-Z0-9@._ -]*$"}
_KEY: Document = {"type": "string", "maxLength": 16384}

CREATE = VersionedSchema(
    wrapped("keypair", record({"name": _OLD_NAME, "public_key": _KEY}, ("name",))),
    ("2.2", put("keypair/type", {"enum": ["ssh", "x509"]})),
    ("2.10", put("keypair/user_id", {"type": "string", "minLength": 1, "maxLength": 255})),
    ("2.92", put("keypair/name", _NAME), require("keypair/public_key")),
)
LIST = VersionedSchema(
    query(),
    ("2.10", put("user_id", repeated())),
    ("2.35", put("limit", repeated(COUNT)), put("marker", repeated())),
    ("2.75", strict),
)
SHOW = VersionedSchema(query(), ("2.10", put("user_id", repeated())), ("2.75", strict))
