# SPDX-License-Identifier: Apache-2.0
"""``request_spec.of``: the request spec of a server from its flavor, image and hints."""

from __future__ import annotations

import pytest

from common.domain import request_spec
from common.domain.models import Flavor, ImageRef

FLAVOR = Flavor("1", "small", vcpus=2, memory_mb=512, root_gb=0)


def test_request_spec_contains_resources_image_properties_and_exclusions() -> None:
    image = ImageRef("image-1", properties={"os_type": "linux"})
    spec = request_spec.of(
        "server-1", "project-1", FLAVOR, image, availability_zone="az1", excluded=["host-9"]
    )
    assert (spec.server, spec.project_id, spec.flavor, spec.image_id) == (
        "server-1",
        "project-1",
        FLAVOR,
        "image-1",
    )
    assert spec.resources == {"VCPU": 2, "MEMORY_MB": 512}, "amounts of zero are left out"
    assert spec.image_properties == {"os_type": "linux"}
    assert (spec.availability_zone, spec.excluded, spec.group, spec.is_rebuild) == (
        "az1",
        ["host-9"],
        None,
        False,
    )


def test_request_spec_without_image_has_no_image_properties() -> None:
    spec = request_spec.of("server-1", "project-1", FLAVOR)
    assert (spec.image_id, spec.image_properties) == (None, {})


@pytest.mark.parametrize("hint", ["group-1", ["group-1"]])
def test_request_spec_takes_the_group_from_the_hints(hint: object) -> None:
    spec = request_spec.of(
        "server-1", "project-1", FLAVOR, hints={"group": hint, "different_host": ["server-2"]}
    )
    assert spec.group == "group-1"
    assert spec.hints["different_host"] == ["server-2"]


@pytest.mark.parametrize("hint", [None, "", []])
def test_request_spec_with_empty_group_hint_has_no_group(hint: object) -> None:
    assert request_spec.of("server-1", "project-1", FLAVOR, hints={"group": hint}).group is None
