# SPDX-License-Identifier: Apache-2.0
"""Fixtures of clouds on an empty database, which are closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.functional.cloud import Cloud


@pytest.fixture
def new_cloud(
    upgraded_database: Callable[[str], str], rabbitmq_url: str, tmp_path: Path
) -> Iterator[Callable[..., Cloud]]:
    clouds: list[Cloud] = []

    def make(kind: str = "sqlite", broker: str = "") -> Cloud:
        clouds.append(
            Cloud(
                upgraded_database(kind), broker or rabbitmq_url, tmp_path / f"cloud-{len(clouds)}"
            )
        )
        return clouds[-1]

    yield make
    for cloud in clouds:
        cloud.close()


@pytest.fixture
def cloud(new_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with a host, a conductor and a scheduler, on SQLite."""
    cloud = new_cloud()
    cloud.start()
    return cloud
