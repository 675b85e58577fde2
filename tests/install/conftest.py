# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the bridge of the machines, and of the packages to install."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.packages import ROOT
from deploy.progress import run
from tests.install import external_services, machines
from tests.install.machines import Machine, machine


@pytest.fixture(scope="session")
def bridge() -> Iterator[None]:
    """Yield the bridge that connects all machines of a run."""
    with machines.network():
        yield


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """Return the Debian packages of this tree, after a check by lintian."""
    run([ROOT / "deploy/deb"], "Mend what the lines above name.", timeout=3600)
    return sorted((ROOT / "build/deb").glob("*.deb"))


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory, bridge: None) -> Iterator[Machine]:
    """Yield the machine with Keystone, Glance and Neutron."""
    with machine(tmp_path_factory.mktemp("cloud"), "cloud") as new_machine:
        external_services.install(new_machine)
        yield new_machine
