# SPDX-License-Identifier: Apache-2.0
"""Other spellings of an operation's path that a router may accept as the same path."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

PROJECT = "0123456789abcdef0123456789abcdef"


def disguises(path: str) -> Iterator[str]:
    """Yield the path and then each other spelling of the path.

    Args:
        path: For example "/v2.1/servers". The first part is the root of the service's API, or the
            resource.
    """
    query = path[path.index("?") :] if "?" in path else ""
    path = path.removesuffix(query)
    root, slash, rest = path.lstrip("/").partition("/")
    for spelling in (
        path,
        f"/{path}",
        f"{path}/",
        path.replace("/", "//"),
        path.upper(),
        f"/{root.upper()}{slash}{rest}",
        f"/./{root}/./{rest}",
        f"/versions/../{root}/{rest}",
        f"/{root};version=1{slash}{rest}",
        f"{path};version=1",
        f"{path}.json",
        f"{path}%00",
        path.replace("/", "/%2e/"),
        "/" + path[1:].replace("/", "%2f"),
        "/".join(_encode_first(part) for part in path.split("/")),
        f"/versions{path}",
        f"/{PROJECT}{path}",
        f"/{root}/versions/{rest}",
        f"//{root}//versions//{rest}",
        f"/{root}/VERSIONS/{rest}",
        f"/{root}/{root}/{rest}",
        f"/{root}/{PROJECT}/{rest}",
        f"/{root}/versions/{PROJECT}/{rest}",
        f"/{root}/healthcheck/{rest}",
        f"/v2/{rest}",
        f"/v2/versions/{rest}",
        f"/v2/{PROJECT}/{rest}",
        f"/v2.1/{rest}",
        f"/v3/{rest}",
    ):
        yield spelling + query


def _encode_first(part: str) -> str:
    return f"%{ord(part[0]):02x}{quote(part[1:])}" if part else ""
