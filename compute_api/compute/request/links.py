# SPDX-License-Identifier: Apache-2.0
"""Links: where a thing is, as the client reached us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode


@dataclass(frozen=True, slots=True)
class Links:
    """base: scheme, host and prefix, without a slash at the end. version: v2.1 or v2. project: as
    in the URL of the request, or ''."""

    base: str
    version: str = "v2.1"
    project: str = ""

    @property
    def legacy(self) -> bool:
        """Did the client ask below /v2, where unknown keys are dropped instead of refused?"""
        return self.version == "v2"

    @property
    def root(self) -> str:
        """What the versioned links of this request begin with."""
        return f"{self.base}/{self.version}/{self.project}{'/' if self.project else ''}"

    @property
    def bookmark_root(self) -> str:
        """What the unversioned ones begin with."""
        return f"{self.base}/{self.project}{'/' if self.project else ''}"

    def of(self, collection: str, ident: str) -> list[dict[str, str]]:
        """The self and bookmark links of a thing."""
        path = f"{collection}/{quote(ident, safe='')}"
        return [{"rel": "self", "href": self.root + path}, self.bookmark(collection, ident)]

    def bookmark(self, collection: str, ident: str) -> dict[str, str]:
        """The unversioned link alone."""
        return {
            "rel": "bookmark",
            "href": f"{self.bookmark_root}{collection}/{quote(ident, safe='')}",
        }

    def next(self, path: str, query: Mapping[str, list[str]], marker: str) -> list[dict[str, str]]:
        """The link to the page after this one."""
        pairs = [
            (name, value) for name, values in query.items() if name != "marker" for value in values
        ]
        return [
            {"rel": "next", "href": f"{self.root}{path}?{urlencode([*pairs, ('marker', marker)])}"}
        ]
