# SPDX-License-Identifier: Apache-2.0
"""Identifiers. Servers and actions have UUIDs, requests have ``req-`` and a UUID."""

from __future__ import annotations

import re
import uuid

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
_NUMBER = re.compile(r"[0-9]{1,18}\Z")
_REQUEST = re.compile(r"req-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")


def new() -> str:
    """Return a new random UUID."""
    return str(uuid.uuid4())


def new_request() -> str:
    """Return a new request id, for headers of the API and for instance actions."""
    return "req-" + new()


def is_uuid(text: object) -> bool:
    """Return True if this is a UUID in canonical spelling: lower case, with dashes."""
    return isinstance(text, str) and _UUID.match(text) is not None


def is_request(text: object) -> bool:
    """Return True if this is a well-formed request id."""
    return isinstance(text, str) and _REQUEST.match(text) is not None


def spells_uuid(text: str) -> bool:
    """Return True if the text is a UUID in any spelling: with or without dashes, in any case."""
    try:
        return str(uuid.UUID(text)).replace("-", "") == text.replace("-", "").lower()
    except ValueError:
        return False


def spellings(text: str) -> tuple[str, str]:
    """Return a UUID in canonical spelling, and in lower case without dashes.

    Raises:
        ValueError: The text is no UUID.
    """
    parsed = uuid.UUID(text)
    return str(parsed), parsed.hex


def number(text: str) -> int | None:
    """Parse a row number. Return None if the text is not a number of at most 18 digits."""
    return int(text) if _NUMBER.match(text) else None
