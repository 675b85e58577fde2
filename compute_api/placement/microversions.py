# SPDX-License-Identifier: Apache-2.0
"""The microversions of placement: 1.N is the number N everywhere behind this module.

What a version changes stands at the thing that changes: a route's ``since`` and ``until``, a
schema's, a field's.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.domain import errors
from compute_api.http.microversions import is_version, parsed, requested

SERVICE = "placement"
MIN, MAX = 0, 39


def text(version: int) -> str:
    """23 is 1.23."""
    return f"1.{version}"


def chosen(headers: Mapping[str, str]) -> int:
    """The version that a request's headers ask for; the lowest when they do not.

    Raises:
        BadRequest: it is no version. NotAcceptable: it is not served.
    """
    wanted = requested(headers, SERVICE)
    if wanted is None:
        return MIN
    if wanted == "latest":
        return MAX
    if not is_version(wanted):
        raise errors.BadRequest(f"invalid version string: {wanted[:40]}")
    major, minor = parsed(wanted) or (0, 0)
    if major != 1 or minor > MAX:
        raise errors.NotAcceptable(f"Unacceptable version header: {wanted[:40]}")
    return minor
