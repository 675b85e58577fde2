# SPDX-License-Identifier: Apache-2.0
"""Simulated clouds as fixtures: all services of a cloud run in the thread of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.schemas import memory_store
from tests.workflows.moves import create_cloud
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    time = Time()
    cloud = Cloud(memory_store(time), time)
    yield cloud
    cloud.store.close()


@pytest.fixture(params=["", "nfs"], ids=["local", "shared"])
def either(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Yield a cloud of three hosts, once with local disks and once with shared storage."""
    cloud = create_cloud(storage=request.param)
    yield cloud
    cloud.store.close()
