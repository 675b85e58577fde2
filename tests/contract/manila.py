# SPDX-License-Identifier: Apache-2.0
"""A shared file system service over HTTP, as far as servers' shares need it: Manila's API v2 at
version 2.82.

Like the real one it shows a token only what is its project's, and admins everything; hides a locked
rule's address from all but admins; makes one rule for an address; and removes a locked rule only
when told to. A rule is applied some looks after it was asked for. ``trouble``: the status of its
next answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

from common import ids

JSON = dict[str, Any]
LATEST = (2, 82)
REASONS = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    406: "computeFault",
    503: "serviceUnavailable",
}


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Manila:
    """A WSGI application. ``projects``: token -> project, None for an admin."""

    def __init__(self, projects: dict[str, str | None]) -> None:
        self.projects = projects
        self.shares: dict[str, JSON] = {}
        self.locations: dict[str, list[JSON]] = {}
        self.rules: dict[str, JSON] = {}
        self.applies_after, self.fails, self.latest = 0, False, LATEST
        self.trouble: list[int] = []
        self.meanwhile: Callable[[], object] | None = None  # once, after the next list of rules

    def add_share(
        self, project: str, *paths: str, status: str = "available", protocol: str = "NFS"
    ) -> str:
        """A share with these export locations, of which the last is preferred; before them stands
        one for admins."""
        share = ids.new()
        self.shares[share] = {
            "id": share,
            "name": "data",
            "size": 1,
            "status": status,
            "share_proto": protocol,
            "project_id": project,
        }
        self.locations[share] = [
            {
                "id": ids.new(),
                "path": f"198.51.100.1:/admin/{share}",
                "preferred": True,
                "is_admin_only": True,
            },
            *({"id": ids.new(), "path": path, "preferred": path == paths[-1]} for path in paths),
        ]
        return share

    def add_rule(self, share: str, address: str) -> None:
        """Somebody lets this address mount the share."""
        self._allow(
            share,
            {
                "access_type": "ip",
                "access_to": address,
                "access_level": "rw",
                "lock_visibility": True,
                "lock_deletion": True,
            },
        )

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            if self.trouble:
                raise Refused(self.trouble.pop(0), "Not now.")
            status, body = self._answer(environ)
        except Refused as refused:
            status = refused.status
            body = {REASONS.get(status, "computeFault"): {"code": status, "message": str(refused)}}
        content = b"" if body is None else json.dumps(body).encode()
        start(
            f"{status} -",
            [("Content-Type", "application/json"), ("Content-Length", str(len(content)))],
        )
        return [content]

    def _answer(self, environ: WSGIEnvironment) -> tuple[int, JSON | None]:
        token = environ.get("HTTP_X_AUTH_TOKEN", "")
        if token not in self.projects:
            raise Refused(401, "The request you have made requires authentication.")
        version = environ.get("HTTP_X_OPENSTACK_MANILA_API_VERSION", "2.0")
        if tuple(map(int, version.split("."))) > self.latest:
            raise Refused(406, f"Version {version} is not supported by the API.")
        project = self.projects[token]
        match environ["REQUEST_METHOD"], environ["PATH_INFO"].split("/")[1:]:
            case "GET", ["v2", "shares", share]:
                return 200, {"share": self._share(share, project)}
            case "GET", ["v2", "shares", share, "export_locations"]:
                self._share(share, project)
                return 200, {
                    "export_locations": [
                        one
                        if project is None
                        else {key: value for key, value in one.items() if key != "is_admin_only"}
                        for one in self.locations[share]
                        if project is None or not one.get("is_admin_only")
                    ]
                }
            case "GET", ["v2", "share-access-rules"]:
                share = environ["QUERY_STRING"].removeprefix("share_id=")
                self._share(share, project)
                return 200, {"access_list": self._list(share, project)}
            case "POST", ["v2", "shares", share, "action"]:
                self._share(share, project)
                body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                [(what, given)] = body.items()
                return (
                    self._allow(share, given)
                    if what == "allow_access"
                    else self._deny(share, given)
                )
        raise Refused(404, "The resource could not be found.")

    def _share(self, share: str, project: str | None) -> JSON:
        found = self.shares.get(share)
        if found is None or project not in (None, found["project_id"]):
            raise Refused(404, f"Share {share} could not be found.")
        return found

    def _list(self, share: str, project: str | None) -> list[JSON]:
        shown = []
        for rule in self.rules.values():
            if rule["share_id"] != share:
                continue
            if rule["state"] == "applying" and (rule["looks"] <= 0):
                rule["state"] = "error" if self.fails else "active"
            rule["looks"] -= 1
            hidden = (
                {"access_to": "******", "access_key": "******"}
                if project is not None and rule["hidden"]
                else {}
            )
            shown.append(
                {
                    key: value
                    for key, value in {**rule, **hidden}.items()
                    if key not in ("looks", "hidden", "locked")
                }
            )
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()
        return shown

    def _allow(self, share: str, given: JSON) -> tuple[int, JSON]:
        alike = [
            rule
            for rule in self.rules.values()
            if (rule["share_id"], rule["access_to"]) == (share, given["access_to"])
        ]
        if alike:
            raise Refused(400, f"Share access {given['access_type']}:{given['access_to']} exists.")
        rule = {
            "id": ids.new(),
            "share_id": share,
            "access_type": given["access_type"],
            "access_key": None,
            "access_to": given["access_to"],
            "access_level": given["access_level"],
            "state": "applying",
            "looks": self.applies_after,
            "hidden": given["lock_visibility"],
            "locked": given["lock_deletion"],
        }
        self.rules[rule["id"]] = rule
        return 200, {
            "access": {
                key: rule[key]
                for key in (
                    "id",
                    "share_id",
                    "access_type",
                    "access_to",
                    "access_level",
                    "access_key",
                    "state",
                )
            }
        }

    def _deny(self, share: str, given: JSON) -> tuple[int, None]:
        rule = self.rules.get(given["access_id"])
        if rule is None or rule["share_id"] != share:
            raise Refused(404, "The resource could not be found.")
        if rule["locked"] and not given.get("unrestrict"):
            raise Refused(403, "Access rule is locked.")
        del self.rules[rule["id"]]
        return 202, None
