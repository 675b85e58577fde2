# SPDX-License-Identifier: Apache-2.0
"""The microversions of placement: 1.N is the number N everywhere behind this module.

What a version changes stands at the thing that changes: a route's ``since`` and ``until``, a schema's, a field's.
"""
from __future__ import annotations

import re

from common import errors

HEADER, SERVICE = "OpenStack-API-Version", "placement"
MIN, MAX = 0, 39
_FORM = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\Z")


def text(version: int) -> str:
    """23 is 1.23."""
    return f"1.{version}"


def chosen(header: str) -> int:
    """The version that a request's header asks for; the lowest when it does not.

    Raises:
        BadRequest: it is no version. NotAcceptable: it is not served.
    """
    wanted = _wanted(header)
    if wanted is None:
        return MIN
    if wanted == "latest":
        return MAX
    match = _FORM.match(wanted)
    if match is None:
        raise errors.BadRequest(f"invalid version string: {wanted[:40]}")
    if match[1] != "1" or len(match[2]) > 4 or int(match[2]) > MAX:
        raise errors.NotAcceptable(f"Unacceptable version header: {wanted[:40]}")
    return int(match[2])


def _wanted(header: str) -> str | None:
    for item in header.split(","):
        service, _, version = item.strip().partition(" ")
        if service.lower() == SERVICE:
            return version.strip().lower()
    return None
