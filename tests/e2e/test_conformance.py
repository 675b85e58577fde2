# SPDX-License-Identifier: Apache-2.0
"""Compute API conformance data, replayed against a cloud with two hosts in memory, for the operations that exist.

That cloud keeps deleted servers, so that restore is exercised, and does not offload shelved ones by itself, so that
shelveOffload is, and has a network service.

The data and their runner are no part of the project: where ``../shared/conformance`` stands beside the repository it
is used, elsewhere the test is skipped. Which operations are asked for follows from the API's own tables, so an
operation that is added there is asked for from then on; a failure of any of them fails the test.
"""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import states
from compute_api import routes
from compute_api.schemas import server_actions
from deploy.packages import ROOT
from tests.e2e.live import Live

DATA = ROOT.parent / "shared" / "conformance"
ACTION = "/servers/{}/action"
#: Operation -> another one, which the runner needs to exercise it.
NEEDS = {"GET /os-aggregates": "POST /os-aggregates", "GET /os-aggregates/{id}": "POST /os-aggregates"}


def plain(path: str) -> str:
    """A path whose parameters have lost their names."""
    return re.sub(r"\{\w+\}", "{}", path)


def exists(operation: str) -> bool:
    """Does the API have this operation of the data, "METHOD /path" or "METHOD /path#action"?"""
    method, _, rest = operation.partition(" ")
    path, _, action = plain(rest).partition("#")
    if not any((route.method, plain(route.path)) == (method, path) for route in routes.ROUTES):
        return False
    if path != ACTION:
        return True
    return action in server_actions.BY_KEY and any(row.key == action for row in states.ACTIONS)


def operations() -> list[str]:
    """The names of the data's operations that exist here, with what exercises them, and are not removed ones."""
    lines = (DATA / "operations.json").read_text().splitlines()
    found = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    return [one["op"] for one in found if "gone" not in one
            and exists(one["op"]) and exists(NEEDS.get(one["op"], one["op"]))]


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    if not (DATA / "runner").is_dir():
        pytest.skip(f"there are no conformance data in {DATA}")
    return operations()


def test_operations_that_exist_conform(wanted: list[str], keeping: Live, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    seed, report = keeping.seed, tmp_path / "conformance.json"
    network = seed.admin.network.create_network(name="conformance", is_shared=True)
    seed.admin.network.create_subnet(network_id=network.id, ip_version=4, cidr="10.0.0.0/16")
    done = subprocess.run([
        sys.executable, str(DATA / "runner"), "--url", keeping.cloud.api_url, "--report", str(report),
        "--token", seed.demo.session.get_token(), "--admin-token", seed.admin.session.get_token(),
        "--image", keeping.image("empty"), "--flavor", keeping.flavor("m1.nano"),
        "--flavor2", keeping.flavor("m1.tiny"), "--network", network.id,
        "--with", "multihost,image,deferred-delete,vnc,serial,network,network-proxy,evacuate",
        "--only", "^(" + "|".join(map(re.escape, wanted)) + ")$"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL,
        env=keeping.environment)
    with capsys.disabled():
        print("\n" + "\n".join(done.stdout.splitlines()[-2:]))
    assert report.exists(), done.stdout[-5000:] + done.stderr[-5000:]
    found = json.loads(report.read_text())["operations"]
    assert done.returncode == 0, done.stdout[-20000:]
    assert sorted(found) == sorted(wanted)
    assert "left behind" not in done.stdout
    keeping.judge()
