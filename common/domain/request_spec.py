# SPDX-License-Identifier: Apache-2.0
"""Builds the request spec of a server. Pure.

The conductor builds one for a server that is being placed (``conductor.steps.claims``), and
``kilonova explain`` for a server that does not exist. Because both use this module, both get the
same answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack

from common.domain import hardware
from common.domain.json_types import JsonMapping
from common.domain.models import Flavor, ImageRef, RequestSpec


class SpecOptions(TypedDict, total=False):
    """Fields of ``RequestSpec`` that may be left out."""

    availability_zone: str | None
    force_host: str | None
    requested_host: str | None
    excluded: list[str]
    hosts_with_removals: list[str]
    is_rebuild: bool


def of(
    server: str,
    project_id: str,
    flavor: Flavor,
    image: ImageRef | None = None,
    *,
    hints: JsonMapping | None = None,
    boots_from_volume: bool = False,
    **more: Unpack[SpecOptions],
) -> RequestSpec:
    """Return the request spec of one server with this flavor and image.

    Args:
        server: Id of the server, or any text if the server does not exist.
        project_id: Project of the server.
        flavor: Flavor of the server.
        image: Image of the server. None: the server boots from no image.
        boots_from_volume: True if the server has no root disk on its host.
        hints: Scheduler hints of the request, which may contain the server group.
        more: Other fields of ``RequestSpec``.

    Raises:
        BadRequest: A requested trait, resource, CPU policy or device model is invalid, hosts do not
            provide a requested resource, or the server would use no resource.
    """
    properties = image.properties if image is not None else {}
    required, forbidden = hardware.traits(flavor, properties)
    requested_hints = dict(hints or {})
    return RequestSpec(
        server=server,
        project_id=project_id,
        resources=hardware.resources(
            replace(flavor, root_gb=0) if boots_from_volume else flavor, properties
        ),
        flavor=flavor,
        image_id=(image.id or None) if image is not None else None,
        image_properties=dict(properties),
        required_traits=required,
        forbidden_traits=forbidden,
        hints=requested_hints,
        group=group_of(requested_hints),
        **more,
    )


def group_of(hints: JsonMapping) -> str | None:
    """Return the server group in scheduler hints (of several, the first), or None if absent."""
    group = hints.get("group")
    if isinstance(group, list):
        group = group[0] if group else None
    return str(group) if group else None
