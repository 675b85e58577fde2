# SPDX-License-Identifier: Apache-2.0
"""The life of servers with volumes, with Cinder itself."""

from __future__ import annotations

import pytest

from tests.cinder.conftest import RunningCinder
from tests.contract.test_volume_client import Service
from tests.contract.test_volume_flows import *  # noqa: F403 - each of its tests runs here too


@pytest.fixture(scope="module")
def service(cinder: RunningCinder) -> Service:
    return Service(cinder.url, cinder.cloud, copies_images=False)
