# SPDX-License-Identifier: Apache-2.0
"""Microversions of the API, and the paths with a project's id.

A request has the header `OpenStack-API-Version: volume 3.44`, or the version is 3.0. Handlers call
`since(req, 44)`. `require` refuses operations of later versions with 404. Clients older than 3.67
put the project's id behind /v3. The id is removed from the path before the routing.
"""

import re

import falcon

from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.web import answer

MAXIMUM = 70
HEADER = "OpenStack-API-Version"
NUMBER = re.compile(r"3\.(0|[1-9]\d{0,3})")
PROJECT = re.compile(r"/v3/(?P<project>[0-9a-f-]{8,64})(?P<rest>/.*)?")
UPDATED = "2023-08-31T00:00:00Z"


class Microversions:
    """Falcon middleware that stores the requested minor version in `req.context.minor`.

    The authentication must come first.
    """

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.minor = _minor(req.get_header(HEADER) or "")
        resp.set_header(HEADER, f"volume 3.{req.context.minor}")
        resp.set_header("Vary", HEADER)
        req.context.root = f"{req.prefix}/v3"
        match = PROJECT.fullmatch(req.path)
        caller = getattr(req.context, "caller", None)
        if match and caller is not None:
            # The endpoint of an admin's client may contain another project's id.
            if match["project"] != caller.project_id and not caller.is_admin:
                raise fault("BadRequest", why="Malformed request url")
            req.context.root += f"/{match['project']}"
            req.path = f"/v3{match['rest'] or ''}"

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: object, params: object
    ) -> None:
        """Refuse a request with a version below the `minor` of the resource.

        Raises:
            Fault: 404, the version is too old.
        """
        require(req, getattr(resource, "minor", 0))


def _minor(header: str) -> int:
    for word in header.split(","):
        service, _, version = word.strip().partition(" ")
        if service.lower() not in ("volume", "volumev3", "block-storage"):
            continue
        version = version.strip()
        if version == "latest":
            return MAXIMUM
        if not re.fullmatch(r"\d+\.\d+", version):
            why = f"API Version String {version[:20]} is of invalid format. Must be of format"
            raise fault("BadRequest", why=f"{why} MajorNum.MinorNum.")
        match = NUMBER.fullmatch(version)
        if not match or int(match[1]) > MAXIMUM:
            raise fault("NotAcceptable", version=version, minimum="3.0", maximum=f"3.{MAXIMUM}")
        return int(match[1])
    return 0


def since(req: falcon.Request, minor: int) -> bool:
    """Return True if the request's version is 3.`minor` or later."""
    return bool(req.context.minor >= minor)


def require(req: falcon.Request, minor: int) -> None:
    """Refuse a request with a version that is too old for the operation.

    Raises:
        Fault: 404, the request's version is older than 3.`minor`.
    """
    if not since(req, minor):
        raise fault("VersionNotFound", version=f"3.{req.context.minor}")


class VolumeVersions:
    """GET / and GET /v3, open to every client."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.status = falcon.HTTP_300 if req.path == "/" else falcon.HTTP_200
        media = "application/vnd.openstack.volume+json;version=3"
        version = {
            "id": "v3.0",
            "status": "CURRENT",
            "version": f"3.{MAXIMUM}",
            "min_version": "3.0",
            "updated": UPDATED,
            "links": [{"rel": "self", "href": f"{req.prefix}/v3/"}],
            "media-types": [{"base": "application/json", "type": media}],
        }
        answer(resp, {"versions": [version]})


def links(req: falcon.Request, plural: str, key: str) -> list[dict[str, str]]:
    """Return the links "self" and "bookmark" of an object with this id."""
    bare = req.context.root.replace("/v3", "", 1)
    return [
        {"rel": "self", "href": f"{req.context.root}/{plural}/{key}"},
        {"rel": "bookmark", "href": f"{bare}/{plural}/{key}"},
    ]
