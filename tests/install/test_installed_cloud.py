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
from contextlib import ExitStack
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
CONTROLLER, SECOND, NODES = "controller", "second", ("node1", "node2")
PUBLIC = f"http://{ADDRESSES[CONTROLLER]}"
#: What the page's reader puts in.
OURS = {
    "192.0.2.10": ADDRESSES[CONTROLLER],
    "192.0.2.11": ADDRESSES[SECOND],
    "https://keystone.example:5000/v3": neighbours.ADMIN["OS_AUTH_URL"],
    "https://cloud.example": PUBLIC,
    "auth_url = $KEYSTONE": "auth_url = $KEYSTONE\nallow_plain_text = true",
}
#: Suites of our clients that real services pass as the standalone ones do.
SUITES = ("test_image_client.py", "test_revoked_tokens.py")
#: What runs on both controllers.
PAIRED = ("api", "conductor", "scheduler", "placement")
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
        proxy(booted)
        booted.write("/root/admin", neighbours.exported(), 0o600)
        booted.shell(f". /root/admin\n{typed('On the controller')}")
        yield booted


@pytest.fixture(scope="module")
def second(
    tmp_path_factory: pytest.TempPathFactory, controller: Machine, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp(SECOND), SECOND) as booted:
        bring(booted, packages)
        controller.shell(typed("On the first"))
        carry(controller, booted, "root/second")
        booted.shell(typed("On the second"))
        proxy(controller, booted.address)
        yield booted


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, controller: Machine, packages: list[Path]
) -> Iterator[list[Machine]]:
    with ExitStack() as running:
        booted = [
            running.enter_context(machine(tmp_path_factory.mktemp(name), name)) for name in NODES
        ]
        for node in booted:
            neighbours.join(node)
            bring(node, packages)
            said = controller.run("kilonova", "host", "add", node.name, "--address", node.address)
            [token] = [word for word in said.split() if word.startswith("join1.")]
            node.shell(typed("On a host", TOKEN=token))
            # A container may write no groups of the kernel's; a machine may.
            node.shell("echo 'cgroup_controllers = [ ]' >> /etc/libvirt/qemu.conf")
            node.run("systemctl", "restart", "libvirtd")
        yield booted


def proxy(controller: Machine, *others: str) -> None:
    """The operator's proxy, which ends TLS elsewhere, in front of this controller and others."""
    ports = {"api": 8774, "placement": 8778}
    pools = "".join(
        f"upstream {name} {{ {' '.join(f'server {one}:{port};' for one in ('127.0.0.1', *others))} }}\n"
        for name, port in ports.items()
    )
    controller.write(
        "/etc/nginx/sites-enabled/default",
        f"""{pools}
        server {{
            listen 80;
            client_max_body_size 0;
            proxy_set_header Host $host;
            location /v2.1 {{ proxy_pass http://api; }}
            location /placement/ {{ proxy_pass http://placement/; }}
        }}""",
    )
    controller.run("systemctl", "restart", "nginx")


def bring(booted: Machine, packages: list[Path]) -> None:
    folder = booted.root / "root/kilonova"
    folder.mkdir(parents=True)
    for package in packages:
        shutil.copy(package, folder)


def carry(source: Machine, target: Machine, folder: str) -> None:
    """An operator's way to bring files from one machine to another."""
    shutil.copytree(source.root / folder, target.root / folder)


def answers(controller: Machine, *words: str) -> Any:
    """What the client says in JSON."""
    return json.loads(controller.shell(f". /root/admin\nopenstack {' '.join(words)} -f json"))


def client(controller: Machine, words: str) -> None:
    controller.shell(f". /root/admin\nopenstack {words}")


def shown(controller: Machine) -> Any:
    """The server of the day."""
    return answers(controller, "server show web")


def status(controller: Machine) -> str:
    found = shown(controller)
    assert found["status"] != "ERROR", f"{found.get('fault')}\n{explained(controller)}"
    return str(found["status"])


def where(controller: Machine) -> str:
    return str(shown(controller)["OS-EXT-SRV-ATTR:host"])


def explained(controller: Machine) -> str:
    return controller.run("kilonova", "timeline", shown(controller)["id"], check=False)


def await_status(controller: Machine, wanted: str) -> None:
    await_true(
        lambda: status(controller) == wanted,
        START_SECONDS,
        lambda: f"not {wanted}: {explained(controller)}",
        pause=2,
    )


def await_ssh(cloud: Machine, controller: Machine, network: str) -> None:
    """The guest answers at its address, from where Neutron's DHCP server is."""
    [address] = [one for some in shown(controller)["addresses"].values() for one in some]
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    options += " -o ConnectTimeout=5"
    command = f"ip netns exec qdhcp-{network} ssh -i /root/key {options} root@{address}"
    await_true(
        lambda: cloud.run(*command.split(), "echo", "here", check=False).endswith("here\n"),
        START_SECONDS,
        lambda: controller.shell(". /root/admin\nopenstack console log show web"),
        pause=2,
    )


