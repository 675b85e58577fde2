# SPDX-License-Identifier: Apache-2.0
"""Tests of the number of failed builds of a host when an image causes the failures."""

from __future__ import annotations

import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from tests.workflows.simulator import Cloud
from tests.workflows.test_claims import (
    OTHER_IMAGE,
    break_builds,
    check_failure,
    cloud,
    read_failures,
)

__all__ = ["cloud"]


def boot_from_image(cloud: Cloud, image: str, host: str) -> str:
    """Create a server from this image on this host, and return the id of the server."""
    server = cloud.create(host=host)[0]
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(image_id=image)
        )
    )
    cloud.settle()
    return server


def test_host_failed_build_count_rises_once_for_failures_of_one_image(cloud: Cloud) -> None:
    break_builds(cloud, "h1", 8)
    for _ in range(6):
        assert "Disk full" in check_failure(cloud, boot_from_image(cloud, OTHER_IMAGE, "h1"))
    assert read_failures(cloud, "h1") == 1, "one image does not put a host out of use"
    boot_from_image(cloud, ids.new(), "h1")
    assert read_failures(cloud, "h1") == 2, "another one says as much again"
    boot_from_image(cloud, OTHER_IMAGE, "h2")
    boot_from_image(cloud, OTHER_IMAGE, "h1")
    assert read_failures(cloud, "h1") == 3, "it could be built elsewhere, so it is the host"
    assert cloud.findings() == []
