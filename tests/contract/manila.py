# SPDX-License-Identifier: Apache-2.0
"""A fake shared file system service over HTTP: the part of Manila's API 2.82 that servers use.

Like Manila, it

* shows a token only the shares of the same project, and admins all,
* shows the address of a locked rule only to admins,
* creates one rule per address, and
* deletes a locked rule only with ``unrestrict``.

A rule is applied after ``applies_after`` lists of rules. ``statuses`` contains the error statuses
of the next answers.
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


class Refusal(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Manila:
    """A WSGI application. ``projects`` maps tokens to projects, and to None for an admin."""

    def __init__(self, projects: dict[str, str | None]) -> None:
        self.projects = projects
        self.shares: dict[str, JSON] = {}
        self.locations: dict[str, list[JSON]] = {}
        self.rules: dict[str, JSON] = {}
        self.applies_after, self.fails, self.latest = 0, False, LATEST
        self.page_size = 1000  # maximum number of entries in an answer
        self.statuses: list[int] = []
        self.meanwhile: Callable[[], object] | None = (
            None  # runs once, after the next list of rules
        )

    def add_share(
        self, project: str, *paths: str, status: str = "available", protocol: str = "NFS"
    ) -> str:
        """Add a share with these export locations and return the share's id.

        The last location is the preferred one. Another location before them is for admins only.
        """
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
        """Add a rule for this address as another user would."""
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
            if self.statuses:
                raise Refusal(self.statuses.pop(0), "Not now.")
            status, body = self._answer(environ)
        except Refusal as refusal:
            status = refusal.status
            body = {REASONS.get(status, "computeFault"): {"code": status, "message": str(refusal)}}
        content = b"" if body is None else json.dumps(body).encode()
        start(
            f"{status} -",
            [("Content-Type", "application/json"), ("Content-Length", str(len(content)))],
        )
        return [content]

    def _answer(self, environ: WSGIEnvironment) -> tuple[int, JSON | None]:
        token = environ.get("HTTP_X_AUTH_TOKEN", "")
        if token not in self.projects:
            raise Refusal(401, "The request you have made requires authentication.")
        version = environ.get("HTTP_X_OPENSTACK_MANILA_API_VERSION", "2.0")
        if tuple(map(int, version.split("."))) > self.latest:
            raise Refusal(406, f"Version {version} is not supported by the API.")
        project = self.projects[token]
        match environ["REQUEST_METHOD"], environ["PATH_INFO"].split("/")[1:]:
            case "GET", ["v2", "shares", share]:
                return 200, {"share": self._share(share, project)}
            case "GET", ["v2", "shares", share, "export_locations"]:
                self._share(share, project)
                return 200, {
                    "export_locations": [
                        location
                        if project is None
                        else {
                            key: value for key, value in location.items() if key != "is_admin_only"
                        }
                        for location in self.locations[share]
                        if project is None or not location.get("is_admin_only")
                    ]
                }
            case "GET", ["v2", "share-access-rules"]:
                share = environ["QUERY_STRING"].removeprefix("share_id=")
                self._share(share, project)
                return 200, {"access_list": self._list(share, project)}
            case "GET", ["v2", "share-access-rules", name]:
                rule = self.rules.get(name)
                if rule is None:
                    raise Refusal(404, f"Share access rule {name} not found.")
                self._share(rule["share_id"], project)
                return 200, {"access": _view_of_rule(rule, project)}
            case "GET", ["v2", "resource-locks"]:
                query = dict(parse_qsl(environ["QUERY_STRING"]))
                return 200, {"resource_locks": self._locks(query, project)}
            case "POST", ["v2", "shares", share, "action"]:
                self._share(share, project)
                body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                [(action, arguments)] = body.items()
                return (
                    self._allow(share, arguments)
                    if action == "allow_access"
                    else self._deny(share, arguments)
                )
        raise Refusal(404, "The resource could not be found.")

    def _share(self, share: str, project: str | None) -> JSON:
        record = self.shares.get(share)
        if record is None or project not in (None, record["project_id"]):
            raise Refusal(404, f"Share {share} could not be found.")
        return record

    def _list(self, share: str, project: str | None) -> list[JSON]:
        rules = []
        for rule in self.rules.values():
            if rule["share_id"] != share:
                continue
            if rule["state"] == "applying" and (rule["looks"] <= 0):
                rule["state"] = "error" if self.fails else "active"
            rule["looks"] -= 1
            rules.append(_view_of_rule(rule, project, "share_id"))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return rules

    def _locks(self, query: dict[str, str], project: str | None) -> list[JSON]:
        """Return the locks of all rules: up to three for each rule, the last of them on the share.

        The newest come first, unless the request has another order. The locks belong to the
        project of their creator, here an admin. ``limit`` and ``page_size`` bound the answer.
        """
        if project is not None or "all_projects" not in query:
            return []
        locks = [lock for rule in self.rules.values() for lock in rule["locks"]][::-1]
        fields = ("resource_type", "resource_id", "resource_action", "lock_reason")
        locks = [
            lock for lock in locks if all(lock[key] == query.get(key, lock[key]) for key in fields)
        ]
        if "sort_key" in query:
            locks.sort(
                key=lambda lock: str(lock[query["sort_key"]]),
                reverse=query.get("sort_dir", "desc") == "desc",
            )
        most = min(int(query.get("limit", self.page_size)), self.page_size)
        return locks[int(query.get("offset", 0)) :][:most]

    def _allow(self, share: str, arguments: JSON) -> tuple[int, JSON]:
        equal_rules = [
            rule
            for rule in self.rules.values()
            if (rule["share_id"], rule["access_to"]) == (share, arguments["access_to"])
        ]
        if equal_rules:
            raise Refusal(
                400, f"Share access {arguments['access_type']}:{arguments['access_to']} exists."
            )
        rule = {
            "id": ids.new(),
            "share_id": share,
            "access_type": arguments["access_type"],
            "access_key": None,
            "access_to": arguments["access_to"],
            "access_level": arguments["access_level"],
            "state": "applying",
            "looks": self.applies_after,
            "hidden": arguments["lock_visibility"],
            "locked": arguments["lock_deletion"],
        }
        rule["locks"] = _locks_of(rule, arguments)
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

    def _deny(self, share: str, arguments: JSON) -> tuple[int, None]:
        rule = self.rules.get(arguments["access_id"])
        if rule is None or rule["share_id"] != share:
            raise Refusal(404, "The resource could not be found.")
        if rule["locked"] and not arguments.get("unrestrict"):
            raise Refusal(403, "Access rule is locked.")
        del self.rules[rule["id"]]
        return 202, None


def _locks_of(rule: JSON, arguments: JSON) -> list[JSON]:
    kinds = [("access_rule", rule["id"], "show")] if rule["hidden"] else []
    if rule["locked"]:
        kinds += [("access_rule", rule["id"], "delete"), ("share", rule["share_id"], "delete")]
    reason = arguments.get("lock_reason")
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


def _view_of_rule(rule: JSON, project: str | None, *left_out: str) -> JSON:
    """Return a rule as this project sees it, or as an admin does (None)."""
    own = {"looks", "hidden", "locked", "locks", *left_out}
    visible = {key: value for key, value in rule.items() if key not in own}
    if project is not None and rule["hidden"]:
        visible |= {"access_to": "******", "access_key": "******"}
    return visible
