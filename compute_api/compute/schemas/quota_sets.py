# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of quota sets, quota class sets and limits, and their resources by version."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from compute_api.compute.schemas.common import BOOLEAN, integer, query, record, repeated, wrapped
from compute_api.http.microversions import Range
from compute_api.http.validation import Change, Document, VersionedSchema, put, strict

#: Limited resource -> versions in which quota sets contain the resource.
RESOURCES: dict[str, Range] = {
    "instances": Range(),
    "cores": Range(),
    "ram": Range(),
    "floating_ips": Range(until="2.35"),
    "fixed_ips": Range(until="2.35"),
    "metadata_items": Range(),
    "injected_files": Range(until="2.56"),
    "injected_file_content_bytes": Range(until="2.56"),
    "injected_file_path_bytes": Range(until="2.56"),
    "security_groups": Range(until="2.35"),
    "security_group_rules": Range(until="2.35"),
    "key_pairs": Range(),
    "server_groups": Range(),
    "server_group_members": Range(),
}
#: Resources of the network service, which have no limit in this API.
UNLIMITED = ("floating_ips", "fixed_ips", "security_groups", "security_group_rules")
#: Quota class sets contain these resources later than quota sets.
_GROUPS = ("server_groups", "server_group_members")
CLASS_RESOURCES: dict[str, Range] = {
    **RESOURCES,
    **dict.fromkeys(UNLIMITED, Range(until="2.49")),
    **dict.fromkeys(_GROUPS, Range("2.50")),
}
_LIMIT: Document = integer(-1)


def _body(name: str, resources: dict[str, Range], more: JsonObject) -> VersionedSchema:
    """Return the schema of a body with new limits, for the resources of each microversion.

    Args:
        name: The only key of the body.
        resources: Name of a resource -> versions in which a request can set the limit.
        more: Further keys of the object, with their schemas.
    """

    def list_resources(version: str) -> Document:
        at = int(version.partition(".")[2])
        return record(
            {**{key: _LIMIT for key, versions in resources.items() if at in versions}, **more}
        )

    def replaced(version: str) -> Change:
        return put(name, list_resources(version))

    edges = sorted(
        {edge for versions in resources.values() for edge in _edges(versions)} - {"2.1"},
        key=lambda edge: int(edge[2:]),
    )
    return VersionedSchema(
        wrapped(name, list_resources("2.1")), *((edge, replaced(edge)) for edge in edges)
    )


def _edges(versions: Range) -> list[str]:
    """Return the first version of a range, and the first version after the range if it ends."""
    after = [] if versions.until is None else [f"2.{int(versions.until.partition('.')[2]) + 1}"]
    return [versions.since, *after]


UPDATE = _body("quota_set", RESOURCES, {"force": BOOLEAN})
#: Requests could set these resources before responses contained them.
UPDATE_CLASS = _body("quota_class_set", {**CLASS_RESOURCES, **dict.fromkeys(_GROUPS, Range())}, {})
SHOW = VersionedSchema(query({"user_id": repeated()}), ("2.75", strict))
LIMITS = VersionedSchema(
    query({"tenant_id": repeated()}), ("2.57", put("reserved", repeated())), ("2.75", strict)
)
