# SPDX-License-Identifier: Apache-2.0
"""Microversions of placement. The number N stands for 1.N in all other modules.

The microversion of a change is stored beside the changed object: in ``since`` and ``until`` of
routes, in schemas, and in constants of handlers.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.domain import errors
from compute_api.http.microversions import find_version, is_version, parse

SERVICE = "placement"
MIN, MAX = 0, 39


def text(version: int) -> str:
    """Return the text of a version. For example, 23 is "1.23"."""
    return f"1.{version}"


def chosen(headers: Mapping[str, str]) -> int:
    """Return the requested version, ``MIN`` without a header, or ``MAX`` for "latest".

    Raises:
        BadRequest: The header has no valid version.
        NotAcceptable: The version is not supported.
    """
    version = find_version(headers, SERVICE)
    if version is None:
        return MIN
    if version == "latest":
        return MAX
    if not is_version(version):
        raise errors.BadRequest(f"invalid version string: {version[:40]}")
    major, minor = parse(version) or (0, 0)
    if major != 1 or minor > MAX:
        raise errors.NotAcceptable(f"Unacceptable version header: {version[:40]}")
    return minor
