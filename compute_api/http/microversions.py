# SPDX-License-Identifier: Apache-2.0
"""Microversions of all services. The number 53 stands for 2.53 in all other modules.

Each service has its own history, limits and texts (``compute.request.microversions``,
``placement.microversions``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "OpenStack-API-Version"
#: Each number has at most four digits. int() rejects texts with thousands of digits.
_FORM = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})\Z")
_DIGITS = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\Z")
_FIRST = "0.0"


def number(version: str) -> int:
    """Return the minor number of a version, for example 53 of "2.53"."""
    return int(version.partition(".")[2])


@dataclass(frozen=True, slots=True)
class Range:
    """The versions from ``since`` to ``until``, both included. None means no upper limit."""

    since: str = _FIRST
    until: str | None = None

    def __contains__(self, version: object) -> bool:
        return (
            isinstance(version, int)
            and number(self.since) <= version
            and (self.until is None or version <= number(self.until))
        )


def find_version(
    headers: Mapping[str, str], service: str, older_header: str | None = None
) -> str | None:
    """Return the requested version of a service in lower case, or None if no header has one.

    The text is not validated. For example, the text may be "latest" or empty. The header
    OpenStack-API-Version has priority over the legacy header.

    Args:
        headers: The headers, with names in upper case.
        service: Name of the service in OpenStack-API-Version, in lower case.
        older_header: Name of the service's own legacy header, or None.
    """
    for item in headers.get(HEADER.upper(), "").split(","):
        name, _, version = item.strip().partition(" ")
        if name.lower() == service:
            return version.strip().lower()
    older = headers.get(older_header.upper()) if older_header else None
    return older.strip().lower() if older else None


def is_version(text: str) -> bool:
    """Return True if the text is two numbers without leading zeros, joined by a dot."""
    return _DIGITS.match(text) is not None


def parse(text: str) -> tuple[int, int] | None:
    """Return major and minor number of a version.

    Return None if the text has another form, or a number has a leading zero or more than four
    digits.
    """
    match = _FORM.match(text)
    return (int(match[1]), int(match[2])) if match else None
