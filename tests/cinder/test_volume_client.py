# SPDX-License-Identifier: Apache-2.0
"""The contract tests of the volume client, with a real Cinder."""

from __future__ import annotations

import pytest

from tests.cinder.conftest import RunningCinder
from tests.contract.test_volume_client import *  # noqa: F403 - each of its tests runs here too
from tests.contract.test_volume_client import Service


@pytest.fixture(scope="module")
def service(cinder: RunningCinder) -> Service:
    return Service(cinder.url, cinder.cloud, copies_images=False)
