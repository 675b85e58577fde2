# SPDX-License-Identifier: Apache-2.0
"""Flavors in responses. ``view`` is the request's ``Links``."""

from __future__ import annotations

from common.domain.json_types import JsonObject
from common.store.rows import FlavorRow
from compute_api.compute.request.links import Links
from compute_api.compute.views.fields import Field, render, render_readable, visible_fields

EXTRA_SPECS = "os_compute_api:os-flavor-extra-specs:index"
RULES = frozenset((EXTRA_SPECS,))

NAMES: tuple[Field, ...] = (
    Field("id", "flavorid"),
    Field("name", "name"),
    Field("links", lambda row, view: view.of("flavors", row.flavorid)),
    Field("description", "description", since="2.55"),
)
FIELDS: tuple[Field, ...] = (
    *NAMES,
    Field("ram", "memory_mb"),
    Field("disk", "root_gb"),
    Field("vcpus", "vcpus"),
    Field("swap", lambda row, view: row.swap_mb or "", until="2.74"),
    Field("swap", "swap_mb", since="2.75"),
    Field("OS-FLV-EXT-DATA:ephemeral", "ephemeral_gb"),
    Field("OS-FLV-DISABLED:disabled", lambda row, view: False, until="2.101"),
    Field("os-flavor-access:is_public", "is_public"),
    Field("rxtx_factor", "rxtx_factor", until="2.101"),
    Field("extra_specs", "extra_specs", since="2.61", rule=EXTRA_SPECS),
)


def one(row: FlavorRow, links: Links, version: int, allowed: frozenset[str]) -> JsonObject:
    """Return the body of a single flavor.

    Args:
        row: The flavor.
        links: The links of the request.
        version: The microversion of the request.
        allowed: The rules of ``RULES`` that the caller passes.
    """
    return {"flavor": render(visible_fields(FIELDS, version, allowed), row, links)}


def many(
    rows: list[FlavorRow], links: Links, version: int, allowed: frozenset[str], names_only: bool
) -> list[JsonObject]:
    """Return the items of a list of flavors.

    For the arguments see ``one``. With ``names_only`` an item has the fields ``NAMES`` only.
    """
    getters = visible_fields(NAMES if names_only else FIELDS, version, allowed)
    return [render_readable(getters, row, links) for row in rows]


def access(row: FlavorRow, projects: list[str]) -> JsonObject:
    """Return the body with the projects that have access to a flavor."""
    return {
        "flavor_access": [{"flavor_id": row.flavorid, "tenant_id": project} for project in projects]
    }
