# SPDX-License-Identifier: Apache-2.0
"""Microversions as all services have them: 2.53 is the number 53 everywhere behind the headers.

Each service keeps its own list, limits and texts (``compute.microversions``,
``placement.microversions``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "OpenStack-API-Version"
#: At most four digits: a version is never as long, and int() refuses thousands.
_FORM = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})\Z")
_DIGITS = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\Z")
_FIRST = "0.0"


def number(version: str) -> int:
    """2.53 is 53."""
    return int(version.partition(".")[2])


@dataclass(frozen=True, slots=True)
class Range:
    """From ``since`` to ``until``, both included; without ``since`` from the first version, without
    ``until`` to the last."""

    since: str = _FIRST
    until: str | None = None

    def __contains__(self, version: object) -> bool:
        return (
            isinstance(version, int)
            and number(self.since) <= version
            and (self.until is None or version <= number(self.until))
        )


def requested(
    headers: Mapping[str, str], service: str, older_header: str | None = None
) -> str | None:
    """The version that the headers ask of a service, in lower case; None: they ask for none.

    Args:
        headers: by their names in capitals.
        older_header: the name of the service's own header, from before there was one for several
        services.
    """
    for item in headers.get(HEADER.upper(), "").split(","):
        name, _, version = item.strip().partition(" ")
        if name.lower() == service:
            return version.strip().lower()
    older = headers.get(older_header.upper()) if older_header else None
    return older.strip().lower() if older else None


def is_version(text: str) -> bool:
    """Has it the form of a version?"""
    return _DIGITS.match(text) is not None


def parsed(text: str) -> tuple[int, int] | None:
    """Major and minor number; None: no service has such a version."""
    match = _FORM.match(text)
    return (int(match[1]), int(match[2])) if match else None
