# SPDX-License-Identifier: Apache-2.0
"""Key pairs in responses."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.store.rows import KeypairRow
from compute_api.compute.views.fields import OMITTED, Field, render_readable, visible_fields
from compute_api.compute.views.times import format_micros

_COMMON: tuple[Field, ...] = (
    Field("name", "name"),
    Field("public_key", "public_key"),
    Field("fingerprint", "fingerprint"),
    Field("type", "type", since="2.2"),
)
NEW: tuple[Field, ...] = (
    *_COMMON,
    Field("user_id", "user_id"),
    Field("private_key", lambda row, view: view or OMITTED, optional=True),
)
FIELDS: tuple[Field, ...] = (
    *_COMMON,
    Field("user_id", "user_id"),
    Field("id", "id"),
    Field("created_at", lambda row, view: format_micros(row.created_at)),
    Field("updated_at", lambda row, view: None),
    Field("deleted", lambda row, view: False),
    Field("deleted_at", lambda row, view: None),
)


def one(row: KeypairRow, version: int) -> JsonObject:
    """Return the body of a single key pair."""
    return {"keypair": render_readable(visible_fields(FIELDS, version), row)}


def new(row: KeypairRow, version: int, private: str | None) -> JsonObject:
    """Return the response to a create, the only body that may contain the private key.

    Args:
        row: The key pair.
        version: The microversion of the request.
        private: The generated private key, or None for an imported public key.
    """
    return {"keypair": render_readable(visible_fields(NEW, version), row, private)}


def many(rows: list[KeypairRow], version: int) -> list[JsonObject]:
    """Return the items of a list of key pairs."""
    getters = visible_fields(_COMMON, version)
    return [{"keypair": render_readable(getters, row)} for row in rows]
