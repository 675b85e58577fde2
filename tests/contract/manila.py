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
from urllib.parse import parse_qsl
from wsgiref.types import StartResponse, WSGIEnvironment

from common.domain import ids

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
        self.most = 1000  # entries of one answer
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
            case "GET", ["v2", "share-access-rules", name]:
                rule = self.rules.get(name)
                if rule is None:
                    raise Refused(404, f"Share access rule {name} not found.")
                self._share(rule["share_id"], project)
                return 200, {"access": _shown(rule, project)}
            case "GET", ["v2", "resource-locks"]:
                asked = dict(parse_qsl(environ["QUERY_STRING"]))
                return 200, {"resource_locks": self._locks(asked, project)}
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
            shown.append(_shown(rule, project, "share_id"))
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()
        return shown

    def _locks(self, asked: dict[str, str], project: str | None) -> list[JSON]:
        """Three of each rule that is hidden and cannot be removed: its share cannot be either. The
        newest first, unless asked for in another order; a lock's project is its maker's, an admin's
        here; what is asked for at most is limited."""
        if project is not None or "all_projects" not in asked:
            return []
        found = [lock for rule in self.rules.values() for lock in rule["locks"]][::-1]
        fields = ("resource_type", "resource_id", "resource_action", "lock_reason")
        found = [
            lock for lock in found if all(lock[key] == asked.get(key, lock[key]) for key in fields)
        ]
        if "sort_key" in asked:
            found.sort(
                key=lambda lock: str(lock[asked["sort_key"]]),
                reverse=asked.get("sort_dir", "desc") == "desc",
            )
        most = min(int(asked.get("limit", self.most)), self.most)
        return found[int(asked.get("offset", 0)) :][:most]

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
        rule["locks"] = _locks_of(rule, given)
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


def _locks_of(rule: JSON, given: JSON) -> list[JSON]:
    kinds = [("access_rule", rule["id"], "show")] if rule["hidden"] else []
    if rule["locked"]:
        kinds += [("access_rule", rule["id"], "delete"), ("share", rule["share_id"], "delete")]
    reason = given.get("lock_reason")
    return [
        {
            "id": ids.new(),
            "resource_type": kind,
            "resource_id": name,
            "resource_action": action,
            "lock_reason": reason if kind == "access_rule" else "Share is locked by a rule's lock.",
        }
        for kind, name, action in kinds
    ]


def _shown(rule: JSON, project: str | None, *left_out: str) -> JSON:
    """As this project sees it; None: an admin."""
    own = {"looks", "hidden", "locked", "locks", *left_out}
    shown = {key: value for key, value in rule.items() if key not in own}
    if project is not None and rule["hidden"]:
        shown |= {"access_to": "******", "access_key": "******"}
    return shown
