# SPDX-License-Identifier: Apache-2.0
"""Identifiers: servers and actions are UUIDs, requests are ``req-`` and a UUID."""

from __future__ import annotations

import re
import uuid

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_REQUEST = re.compile(r"req-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")


def new() -> str:
    """A new random UUID."""
    return str(uuid.uuid4())


def new_request() -> str:
    """A new request id, as the API's headers and instance actions carry it."""
    return "req-" + new()


def is_uuid(text: object) -> bool:
    """Is it a UUID in the one spelling that we write ourselves?"""
    return isinstance(text, str) and _UUID.match(text) is not None


def is_request(text: object) -> bool:
    """Is it a well-formed request id?"""
    return isinstance(text, str) and _REQUEST.match(text) is not None


def spells_uuid(text: str) -> bool:
    """Is it a UUID as people write them: with or without dashes, in any case?"""
    try:
        return str(uuid.UUID(text)).replace("-", "") == text.replace("-", "").lower()
    except ValueError:
        return False


def spellings(text: str) -> tuple[str, str]:
    """Of what spells a UUID: with dashes, as we write it ourselves, and without."""
    found = uuid.UUID(text)
    return str(found), found.hex


def number(text: str) -> int | None:
    """The number of a row that a path or a query names, in ASCII digits; None: no row has such a
    number."""
    return int(text) if _NUMBER.match(text) else None
