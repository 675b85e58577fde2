# SPDX-License-Identifier: Apache-2.0
"""Compute API conformance data, replayed against a cloud with two hosts in memory, for the operations that exist.

The data and their runner are no part of the project: where ``../shared/conformance`` stands beside the repository it
is used, elsewhere the test is skipped. Which operations are asked for follows from the API's own tables, so an
operation that is added there is asked for from then on; a failure of any of them fails the test.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import states
from compute_api import routes
from compute_api.schemas import server_actions
from deploy.cloud import Cloud, Ports
from deploy.commands import up
from deploy.packages import ROOT
from deploy.seed import Seed
from deploy.servers import free_ports
from tests.e2e.conftest import new_home

DATA = ROOT.parent / "shared" / "conformance"
HOSTS = ("one", "two")
ACTION = "/servers/{}/action"
#: Operation -> another one, which the runner needs to exercise it.
NEEDS = {"GET /os-aggregates": "POST /os-aggregates", "GET /os-aggregates/{id}": "POST /os-aggregates"}
#: (operation, microversion) that fails, and why that is right. One that passes must go from here.
DEVIATIONS = {
    ("POST /servers", version): "trusted image certificates are refused as long as no host validates signatures"
    for version in ("2.63", "2.66")}
#: Quotas that the runner's parallel lanes do not reach.
QUOTA = {"instances": 1000, "cores": 1000, "ram": 1 << 20, "server_groups": 1000, "key_pairs": 1000}


@pytest.fixture(scope="module")
def seed() -> Iterator[Seed]:
    """A cloud on two hosts in memory, with all that up makes but guests."""
    if not (DATA / "runner").is_dir():
        pytest.skip(f"there are no conformance data in {DATA}")
    if os.geteuid() != 0:
        pytest.skip("needs root; run: ./deploy/test e2e")
    home = new_home()
    cloud = Cloud(home=home, ports=Ports.from_base(free_ports(6)), hosts=HOSTS, driver="memory")
    try:
        for step in (up.prepare, up.upgrade, up.bootstrap):
            step(cloud)
        cloud.launch()
        up.await_services(cloud)
        made = Seed(cloud)
        for more in (made.host, made.flavors, made.tenant):
            more()
        yield made
    finally:
        cloud.shut_down()
        cloud.purge()


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


def bootable(seed: Seed) -> Any:
    """An image; what is in it does not matter to hosts in memory."""
    return seed.admin.image.create_image("conformance", data=bytes(512), disk_format="raw", container_format="bare",
                                         visibility="public")


def test_operations_that_exist_conform(seed: Seed, tmp_path: Path) -> None:
    wanted, report = operations(), tmp_path / "conformance.json"
    flavors = {flavor.name: flavor.id for flavor in seed.admin.compute.flavors(details=False)}
    for connection in (seed.demo, seed.admin):
        seed.admin.compute.update_quota_set(connection.session.get_project_id(), **QUOTA)
    done = subprocess.run([
        sys.executable, str(DATA / "runner"), "--url", seed.cloud.api_url, "--report", str(report),
        "--token", seed.demo.session.get_token(), "--admin-token", seed.admin.session.get_token(),
        "--image", bootable(seed).id, "--flavor", flavors["m1.nano"], "--flavor2", flavors["m1.tiny"],
        "--with", "multihost,image", "--only", "^(" + "|".join(map(re.escape, wanted)) + ")$"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"})
    print("\n".join(done.stdout.splitlines()[-2:]))
    assert report.exists(), done.stdout[-5000:] + done.stderr[-5000:]
    found = json.loads(report.read_text())["operations"]
    failed = {(operation, version) for operation, about in found.items()
              for version, result in about["microversions"].items() if result["result"] == "fail"}
    assert failed == set(DEVIATIONS), done.stdout[-20000:]
    assert sorted(found) == sorted(wanted)
    assert "left behind" not in done.stdout
