# SPDX-License-Identifier: Apache-2.0
"""The cloud of this ring: one for the whole session, made by ``./deploy/up`` itself and removed by ``./deploy/down``.

It needs root, and stands on ports of its own below /tmp, beside whatever else runs. With KILONOVA_HOME and
KILONOVA_PORT_BASE in the environment that cloud is taken instead, and left running for a look afterwards.
"""
from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.servers import free_ports
from tests.e2e.live import Live, Rest


@dataclass(frozen=True)
class First:
    """The first ``./deploy/up``: the cloud that it made, and what it said."""

    live: Live
    said: subprocess.CompletedProcess[str]


def new_home() -> Path:
    """A short path that QEMU's user can enter."""
    home = Path(tempfile.mkdtemp(prefix="kn-e2e-", dir="/tmp"))
    home.chmod(0o755)
    return home


@pytest.fixture(scope="session")
def first_up() -> Iterator[First]:
    if os.geteuid() != 0:
        pytest.skip("needs root; run: ./deploy/test e2e")
    given = os.environ.get("KILONOVA_HOME")
    live = Live(Path(given), int(os.environ["KILONOVA_PORT_BASE"])) if given else Live(new_home(), free_ports(6))
    said = live.up()
    try:
        if said.returncode != 0:
            pytest.fail(f"./deploy/up failed; logs are in {live.home}/log\n{said.stdout}\n{said.stderr}")
        yield First(live, said)
    finally:
        if not given:
            gone = live.down("--purge") if said.returncode == 0 else live.down()
            assert (gone.returncode, live.processes()) == (0, []), gone
            assert said.returncode != 0 or not live.home.exists()


@pytest.fixture(scope="session")
def cloud(first_up: First) -> Live:
    """A cloud with one libvirt host, a first server, and the users demo and admin."""
    return first_up.live


@pytest.fixture
def demo(cloud: Live) -> Iterator[Rest]:
    """The user demo; what their test leaves is deleted, and the oracle has the last word."""
    rest = cloud.rest()
    before = {server["id"] for server in rest.servers()}
    yield rest
    made = [server["id"] for server in rest.servers() if server["id"] not in before]
    for server in made:
        rest.insist("DELETE", f"/servers/{server}", fine=(204, 404))
    for server in made:
        rest.await_gone(server)
    cloud.judge()
