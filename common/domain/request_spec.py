# SPDX-License-Identifier: Apache-2.0
"""What a server wants of placement, made in one place.

Pure. The conductor makes it of a server that is being placed (``conductor.steps.claims``), the
operator's ``explain`` of one that nobody has asked for yet: both get the same answer because both
ask here.
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
    debts: list[str]
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
    """The request for one server of this flavor and image.

    Args:
        server: its id, or any text for one that is not made.
        image: None for one that boots from no image.
        boots_from_volume: it has no root disk on its host.
        hints: scheduler hints as the user gave them; the server group is the one that they name.
        more: other fields of ``RequestSpec``.
    Raises:
        BadRequest: flavor or image ask for what no host can carry out.
    """
    properties = image.properties if image is not None else {}
    required, forbidden = hardware.traits(flavor, properties)
    given = dict(hints or {})
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
        hints=given,
        group=group_of(given),
        **more,
    )


def group_of(hints: JsonMapping) -> str | None:
    """The server group that scheduler hints name."""
    group = hints.get("group")
    if isinstance(group, list):
        group = group[0] if group else None
    return str(group) if group else None
