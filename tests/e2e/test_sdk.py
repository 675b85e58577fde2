# SPDX-License-Identifier: Apache-2.0
"""openstacksdk from PyPI: create, wait, find and delete."""

from __future__ import annotations

import pytest
from openstack import exceptions

from tests.e2e.live import Live, Rest


def test_openstacksdk_creates_finds_and_deletes_server(cloud: Live, demo: Rest) -> None:
    sdk = cloud.seed.connect("kilonova")
    server = sdk.compute.create_server(
        name="by-sdk",
        flavor_id=cloud.flavor(),
        image_id=cloud.image(),
        networks="none",
        metadata={"made": "by sdk"},
    )
    server = sdk.compute.wait_for_server(server, wait=120, interval=0.5)
    assert (server.status, server.metadata, server.vm_state) == (
        "ACTIVE",
        {"made": "by sdk"},
        "active",
    )
    assert sdk.compute.find_server("by-sdk").id == server.id
    sdk.compute.delete_server(server)
    sdk.compute.wait_for_delete(server, wait=120, interval=0.5)
    with pytest.raises(exceptions.NotFoundException):
        sdk.compute.get_server(server.id)
    assert sdk.compute.find_server("by-sdk") is None
