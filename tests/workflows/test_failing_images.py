# SPDX-License-Identifier: Apache-2.0
"""Builds that fail because of an image, or look so: what is said of their hosts."""

from __future__ import annotations

import sqlalchemy as sa

from common.domain import ids
from common.store import schema
from tests.workflows.simulator import Cloud
from tests.workflows.test_claims import OTHER_IMAGE, break_builds, cloud, failure, failures

__all__ = ["cloud"]


def of_image(cloud: Cloud, image: str, host: str) -> str:
    """A server of this image that can be on this host only."""
    server = cloud.create(host=host)[0]
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(image_id=image)
        )
    )
    cloud.settle()
    return server


def test_an_image_that_builds_nowhere_counts_once_for_a_host(cloud: Cloud) -> None:
    break_builds(cloud, "h1", 8)
    for _ in range(6):
        assert "Disk full" in failure(cloud, of_image(cloud, OTHER_IMAGE, "h1"))
    assert failures(cloud, "h1") == 1, "one image does not put a host out of use"
    of_image(cloud, ids.new(), "h1")
    assert failures(cloud, "h1") == 2, "another one says as much again"
    of_image(cloud, OTHER_IMAGE, "h2")
    of_image(cloud, OTHER_IMAGE, "h1")
    assert failures(cloud, "h1") == 3, "it could be built elsewhere, so it is the host"
    assert cloud.findings() == []
