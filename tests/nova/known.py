# SPDX-License-Identifier: Apache-2.0
"""Where Kilonova and Nova's schemas do not agree, and why. What is no longer true here fails a
test.

docs/differences.md has for readers what of it is on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: (operation, place in the answer): why it is not as the schema has it.
ANSWERS: dict[tuple[str, str], str] = {
    (
        "POST /os-server-external-events",
        "status",
    ): "207 when not every event was taken: so does Nova's code, past its declaration",
    (
        "POST /servers/{id}/action addFloatingIp",
        "status",
    ): "202: so does Nova's code, past its declaration",
    (
        "POST /servers/{id}/action removeFloatingIp",
        "status",
    ): "202: so does Nova's code, past its declaration",
    (
        "PUT /servers/{server_id}/tags/{id}",
        "status",
    ): "201 for a tag that is new: so does Nova's code, undeclared",
    (
        "POST /servers/{server_id}/os-interface",
        "status",
    ): "202 without a body when the guest has not got the interface in the time that the API waits; Nova waits longer",
    (
        "POST /servers/{server_id}/os-volume_attachments",
        "status",
    ): "202 since 2.101: so that version says, past its declaration",
    (
        "GET /os-console-auth-tokens/{id}",
        "console/internal_access_path",
    ): "the secret that opens the host's relay; the schema only knows a path that is a UUID, of one hypervisor",
    (
        "GET /os-server-groups/{id}",
        "server_group/policies/*",
    ): "a group with a policy of a later version is shown as it is, as Nova's code does",
    (
        "GET /os-server-groups",
        "server_groups/*/policies/*",
    ): "a group with a policy of a later version is shown as it is, as Nova's code does",
}

#: Paths that are Kilonova's own: their policies are kilonova:….
OWN = ("/os-services/{service_id}/actions", "/os-services/{service_id}/actions/{action_id}")


@dataclass(frozen=True)
class Known:
    """Requests that one of the two takes, and the other does not.

    ``operations``, ``place``: expressions for the whole of an operation's title, and of the place
    in the body or query.
    ``what``: does this value make the difference? ``ours``: it is we who take it, not Nova.
    """

    operations: str
    place: str
    what: Callable[[Any], bool]
    reason: str
    ours: bool = False

    def covers(self, operation: str, place: str, piece: Any, ours: bool) -> bool:
        return bool(
            self.ours is ours
            and re.fullmatch(self.operations, operation)
            and re.fullmatch(self.place, place)
            and self.what(piece)
        )


def anything(piece: Any) -> bool:
    return True


def longer(most: int) -> Callable[[Any], bool]:
    return lambda piece: isinstance(piece, (str, list)) and len(piece) > most


def no_id(piece: Any) -> bool:
    return not 0 < len(piece) <= 255


def no_name(piece: Any) -> bool:
    return piece != piece.strip() or not piece.isprintable()


def unprintable(piece: Any) -> bool:
    return not piece.isprintable()


def no_place(piece: Any) -> bool:
    return re.fullmatch("[a-zA-Z0-9._-]{1,255}", piece) is None


def in_braces(piece: Any) -> bool:
    return isinstance(piece, str) and piece.startswith("{")


def large(piece: Any) -> bool:
    return int(piece) > 2**31 - 1


def costly(piece: Any) -> bool:
    return piece == "(?=x)" or len(piece) > 255


def no_expression(piece: Any) -> bool:
    return piece in ("(", "*", "[a-")


def with_colon(piece: Any) -> bool:
    return ":" in piece


def unknown_parameter(piece: Any) -> bool:
    return bool(piece == {"x-unknown": ["x"]})


_SERVERS = "/(servers|os-volumes_boot)"
_UNASKED = "(POST|PUT|DELETE) .*|GET /servers/{server_id}/tags.*"
REQUESTS: tuple[Known, ...] = (
    Known(
        ".*",
        ".*",
        in_braces,
        "nobody has a UUID that is written so; here it is told as what is wrong",
    ),
    Known(
        f"POST {_SERVERS}.*",
        ".*/adminPass",
        longer(255),
        "a password is kept sealed until it is used: bounded",
    ),
    Known(f"POST {_SERVERS}.*", ".*/flavorRef", longer(255), "longer than any flavor's id"),
    Known(f"POST {_SERVERS}", ".*/boot_index", large, "numbers have 32 bits"),
    Known(
        f"POST {_SERVERS}/{{id}}/action rebuild",
        "/rebuild/key_name",
        no_name,
        "no key pair has such a name: 400 either way, here by the schema",
    ),
    Known(
        ".*",
        ".*/(tag|tags/[*])",
        unprintable,
        "shown in terminals and logs, as names are, which have no control characters either",
    ),
    Known(
        "POST /servers/{id}/action unshelve",
        "/unshelve/(availability_zone|host)",
        no_place,
        "no zone and no host has such a name: 400 either way, here by the schema",
    ),
    Known(
        "POST /servers/{id}/action createBackup",
        "/createBackup/backup_type",
        longer(255),
        "kept: bounded",
    ),
    Known(
        "POST /servers/{id}/action createBackup",
        "/createBackup/rotation",
        large,
        "numbers have 32 bits",
    ),
    Known(
        "POST /servers/{id}/action os-getConsoleOutput", ".*/length", large, "numbers have 32 bits"
    ),
    Known(
        "POST /os-(volumes|snapshots)",
        ".*",
        longer(255),
        "longer than the block storage service takes them",
    ),
    Known("POST /os-server-groups", ".*/max_server_per_host", large, "numbers have 32 bits"),
    Known(
        "POST /os-aggregates/{id}/images",
        "/cache",
        longer(100),
        "a request names a hundred images at most",
    ),
    Known(
        "POST /os-keypairs",
        "/keypair/public_key",
        longer(16384),
        "kept: bounded; the longest RSA key has 3 KiB",
    ),
    Known("POST /os-keypairs", "/keypair/user_id", no_id, "no user has such an id"),
    Known(
        f"GET ({_SERVERS}|/flavors)(/detail)?",
        "/[a-z0-9_-]+/[*]",
        costly,
        "an expression that could keep the database busy",
    ),
    Known(
        "GET /flavors(/detail)?",
        "/name/[*]",
        no_expression,
        "400 instead of what the database would say to it",
    ),
    Known(
        _UNASKED,
        "",
        unknown_parameter,
        "refused everywhere since 2.102, as that version says; Nova has no schema for queries of these",
    ),
    Known(
        "GET /limits",
        "/reserved(/[*])?",
        anything,
        ours=True,
        reason="it is documented, and clients have an option for it; Nova's schema has forgotten it since 2.75",
    ),
    Known(
        "(POST|PUT) /os-aggregates(/{id})?",
        "/aggregate/availability_zone",
        with_colon,
        ours=True,
        reason="refused by the handler, which says what is wrong with a ':'",
    ),
    Known(
        "PUT /servers/{server_id}/tags/{id}", "", anything, ours=True, reason="its body is not read"
    ),
    Known(
        "POST /os-baremetal-nodes", "", anything, ours=True, reason="refused in any case, unread"
    ),
)
#: Operations that Nova serves and we do not yet, and why.
ABSENT: dict[str, str] = {
    "GET /os-baremetal-nodes": "a proxy to a service for machines without hypervisors, gone since 2.36",
    "GET /os-baremetal-nodes/{id}": "a proxy to a service for machines without hypervisors, gone since 2.36",
    "GET /": "a route of its own, beside the table: versions.Document",
    "GET /versions/{id}": "a route of its own, beside the table: versions.Document",
}
