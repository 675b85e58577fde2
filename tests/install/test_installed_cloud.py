# SPDX-License-Identifier: Apache-2.0
"""A cloud as an operator has it after docs/install.md: the page's own commands on booted Debian 12
machines, beside Keystone, Glance and Neutron of Debian's packages.

Where the test differs from the page it says so: Keystone is asked over http here, so its URL has
to be allowed in plain text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.packages import ROOT
from tests.install import neighbours
from tests.install.documentation import commands
from tests.install.machines import ADDRESSES, Machine, machine
from tests.standalone import REAL_CLOUD
from tests.waiting import await_true

PAGE = ROOT / "docs/install.md"
CONTROLLER, NODE = "controller", "node1"
PUBLIC = f"http://{ADDRESSES[CONTROLLER]}"
#: What the page's reader puts in.
OURS = {
    "192.0.2.10": ADDRESSES[CONTROLLER],
    "https://keystone.example:5000/v3": neighbours.ADMIN["OS_AUTH_URL"],
    "https://cloud.example": PUBLIC,
    "auth_url = $KEYSTONE": "auth_url = $KEYSTONE\nallow_plain_text = true",
}
#: The operator's proxy, which ends TLS elsewhere.
PROXY = """server {
    listen 80;
    client_max_body_size 0;
    location /v2.1 { proxy_pass http://127.0.0.1:8774; }
    location /placement/ { proxy_pass http://127.0.0.1:8778/; }
}
"""
#: Suites of our clients that real services pass as the standalone ones do.
SUITES = ("test_image_client.py", "test_revoked_tokens.py")
START_SECONDS = 300
pytestmark = pytest.mark.timeout(3600)


def typed(heading: str, **words: str) -> str:
    """The page's commands below this heading, with what its reader puts in."""
    script = commands(PAGE, heading)
    for word, value in {**OURS, **words}.items():
        script = script.replace(word, value)
    return script


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, bridge: None) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("cloud"), "cloud") as booted:
        neighbours.install(booted)
        yield booted


@pytest.fixture(scope="module")
def controller(
    tmp_path_factory: pytest.TempPathFactory, cloud: Machine, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp(CONTROLLER), CONTROLLER) as booted:
        bring(booted, packages)
        booted.apt("update")
        booted.apt("install", "nginx-light", "python3-openstackclient")
        booted.write("/etc/nginx/sites-enabled/default", PROXY)
        booted.run("systemctl", "restart", "nginx")
        booted.write("/root/admin", neighbours.exported(), 0o600)
        booted.shell(f". /root/admin\n{typed('On the controller')}")
        yield booted


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, controller: Machine, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp(NODE), NODE) as booted:
        neighbours.join(booted)
        bring(booted, packages)
        said = controller.run("kilonova", "host", "add", NODE, "--address", booted.address)
        [token] = [word for word in said.split() if word.startswith("join1.")]
        booted.shell(typed("On a host", TOKEN=token))
        # A container may write no groups of the kernel's; a machine may.
        booted.shell("echo 'cgroup_controllers = [ ]' >> /etc/libvirt/qemu.conf")
        booted.run("systemctl", "restart", "libvirtd")
        yield booted


def bring(booted: Machine, packages: list[Path]) -> None:
    folder = booted.root / "root/kilonova"
    folder.mkdir(parents=True)
    for package in packages:
        shutil.copy(package, folder)


def answers(controller: Machine, *words: str) -> Any:
    """What the client says in JSON."""
    return json.loads(controller.shell(f". /root/admin\nopenstack {' '.join(words)} -f json"))


def test_controller_runs_and_every_neighbour_lets_it_in(controller: Machine) -> None:
    controller.run("kilonova", "config", "check")
    assert answers(controller, "compute", "service", "list", "-c", "Binary")
    assert answers(controller, "hypervisor", "list") == []


def test_host_has_joined(controller: Machine, node: Machine) -> None:
    assert node.run("systemctl", "is-active", "kilonova-agent") == "active\n"
    [found] = answers(
        controller, "hypervisor", "list", "-c", '"Hypervisor Hostname"', "-c", "State"
    )
    assert found == {"Hypervisor Hostname": NODE, "State": "up"}


def test_port_of_neutron_is_bound_on_the_host(controller: Machine, node: Machine) -> None:
    answers(controller, "network create inside")
    answers(controller, "subnet create inside --network inside --subnet-range 10.9.0.0/24")
    answers(
        controller, f"port create --network inside --host {NODE} --device-owner compute:nova p1"
    )
    shown = answers(controller, "port show p1")
    assert (shown["binding_host_id"], shown["binding_vif_type"]) == (NODE, "bridge")


def test_server_runs_from_an_image_of_glance(controller: Machine, node: Machine) -> None:
    """Without a port: Neutron's Linux bridge agents leave bridges to the hypervisor's service,
    which makes none yet (docs/neighbours.md)."""
    disk = ROOT / "build/images/tiny.qcow2"
    if not disk.exists():
        subprocess.run([ROOT / "deploy/images/tiny/build", disk], check=True)
    shutil.copy(disk, controller.root / "root/tiny.qcow2")
    made = answers(
        controller,
        "image create tiny --disk-format qcow2 --container-format bare --file tiny.qcow2",
    )
    answers(controller, "flavor create small --ram 128 --disk 1 --vcpus 1")
    server = answers(
        controller,
        "--os-compute-api-version 2.37 server create first --nic none",
        f"--image {made['id']} --flavor small",
    )["id"]

    def status() -> str:
        found = answers(controller, f"server show {server}")
        assert found["status"] != "ERROR", (
            f"{found.get('fault')}\n{controller.run('kilonova', 'explain', server, check=False)}"
        )
        return str(found["status"])

    await_true(lambda: status() == "ACTIVE", START_SECONDS, "the server is not ACTIVE", pause=2)
    assert "is proved" in controller.run("kilonova", "host", "prove", NODE)
    assert "all is well" in controller.run("kilonova", "doctor")
    controller.shell(f". /root/admin\nopenstack server delete --wait {server}")


@pytest.mark.parametrize("suite", SUITES)
def test_suite_of_a_client_holds_against_the_real_service(
    cloud: Machine, controller: Machine, suite: str
) -> None:
    own = controller.shell(
        "sed -n '/^\\[identity\\]/,/^\\[image/s/^password = //p' /etc/kilonova/kilonova.conf"
    ).strip()
    words = f"{neighbours.CLOUD} {neighbours.PASSWORD} {own}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/contract" / suite)],
        env={**os.environ, REAL_CLOUD: words},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
