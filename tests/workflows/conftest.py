# SPDX-License-Identifier: Apache-2.0
"""A cloud in one thread for each test of this ring."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.store.engine import Store
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    time = Time()
    cloud = Cloud(Store("sqlite://", time=time), time)
    yield cloud
    cloud.store.close()
