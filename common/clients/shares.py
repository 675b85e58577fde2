# SPDX-License-Identifier: Apache-2.0
"""The shared file system service (Manila v2), over HTTP only: a share, and who may mount it.

The API looks at a share with the user's token before it accepts a request; the conductor lets hosts
mount it, and takes that back, with Kilonova's own. Rules are made with the locks of 2.82: no tenant
sees a host's address in them, or removes one under a server that runs. A service that does not
answer is Unavailable; what it refuses for good is another Problem, in the service's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from common.clients.http import Http, OptionalService, document, refusal_of
from common.domain import errors
from common.domain.json_types import JsonObject

NAME = "shared file system service"
#: The first version in which a rule can be locked.
VERSION = "2.82"
NEEDS = f"{VERSION} of its API, which shares of servers need"
#: States of a rule: it counts; it never will; it is on its way out, or on its way in.
ACTIVE, FAILED, GOING = "active", "error", ("queued_to_deny", "denying")
#: How an endpoint in a catalogue may end; the service asks for no project there since 2.60.
_VERSION_AND_PROJECT = re.compile("/v2(/[^/]*)?$")
PAGE = 1000  #: locks in one answer
IP, READ_WRITE, REASON = "ip", "rw", "A server has the share; detach it there."


@dataclass(frozen=True, slots=True)
class Share:
    """A share as the service tells it; ``export_location``: where it is mounted from, None where it
    is nowhere yet."""

    id: str
    status: str
    protocol: str
    export_location: str | None


@dataclass
class ShareClient(OptionalService):
    """One process's way to the service. Thread-safe."""

    service_name, section = NAME, "share"

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    def share(self, token: str, share_id: str) -> Share:
        """One share, and the location that its owner prefers.

        Raises:
            NotFound: there is none that the token may see.
        """
        path = f"/shares/{quote(share_id, safe='')}"
        found = self._json("GET", path, token)["share"]
        locations = self._json("GET", f"{path}/export_locations", token)["export_locations"]
        ordered = sorted(
            (one for one in locations if not one.get("is_admin_only")),
            key=lambda one: not one.get("preferred"),
        )
        return Share(
            str(found["id"]),
            str(found["status"]),
            str(found["share_proto"]),
            str(ordered[0]["path"]) if ordered else None,
        )

    def rules(self, token: str, share_id: str, access_to: str) -> list[JsonObject]:
        """The share's rules for this address; there is at most one that is not on its way out."""
        found = self._json(
            "GET", f"/share-access-rules?share_id={quote(share_id, safe='')}", token
        )["access_list"]
        return [one for one in found if (one["access_type"], one["access_to"]) == (IP, access_to)]

    def allow(self, token: str, share_id: str, access_to: str) -> str:
        """Let this address read and write the share; what is so already stays. Returns the state of
        the rule.

        Raises:
            NotFound: the share is gone. BadRequest, Forbidden, Conflict: the service refuses.
        """
        there = self.rules(token, share_id, access_to)
        if there:
            return str(there[0]["state"])
        wanted = {
            "access_type": IP,
            "access_to": access_to,
            "access_level": READ_WRITE,
            "lock_visibility": True,
            "lock_deletion": True,
            "lock_reason": REASON,
        }
        try:
            made = self._act(token, share_id, {"allow_access": wanted})["access"]
        except (errors.BadRequest, errors.Conflict):
            # somebody else was quicker: that is no refusal
            there = self.rules(token, share_id, access_to)
            if not there:
                raise
            return str(there[0]["state"])
        return str(made.get("state") or "queued_to_apply")

    def deny(self, token: str, share_id: str, access_to: str) -> None:
        """Take the rule for this address back; one that is gone, or whose share is, is fine.

        Raises:
            BadRequest, Forbidden, Conflict: the service refuses.
        """
        try:
            for rule in self.rules(token, share_id, access_to):
                if rule["state"] not in GOING:
                    self._act(
                        token,
                        share_id,
                        {"deny_access": {"access_id": rule["id"], "unrestrict": True}},
                    )
        except errors.NotFound:
            return

    def own_rules(self, token: str) -> list[JsonObject]:
        """All rules that are locked as ours are, with their share_id, access_to and state: those
        of every cloud that uses the service as this one does. A request for a thousand locks, which
        name no share, and one for each rule."""
        ours = {str(lock["resource_id"]) for lock in self._locks(token)}
        found: list[JsonObject] = []
        for rule in sorted(ours):
            with suppress(errors.NotFound):  # it has gone meanwhile
                path = f"/share-access-rules/{quote(rule, safe='')}"
                found.append(self._json("GET", path, token)["access"])
        return found

    def _locks(self, token: str) -> Iterator[JsonObject]:
        """The locks that give our reason. An answer may be shorter than what was asked for, which
        the service limits (osapi_max_limit): the last is empty."""
        asked = {
            "resource_type": "access_rule",
            "lock_reason": REASON,
            "all_projects": "true",
            "sort_key": "id",
            "limit": PAGE,
        }
        offset = 0
        while True:
            query = urlencode({**asked, "offset": offset})
            found = self._json("GET", f"/resource-locks?{query}", token)["resource_locks"]
            if not found:
                return
            yield from found
            offset += len(found)

    # --- HTTP ---
    def _url(self) -> str:
        return _VERSION_AND_PROJECT.sub("", self._base()) + "/v2"

    def _act(self, token: str, share_id: str, body: JsonObject) -> JsonObject:
        return self._json("POST", f"/shares/{quote(share_id, safe='')}/action", token, body)

    def _json(
        self, method: str, path: str, token: str, body: JsonObject | None = None
    ) -> JsonObject:
        more: JsonObject = {} if body is None else {"json": body}
        answer = self._http.send(
            method,
            self._http.base() + path,
            token,
            headers={"X-OpenStack-Manila-API-Version": VERSION},
            **more,
        )
        if answer.status_code >= 300:
            raise refusal_of(answer, NAME, NEEDS)
        return document(answer, NAME)
