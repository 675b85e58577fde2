# SPDX-License-Identifier: Apache-2.0
"""Key pairs as answers."""
from __future__ import annotations

from typing import Any

from compute_api.fields import OMITTED, Field, cut, render
from compute_api.views.servers import fraction

_COMMON: tuple[Field, ...] = (
    Field("name", "name"),
    Field("public_key", "public_key"),
    Field("fingerprint", "fingerprint"),
    Field("type", "type", since="2.2"),
)
NEW: tuple[Field, ...] = (
    *_COMMON,
    Field("user_id", "user_id"),
    Field("private_key", lambda row, view: view or OMITTED, maybe=True),
)
FIELDS: tuple[Field, ...] = (
    *_COMMON,
    Field("user_id", "user_id"),
    Field("id", "id"),
    Field("created_at", lambda row, view: fraction(row.created_at)),
    Field("updated_at", lambda row, view: None),
    Field("deleted", lambda row, view: False),
    Field("deleted_at", lambda row, view: None),
)


def one(row: Any, version: int) -> dict[str, Any]:
    """The body of a single key pair."""
    return {"keypair": render(cut(FIELDS, version), row)}


def new(row: Any, version: int, private: str | None) -> dict[str, Any]:
    """The body after making one; the only time that a private key is shown."""
    return {"keypair": render(cut(NEW, version), row, private)}


def many(rows: list[Any], version: int) -> list[dict[str, Any]]:
    """The items of a list."""
    getters = cut(_COMMON, version)
    return [{"keypair": render(getters, row)} for row in rows]
