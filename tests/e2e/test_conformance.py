# SPDX-License-Identifier: Apache-2.0
"""Compute API conformance data, replayed for the implemented operations.

The cloud has two memory hypervisors, a network service and a volume service. It keeps deleted
servers for restore, and does not offload shelved servers, so the data can exercise shelveOffload.

The data and their runner are not part of the project. ``KILONOVA_CONFORMANCE`` is the path of their
folder. Without this variable the test is skipped (docs/testing.md). The tables of the API determine
the operations, so the test includes new operations automatically.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.domain import states
from compute_api.compute import routes
from compute_api.compute.schemas.servers import actions as server_actions
from deploy.one_machine.seed import Seed
from tests.e2e import conformance_runner
from tests.e2e.live import Live
from tests.waiting import await_true

DATA = os.environ.get("KILONOVA_CONFORMANCE", "")
ACTION = "/servers/{}/action"
#: Operation -> another operation that the runner needs for the test.
NEEDS = {
    "GET /os-aggregates": "POST /os-aggregates",
    "GET /os-aggregates/{id}": "POST /os-aggregates",
}


NOBODY = "0" * 32
_SHARES = "there is no shared file system service here; tests/api/test_shares.py"
_LIVE = "a live migration in memory is over before it can be asked for; tests/api/test_migrations.py has them"
_POWER = "no driver powers hosts: 501, as with libvirt; tests/api/test_os_hosts.py"
_ASSISTED = "Cinder asks for it, of volumes in files; tests/api/test_assisted_snapshots.py"
#: Operation -> the reason why the runner skips the operation or a variant here.
SKIPPED = {
    **{f"{name} /servers/{{server_id}}/shares": _SHARES for name in ("GET", "POST")},
    **{f"{name} /servers/{{server_id}}/shares/{{id}}": _SHARES for name in ("GET", "DELETE")},
    **{
        f"{name} /servers/{{server_id}}/migrations/{{id}}{more}": _LIVE
        for name, more in (("GET", ""), ("DELETE", ""), ("POST", "/action#force_complete"))
    },
    "POST /os-assisted-volume-snapshots": _ASSISTED,
    "DELETE /os-assisted-volume-snapshots/{id}": _ASSISTED,
    "PUT /os-hosts/{id}": _POWER,
    **{f"GET /os-hosts/{{id}}/{action}": _POWER for action in ("reboot", "shutdown", "startup")},
    "DELETE /os-services/{id}": "it would take both hosts from a cloud that other tests use; tests/api/test_hosts.py",
    "POST /servers/{id}/action#os-getSPICEConsole": "the hosts of this cloud have no SPICE; tests/e2e/test_spice.py",
    "POST /servers/{server_id}/remote-consoles": "the same, of kinds spice-direct and mks",
}


def remove_parameter_names(path: str) -> str:
    """Return the path with parameters as ``{}``."""
    return re.sub(r"\{\w+\}", "{}", path)


def is_implemented(operation: str) -> bool:
    """Return whether the API has an operation, "METHOD /path" or "METHOD /path#action"."""
    method, _, rest = operation.partition(" ")
    path, _, action = remove_parameter_names(rest).partition("#")
    if not any(
        (route.method, remove_parameter_names(route.path)) == (method, path)
        for route in routes.ROUTES
    ):
        return False
    if path != ACTION:
        return True
    return action in server_actions.BY_KEY and any(row.key == action for row in states.ACTIONS)


def list_operations(data: Path) -> list[str]:
    """Return the implemented operations of the data that are not removed and can be exercised."""
    lines = (data / "operations.json").read_text().splitlines()
    entries = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    return [
        entry["op"]
        for entry in entries
        if "gone" not in entry
        and is_implemented(entry["op"])
        and is_implemented(NEEDS.get(entry["op"], entry["op"]))
    ]


def create_networks(seed: Seed) -> tuple[str, str]:
    """Create a shared network with a router to an external network, and a free port of the user.

    The external network belongs to no project, so servers without a requested network get the
    shared network.

    Returns:
        The ids of the shared network and of the port.
    """
    admin = seed.admin.network
    network = admin.create_network(name="conformance", is_shared=True)
    subnet = admin.create_subnet(network_id=network.id, ip_version=4, cidr="10.0.0.0/16")
    public = admin.create_network(
        name="conformance-public", is_router_external=True, project_id=NOBODY
    )
    admin.create_subnet(
        network_id=public.id, ip_version=4, cidr="172.31.200.0/24", is_dhcp_enabled=False
    )
    router = admin.create_router(
        name="conformance", external_gateway_info={"network_id": public.id}
    )
    admin.add_interface_to_router(router, subnet=subnet.id)
    return network.id, seed.demo.network.create_port(network_id=network.id).id


def clear_volumes(seed: Seed) -> None:
    """Delete the user's volumes, which no server uses any more."""
    storage = seed.demo.block_storage
    for volume in storage.volumes():
        storage.delete_volume(volume)
    await_true(lambda: not list(storage.volumes()), 60, lambda: [*storage.volumes()])


@pytest.mark.skipif(
    not DATA, reason="KILONOVA_CONFORMANCE does not name a folder of conformance data"
)
def test_implemented_operations_pass_conformance_data(
    keeping: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(DATA).resolve()
    names = list_operations(data)
    seed, report = keeping.seed, tmp_path / "conformance.json"
    network, port = create_networks(seed)
    seed.admin.block_storage.update_quota_set(seed.demo.session.get_project_id(), volumes=-1)
    replay = subprocess.run(
        [
            sys.executable,
            conformance_runner.__file__,
            str(data / "runner"),
            "--data",
            str(data),
            "--data",
            str(conformance_runner.write_bodies(tmp_path / "bodies")),
            "--url",
            keeping.cloud.api_url,
            "--report",
            str(report),
            "--token",
            seed.demo.session.get_token(),
            "--admin-token",
            seed.admin.session.get_token(),
            "--image",
            keeping.image("empty"),
            "--flavor",
            keeping.flavor("m1.nano"),
            "--flavor2",
            keeping.flavor("m1.tiny"),
            "--network",
            network,
            "--with",
            "multihost,image,deferred-delete,vnc,serial,network,network-proxy,evacuate,uptime,volume",
            "--only",
            "^(" + "|".join(map(re.escape, names)) + ")$",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**keeping.environment, "CONFORMANCE_PORT": port},
    )
    with capsys.disabled():
        print("\n" + "\n".join(replay.stdout.splitlines()[-2:]))
    assert report.exists(), replay.stdout[-5000:] + replay.stderr[-5000:]
    results = json.loads(report.read_text())["operations"]
    assert replay.returncode == 0, replay.stdout[-20000:]
    assert sorted(results) == sorted(names)
    assert "left behind" not in replay.stdout
    clear_volumes(seed)
    skipped = {
        name
        for name, result in results.items()
        if any(point["result"] == "skip" for point in result["microversions"].values())
    }
    assert skipped == {*SKIPPED}
    keeping.assert_healthy()
