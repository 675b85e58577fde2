# SPDX-License-Identifier: Apache-2.0
"""The client of the shared file system service (Manila v2): shares and their access rules.

The API reads a share with the user's token before it accepts a request. The conductor creates and
deletes access rules with Kilonova's own token. Rules have the locks of version 2.82, so that no
tenant sees a host's address in a rule, or deletes the rule of a running server. A service that does
not answer is Unavailable. A definite refusal is another Problem with the service's message.
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
#: States of a rule: in force, failed, and being deleted.
ACTIVE, FAILED, GOING = "active", "error", ("queued_to_deny", "denying")
#: The optional end of an endpoint in a catalogue. Since 2.60 the project is not needed.
_VERSION_AND_PROJECT = re.compile("/v2(/[^/]*)?$")
#: Requested number of locks per page.
PAGE = 1000
IP, READ_WRITE, REASON = "ip", "rw", "A server has the share; detach it there."


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the shared file system service.

    Attributes:
        export_location: The address at which hosts mount the share, or None if the service has not
            exported the share yet.
    """

    id: str
    status: str
    protocol: str
    export_location: str | None


@dataclass
class ShareClient(OptionalService):
    """The client of the shared file system service. Thread-safe.

    Every call raises Unavailable if the cloud has no such service or if it does not answer,
    Unauthorized if the service does not accept the token, and Conflict if its API is too old.
    """

    service_name, section = NAME, "share"

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    def share(self, token: str, share_id: str) -> Share:
        """Return a share with its preferred export location, or else with the first.

        Locations for admins only are left out.

        Raises:
            NotFound: The share does not exist, or the token may not see it.
        """
        path = f"/shares/{quote(share_id, safe='')}"
        record = self._json("GET", path, token)["share"]
        locations = self._json("GET", f"{path}/export_locations", token)["export_locations"]
        ordered = sorted(
            (location for location in locations if not location.get("is_admin_only")),
            key=lambda location: not location.get("preferred"),
        )
        return Share(
            str(record["id"]),
            str(record["status"]),
            str(record["share_proto"]),
            str(ordered[0]["path"]) if ordered else None,
        )

    def rules(self, token: str, share_id: str, access_to: str) -> list[JsonObject]:
        """Return the share's rules for this address: the rule in force, then those being deleted.

        The service has at most one rule in force for an address.
        """
        rules = self._json(
            "GET", f"/share-access-rules?share_id={quote(share_id, safe='')}", token
        )["access_list"]
        own = [
            rule for rule in rules if (rule["access_type"], rule["access_to"]) == (IP, access_to)
        ]
        return sorted(own, key=lambda rule: rule["state"] in GOING)

    def allow(self, token: str, share_id: str, access_to: str) -> str:
        """Create a rule that lets an address read and write the share, unless a rule exists.

        Returns:
            The state of the new or existing rule: ``ACTIVE`` when the address can mount the share,
            ``FAILED``, or another state until the service has applied the rule. A state in
            ``GOING`` means that the service still deletes an older rule, so no rule was created.

        Raises:
            NotFound: The share does not exist.
            BadRequest, Forbidden, Conflict: The service refuses.
        """
        existing = self.rules(token, share_id, access_to)
        if existing:
            return str(existing[0]["state"])
        values = {
            "access_type": IP,
            "access_to": access_to,
            "access_level": READ_WRITE,
            "lock_visibility": True,
            "lock_deletion": True,
            "lock_reason": REASON,
        }
        try:
            rule = self._act(token, share_id, {"allow_access": values})["access"]
        except (errors.BadRequest, errors.Conflict):
            # Another process may have created the rule first.
            existing = self.rules(token, share_id, access_to)
            if not existing:
                raise
            return str(existing[0]["state"])
        return str(rule.get("state") or "queued_to_apply")

    def deny(self, token: str, share_id: str, access_to: str) -> None:
        """Start to delete the rules for this address. A missing rule or share is no error.

        The service continues after this call. A rule that is being deleted already is left alone.

        Raises:
            BadRequest, Forbidden, Conflict: The service refuses.
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
        """Return all rules with Kilonova's locks, with their share_id, access_to and state.

        Rules of other clouds that use the same service with Kilonova are included. This sends a
        request per page of locks, a last one for the empty page, and one per rule, because locks do
        not name the share.
        """
        rule_ids = {str(lock["resource_id"]) for lock in self._locks(token)}
        rules: list[JsonObject] = []
        for rule_id in sorted(rule_ids):
            with suppress(errors.NotFound):  # The rule was deleted meanwhile.
                path = f"/share-access-rules/{quote(rule_id, safe='')}"
                rules.append(self._json("GET", path, token)["access"])
        return rules

    def _locks(self, token: str) -> Iterator[JsonObject]:
        """Yield the locks of access rules whose reason is ``REASON``, in all projects.

        A page may be shorter than requested, because the service has its own limit
        (osapi_max_limit). So only an empty page is the last one.
        """
        filters = {
            "resource_type": "access_rule",
            "lock_reason": REASON,
            "all_projects": "true",
            "sort_key": "id",
            "limit": PAGE,
        }
        offset = 0
        while True:
            query = urlencode({**filters, "offset": offset})
            locks = self._json("GET", f"/resource-locks?{query}", token)["resource_locks"]
            if not locks:
                return
            yield from locks
            offset += len(locks)

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
