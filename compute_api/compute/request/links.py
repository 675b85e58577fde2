# SPDX-License-Identifier: Apache-2.0
"""Links to resources in responses, with the address that the client used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode


@dataclass(frozen=True, slots=True)
class Links:
    """The parts of links that depend on the request."""

    #: Scheme, host and prefix, without a slash at the end.
    base: str
    #: The root of the request: v2.1 or v2.
    version: str = "v2.1"
    #: The project in the URL of the request, or "".
    project: str = ""

    @property
    def legacy(self) -> bool:
        """True for requests below /v2, in which unknown keys of the body are ignored."""
        return self.version == "v2"

    @property
    def root(self) -> str:
        """The beginning of links with a version, for example "https://cloud.example/v2.1/"."""
        return f"{self.base}/{self.version}/{self.project}{'/' if self.project else ''}"

    @property
    def bookmark_root(self) -> str:
        """The beginning of links without a version, for example "https://cloud.example/"."""
        return f"{self.base}/{self.project}{'/' if self.project else ''}"

    def of(self, collection: str, ident: str) -> list[dict[str, str]]:
        """Return the self link and the bookmark link of a resource.

        The resource has the id ``ident`` in ``collection``, for example "servers".
        """
        path = f"{collection}/{quote(ident, safe='')}"
        return [{"rel": "self", "href": self.root + path}, self.bookmark(collection, ident)]

    def bookmark(self, collection: str, ident: str) -> dict[str, str]:
        """Return the bookmark link of a resource, which has no version."""
        return {
            "rel": "bookmark",
            "href": f"{self.bookmark_root}{collection}/{quote(ident, safe='')}",
        }

    def next(self, path: str, query: Mapping[str, list[str]], marker: str) -> list[dict[str, str]]:
        """Return the link to the next page of a list, as the only item of a list.

        Args:
            path: Path of the list below the versioned root.
            query: The query parameters of this request, which the link repeats except for marker.
            marker: Id of the last item of this page, the new marker.
        """
        pairs = [
            (name, value) for name, values in query.items() if name != "marker" for value in values
        ]
        return [
            {"rel": "next", "href": f"{self.root}{path}?{urlencode([*pairs, ('marker', marker)])}"}
        ]
