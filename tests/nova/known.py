# SPDX-License-Identifier: Apache-2.0
"""The known differences between Kilonova and Nova's schemas, with their reasons.

An entry without an actual difference fails a test. docs/differences.md lists the intended
differences for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: (operation, place in the answer) -> the reason of the difference.
ANSWERS: dict[tuple[str, str], str] = {
    (
        "POST /os-server-external-events",
        "status",
    ): "207 if an event is refused, like Nova's code, which does not declare this status",
    (
        "POST /servers/{id}/action addFloatingIp",
        "status",
    ): "202, like Nova's code, which does not declare this status",
    (
        "POST /servers/{id}/action removeFloatingIp",
        "status",
    ): "202, like Nova's code, which does not declare this status",
    (
        "PUT /servers/{server_id}/tags/{id}",
        "status",
    ): "201 for a new tag, like Nova's code, which does not declare this status",
    (
        "POST /servers/{server_id}/os-interface",
        "status",
    ): "202 without a body if the guest has no interface within the API's timeout, while Nova waits longer",
    (
        "POST /servers/{server_id}/os-volume_attachments",
        "status",
    ): "202 since 2.101, as documented for that version and not declared",
    (
        "GET /os-console-auth-tokens/{id}",
        "console/internal_access_path",
    ): "the secret for the host's relay, while the schema permits only a UUID, the path of another hypervisor",
    (
        "GET /os-server-groups/{id}",
        "server_group/policies/*",
    ): "the stored policy, even if a later version added this policy, like Nova's code",
    (
        "GET /os-server-groups",
        "server_groups/*/policies/*",
    ): "the stored policy, even if a later version added this policy, like Nova's code",
}

#: Paths of Kilonova's extensions, whose policy rules begin with "kilonova:".
OWN = ("/os-services/{service_id}/actions", "/os-services/{service_id}/actions/{action_id}")


@dataclass(frozen=True)
class KnownDifference:
    """A class of requests that either Nova or Kilonova accepts, and the other refuses.

    Attributes:
        operations: Regular expression for the whole title of an operation.
        place: Regular expression for the whole place in the body or query.
        matches: Returns True if the value at this place causes the difference.
        reason: Reason of the difference.
        ours: True if Kilonova accepts the request and Nova refuses it.
    """

    operations: str
    place: str
    matches: Callable[[Any], bool]
    reason: str
    ours: bool = False

    def covers(self, operation: str, place: str, piece: Any, ours: bool) -> bool:
        """Return True if this entry explains the difference at one value."""
        return bool(
            self.ours is ours
            and re.fullmatch(self.operations, operation)
            and re.fullmatch(self.place, place)
            and self.matches(piece)
        )


def is_any(piece: Any) -> bool:
    return True


def is_longer_than(limit: int) -> Callable[[Any], bool]:
    return lambda piece: isinstance(piece, (str, list)) and len(piece) > limit


def is_invalid_id(piece: Any) -> bool:
    return not 0 < len(piece) <= 255


def is_invalid_name(piece: Any) -> bool:
    return piece != piece.strip() or not piece.isprintable()


def is_unprintable(piece: Any) -> bool:
    return not piece.isprintable()


def is_invalid_zone_or_host(piece: Any) -> bool:
    return re.fullmatch("[a-zA-Z0-9._-]{1,255}", piece) is None


def is_in_braces(piece: Any) -> bool:
    return isinstance(piece, str) and piece.startswith("{")


def is_above_32_bits(piece: Any) -> bool:
    return int(piece) > 2**31 - 1


def is_costly_expression(piece: Any) -> bool:
    return piece == "(?=x)" or len(piece) > 255


def is_invalid_expression(piece: Any) -> bool:
    return piece in ("(", "*", "[a-")


def has_colon(piece: Any) -> bool:
    return ":" in piece


def is_unknown_parameter(piece: Any) -> bool:
    return bool(piece == {"x-unknown": ["x"]})


_SERVERS = "/(servers|os-volumes_boot)"
_WITHOUT_QUERY_SCHEMA = "(POST|PUT|DELETE) .*|GET /servers/{server_id}/tags.*"
REQUESTS: tuple[KnownDifference, ...] = (
    KnownDifference(
        ".*",
        ".*",
        is_in_braces,
        "no resource has a UUID in braces, so the schema refuses the value with a clear error",
    ),
    KnownDifference(
        f"POST {_SERVERS}.*",
        ".*/adminPass",
        is_longer_than(255),
        "the database stores the sealed password until use, so the length has a limit",
    ),
    KnownDifference(
        f"POST {_SERVERS}.*",
        ".*/flavorRef",
        is_longer_than(255),
        "longer than any flavor's id",
    ),
    KnownDifference(f"POST {_SERVERS}", ".*/boot_index", is_above_32_bits, "integers have 32 bits"),
    KnownDifference(
        f"POST {_SERVERS}/{{id}}/action rebuild",
        "/rebuild/key_name",
        is_invalid_name,
        "no key pair has such a name. Both answer 400, and Kilonova already by the schema",
    ),
    KnownDifference(
        ".*",
        ".*/(tag|tags/[*])",
        is_unprintable,
        "terminals and logs show tags, so tags have no control characters, like names",
    ),
    KnownDifference(
        "POST /servers/{id}/action unshelve",
        "/unshelve/(availability_zone|host)",
        is_invalid_zone_or_host,
        "no zone and no host has such a name. Both answer 400, and Kilonova already by the schema",
    ),
    KnownDifference(
        "POST /servers/{id}/action createBackup",
        "/createBackup/backup_type",
        is_longer_than(255),
        "the database stores the value, so the length has a limit",
    ),
    KnownDifference(
        "POST /servers/{id}/action createBackup",
        "/createBackup/rotation",
        is_above_32_bits,
        "integers have 32 bits",
    ),
    KnownDifference(
        "POST /servers/{id}/action os-getConsoleOutput",
        ".*/length",
        is_above_32_bits,
        "integers have 32 bits",
    ),
    KnownDifference(
        "POST /os-(volumes|snapshots)",
        ".*",
        is_longer_than(255),
        "longer than the limit of the block storage service",
    ),
    KnownDifference(
        "POST /os-server-groups",
        ".*/max_server_per_host",
        is_above_32_bits,
        "integers have 32 bits",
    ),
    KnownDifference(
        "POST /os-aggregates/{id}/images",
        "/cache",
        is_longer_than(100),
        "a request has at most 100 images",
    ),
    KnownDifference(
        "POST /os-keypairs",
        "/keypair/public_key",
        is_longer_than(16384),
        "the database stores the key, so the length has a limit. The longest RSA key has 3 KiB",
    ),
    KnownDifference(
        "POST /os-keypairs", "/keypair/user_id", is_invalid_id, "no user has such an id"
    ),
    KnownDifference(
        f"GET ({_SERVERS}|/flavors)(/detail)?",
        "/[a-z0-9_-]+/[*]",
        is_costly_expression,
        "the expression could keep the database busy",
    ),
    KnownDifference(
        "GET /flavors(/detail)?",
        "/name/[*]",
        is_invalid_expression,
        "400 instead of an error of the database",
    ),
    KnownDifference(
        _WITHOUT_QUERY_SCHEMA,
        "",
        is_unknown_parameter,
        "2.102 requires a refusal everywhere, but Nova has no query schema for these operations",
    ),
    KnownDifference(
        "GET /limits",
        "/reserved(/[*])?",
        is_any,
        ours=True,
        reason="documented, and an option of clients, but missing in Nova's schema since 2.75",
    ),
    KnownDifference(
        "(POST|PUT) /os-aggregates(/{id})?",
        "/aggregate/availability_zone",
        has_colon,
        ours=True,
        reason="the handler refuses the value with a reason for ':'",
    ),
    KnownDifference(
        "PUT /servers/{server_id}/tags/{id}",
        "",
        is_any,
        ours=True,
        reason="Kilonova does not read the body",
    ),
    KnownDifference(
        "POST /os-baremetal-nodes",
        "",
        is_any,
        ours=True,
        reason="refused without a look at the body",
    ),
)
#: Operation of Nova that the table of routes does not serve -> reason.
ABSENT: dict[str, str] = {
    "GET /os-baremetal-nodes": "a proxy to the bare metal service, removed in 2.36",
    "GET /os-baremetal-nodes/{id}": "a proxy to the bare metal service, removed in 2.36",
    "GET /": "a route outside the table: versions.Document",
    "GET /versions/{id}": "a route outside the table: versions.Document",
}
