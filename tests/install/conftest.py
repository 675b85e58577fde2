# SPDX-License-Identifier: Apache-2.0
"""The machines' bridge, and the packages that are installed on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.packages import ROOT
from deploy.progress import run
from tests.install import machines


@pytest.fixture(scope="session")
def bridge() -> Iterator[None]:
    """All machines of a run are on it."""
    with machines.network():
        yield


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """The packages of this tree, which lintian has found nothing in."""
    run([ROOT / "deploy/deb"], "Mend what the lines above name.", timeout=3600)
    return sorted((ROOT / "build/deb").glob("*.deb"))