def test_controller_runs_and_every_neighbour_lets_it_in(controller: Machine) -> None:
    controller.run("kilonova", "config", "check")
    assert answers(controller, "compute", "service", "list", "-c", "Binary")
    assert answers(controller, "hypervisor", "list") == []


def test_second_controller_shares_the_work(controller: Machine, second: Machine) -> None:
    def up() -> set[tuple[str, str]]:
        found = answers(controller, "compute service list -c Binary -c Host -c State")
        return {(one["Binary"], one["Host"]) for one in found if one["State"] == "up"}

    kinds = ("nova-conductor", "nova-scheduler")
    wanted = {(kind, host) for kind in kinds for host in (CONTROLLER, SECOND)}
    await_true(lambda: wanted <= up(), START_SECONDS, up, pause=2)


def test_hosts_have_joined(controller: Machine, nodes: list[Machine]) -> None:
    def states() -> dict[str, str]:
        found = answers(controller, 'hypervisor list -c "Hypervisor Hostname" -c State')
        return {one["Hypervisor Hostname"]: one["State"] for one in found}

    for node in nodes:
        assert node.run("systemctl", "is-active", "kilonova-agent") == "active\n"
    await_true(lambda: states() == dict.fromkeys(NODES, "up"), START_SECONDS, states, pause=2)


def test_host_is_proved_with_an_image_of_glance(controller: Machine, nodes: list[Machine]) -> None:
    disk = ROOT / "build/images/tiny.qcow2"
    if not disk.exists():
        subprocess.run([ROOT / "deploy/images/tiny/build", disk], check=True)
    shutil.copy(disk, controller.root / "root/tiny.qcow2")
    client(
        controller,
        "image create tiny --disk-format qcow2 --container-format bare --file tiny.qcow2",
    )
    client(controller, "flavor create small --ram 128 --disk 1 --vcpus 1")
    client(controller, "flavor create larger --ram 160 --disk 1 --vcpus 1")
    assert "is proved" in controller.run("kilonova", "host", "prove", NODES[0])


def test_server_has_a_port_of_neutrons_and_answers_ssh(
    cloud: Machine, controller: Machine, second: Machine, nodes: list[Machine]
) -> None:
    """Its bridge is ours, the tunnel in it Neutron's, its address of Neutron's DHCP server, which
    runs on another machine."""
    network = answers(controller, "network create inside")["id"]
    client(controller, "subnet create inside --network inside --subnet-range 10.9.0.0/24")
    client(controller, "security group rule create default --protocol tcp --dst-port 22")
    cloud.shell("ssh-keygen -q -t ed25519 -N '' -f /root/key")
    shutil.copy(cloud.root / "root/key.pub", controller.root / "root/key.pub")
    client(controller, "keypair create --public-key key.pub mine")
    client(
        controller,
        "server create web --image tiny --flavor small --network inside --key-name mine "
        "--config-drive true",
    )
    await_status(controller, "ACTIVE")
    [port] = answers(controller, "port list --network inside --device-owner compute:nova")
    bound, host = answers(controller, f"port show {port['ID']}"), where(controller)
    assert (bound["binding_host_id"], bound["binding_vif_type"]) == (host, "bridge")
    assert bound["status"] == "ACTIVE"
    [node] = [node for node in nodes if node.name == host]
    assert f"tap{port['ID'][:11]}" in node.run("ls", f"/sys/class/net/brq{network[:11]}/brif")
    await_ssh(cloud, controller, network)


def test_day_goes_on_when_a_controller_stops(
    cloud: Machine, controller: Machine, second: Machine, nodes: list[Machine]
) -> None:
    network = answers(controller, "network show inside")["id"]
    controller.run("systemctl", "stop", *(f"kilonova-{name}" for name in PAIRED))
    client(controller, "server resize web --flavor larger")
    await_status(controller, "VERIFY_RESIZE")
    client(controller, "server resize confirm web")
    await_status(controller, "ACTIVE")
    await_ssh(cloud, controller, network)
    before = where(controller)
    client(controller, "server migrate --live-migration --block-migration web")
    await_true(
        lambda: where(controller) != before and status(controller) == "ACTIVE",
        START_SECONDS,
        lambda: f"{status(controller)} on {where(controller)}; {explained(controller)}",
        pause=2,
    )
    await_ssh(cloud, controller, network)
    said = controller.shell(". /root/admin\nopenstack console log show web")
    assert "guest: booting" not in said  # it went on: this host's log begins with the move
    url = answers(controller, "console url show web")["url"]
    assert url.startswith(f"{PUBLIC}/") and "token" in url
    controller.run("systemctl", "start", *(f"kilonova-{name}" for name in PAIRED))
    client(controller, "server delete --wait web")
    assert answers(controller, "port list --network inside --device-owner compute:nova") == []
    assert "all is well" in controller.run("kilonova", "doctor")


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
