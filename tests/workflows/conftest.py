# SPDX-License-Identifier: Apache-2.0
"""Fixtures with a simulated cloud in one thread, new for each test of workflows."""

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
    """A cloud of three registered hosts, with local disks or with shared storage."""
    cloud = create_cloud(storage=request.param)
    yield cloud
    cloud.store.close()
