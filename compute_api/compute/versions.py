# SPDX-License-Identifier: Apache-2.0
"""The version documents at / and at each root, which need no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import falcon
import orjson

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_api.compute.request import microversions

if TYPE_CHECKING:
    from compute_api.compute.middleware import ComputeHttpRequest

_TYPE = "application/vnd.openstack.compute+json;version=2.1"
_DOCUMENTATION = {
    "rel": "describedby",
    "type": "text/html",
    "href": "https://docs.openstack.org/api-ref/compute/",
}


def _build_version(base: str, root: str) -> JsonObject:
    """Return the entry of a root in the list of versions.

    Args:
        base: Scheme, host and prefix of the link.
        root: v2 or v2.1.
    """
    newest = root == "v2.1"
    return {
        "id": "v2.1" if newest else "v2.0",
        "status": "CURRENT" if newest else "SUPPORTED",
        "version": microversions.text(microversions.MAX) if newest else "",
        "min_version": microversions.text(microversions.MIN) if newest else "",
        "updated": "2013-07-23T11:33:21Z" if newest else "2011-01-21T11:33:21Z",
        "links": [{"rel": "self", "href": f"{base}/{root}/"}],
    }


class VersionList:
    """Answers GET / with the list of versions."""

    def on_get(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
        base = req.context.base
        resp.data = orjson.dumps(
            {"versions": [_build_version(base, "v2"), _build_version(base, "v2.1")]}
        )


class VersionDocument:
    """Answers GET /v2, /v2.1 and /v2.1/versions/{id} with one version."""

    def on_get(
        self, req: ComputeHttpRequest, resp: falcon.Response, version_id: str | None = None
    ) -> None:
        roots = {None: req.context.shown_version, "v2.1": "v2.1", "v2.0": "v2"}
        if version_id not in roots:
            raise errors.NotFound("The resource could not be found.")
        version = _build_version(req.context.base, roots[version_id])
        kind = _TYPE if version["id"] == "v2.1" else _TYPE.replace("2.1", "2")
        version["links"] = [*version["links"], _DOCUMENTATION]
        version["media-types"] = [{"base": "application/json", "type": kind}]
        resp.data = orjson.dumps({"version": version})


def choices(req: ComputeHttpRequest, resp: falcon.Response, **params: str) -> None:
    """Answer a path without a version with 300 and links to that path below /v2 and /v2.1."""
    base = req.context.base
    entries = []
    for root in ("v2", "v2.1"):
        version = _build_version(base, root)
        entries.append(
            {
                "id": version["id"],
                "status": version["status"],
                "links": [{"rel": "self", "href": f"{base}/{root}{req.path}"}],
                "media-types": [{"base": "application/json", "type": _TYPE}],
            }
        )
    resp.status = 300
    resp.data = orjson.dumps({"choices": entries})
