# SPDX-License-Identifier: Apache-2.0
"""``new_cloud(kind)`` makes a cloud on an empty store of this kind; it is closed at the test's
end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.functional.cloud import Cloud


@pytest.fixture
def new_cloud(
    upgraded_database: Callable[[str], str], rabbitmq_url: str, tmp_path: Path
) -> Iterator[Callable[..., Cloud]]:
    made: list[Cloud] = []

    def make(kind: str = "sqlite", broker: str = "") -> Cloud:
        made.append(
            Cloud(upgraded_database(kind), broker or rabbitmq_url, tmp_path / f"cloud-{len(made)}")
        )
        return made[-1]

    yield make
    for cloud in made:
        cloud.close()


@pytest.fixture
def cloud(new_cloud: Callable[..., Cloud]) -> Cloud:
    """One host, one conductor, one scheduler, on SQLite."""
    cloud = new_cloud()
    cloud.start()
    return cloud
