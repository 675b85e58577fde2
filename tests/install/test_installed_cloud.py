# SPDX-License-Identifier: Apache-2.0
"""A cloud after the commands of docs/install.md on booted Debian machines.

Keystone, Glance and Neutron are from Debian packages. Unlike on the page, Keystone's URL is plain
HTTP, so the configuration allows plain text.
"""

from __future__ import annotations

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
from tests.install import external_services
from tests.install.installation import (
    CONTROLLER,
    NODES,
    PUBLIC,
    SECOND,
    copy_packages,
    proxy,
    read_page_commands,
    run_client,
    run_client_for_json,
)
from tests.install.machines import Machine, machine
from tests.standalone import REAL_CLOUD
from tests.waiting import await_true

#: Suites of Kilonova's clients, which real services pass like the embedded services.
SUITES = ("test_image_client.py", "test_revoked_tokens.py")
#: Services that run on both controllers.
PAIRED = ("api", "conductor", "scheduler", "placement")
START_SECONDS = 300
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def controller(
    tmp_path_factory: pytest.TempPathFactory, cloud: Machine, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp(CONTROLLER), CONTROLLER) as new_machine:
        copy_packages(new_machine, packages)
        new_machine.apt("update")
        new_machine.apt("install", "nginx-light", "python3-openstackclient")
        proxy(new_machine)
        new_machine.write("/root/admin", external_services.format_admin_environment(), 0o600)
        new_machine.shell(f". /root/admin\n{read_page_commands('On the controller')}")
        yield new_machine


@pytest.fixture(scope="module")
def second(
    tmp_path_factory: pytest.TempPathFactory, controller: Machine, packages: list[Path]
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp(SECOND), SECOND) as new_machine:
        copy_packages(new_machine, packages)
        controller.shell(read_page_commands("On the first"))
        copy_folder(controller, new_machine, "root/second")
        new_machine.shell(read_page_commands("On the second"))
        proxy(controller, new_machine.address)
        yield new_machine


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, controller: Machine, packages: list[Path]
) -> Iterator[list[Machine]]:
    with ExitStack() as running:
        new_machine = [
            running.enter_context(machine(tmp_path_factory.mktemp(name), name)) for name in NODES
        ]
        for node in new_machine:
            external_services.join(node)
            copy_packages(node, packages)
            output = controller.run("kilonova", "host", "add", node.name, "--address", node.address)
            [token] = [word for word in output.split() if word.startswith("join1.")]
            node.shell(read_page_commands("On a host", TOKEN=token))
            # Unlike a machine, a container cannot write control groups of the kernel.
            node.shell("echo 'cgroup_controllers = [ ]' >> /etc/libvirt/qemu.conf")
            node.run("systemctl", "restart", "libvirtd")
        yield new_machine


def copy_folder(source: Machine, target: Machine, folder: str) -> None:
    """Copy a folder from a machine to another."""
    shutil.copytree(source.root / folder, target.root / folder)


def show_server(controller: Machine) -> Any:
    """Return the server that all tests of the file use."""
    return run_client_for_json(controller, "server show web")


def read_status(controller: Machine) -> str:
    server = show_server(controller)
    assert server["status"] != "ERROR", f"{server.get('fault')}\n{read_timeline(controller)}"
    return str(server["status"])


def read_host(controller: Machine) -> str:
    return str(show_server(controller)["OS-EXT-SRV-ATTR:host"])


def read_timeline(controller: Machine) -> str:
    return controller.run("kilonova", "timeline", show_server(controller)["id"], check=False)


def await_status(controller: Machine, expected_status: str) -> None:
    await_true(
        lambda: read_status(controller) == expected_status,
        START_SECONDS,
        lambda: f"not {expected_status}: {read_timeline(controller)}",
        pause=2,
    )


def await_ssh(cloud: Machine, controller: Machine, network: str) -> None:
    """Wait until the guest answers ssh from the namespace of Neutron's DHCP server."""
    [address] = [
        address_record
        for some in show_server(controller)["addresses"].values()
        for address_record in some
    ]
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    options += " -o ConnectTimeout=5"
    command = f"ip netns exec qdhcp-{network} ssh -i /root/key {options} root@{address}"
    await_true(
        lambda: cloud.run(*command.split(), "echo", "here", check=False).endswith("here\n"),
        START_SECONDS,
        lambda: controller.shell(". /root/admin\nopenstack console log show web"),
        pause=2,
    )


def test_installed_controller_passes_config_check_and_serves_clients(controller: Machine) -> None:
    controller.run("kilonova", "config", "check")
    assert run_client_for_json(controller, "compute", "service", "list", "-c", "Binary")
    assert run_client_for_json(controller, "hypervisor", "list") == []


def test_second_controller_services_are_up(controller: Machine, second: Machine) -> None:
    def list_up_services() -> set[tuple[str, str]]:
        rows = run_client_for_json(controller, "compute service list -c Binary -c Host -c State")
        return {(row["Binary"], row["Host"]) for row in rows if row["State"] == "up"}

    kinds = ("nova-conductor", "nova-scheduler")
    expected_services = {(kind, host) for kind in kinds for host in (CONTROLLER, SECOND)}
    await_true(
        lambda: expected_services <= list_up_services(), START_SECONDS, list_up_services, pause=2
    )


def test_joined_hosts_are_up(controller: Machine, nodes: list[Machine]) -> None:
    def read_states() -> dict[str, str]:
        rows = run_client_for_json(controller, 'hypervisor list -c "Hypervisor Hostname" -c State')
        return {row["Hypervisor Hostname"]: row["State"] for row in rows}

    for node in nodes:
        assert node.run("systemctl", "is-active", "kilonova-agent") == "active\n"
    await_true(
        lambda: read_states() == dict.fromkeys(NODES, "up"), START_SECONDS, read_states, pause=2
    )


def test_host_verify_with_image_of_glance_succeeds(
    controller: Machine, nodes: list[Machine]
) -> None:
    disk = ROOT / "build/images/tiny.qcow2"
    if not disk.exists():
        subprocess.run([ROOT / "deploy/images/tiny/build", disk], check=True)
    shutil.copy(disk, controller.root / "root/tiny.qcow2")
    run_client(
        controller,
        "image create tiny --disk-format qcow2 --container-format bare --file tiny.qcow2",
    )
    run_client(controller, "flavor create small --ram 128 --disk 1 --vcpus 1")
    run_client(controller, "flavor create larger --ram 160 --disk 1 --vcpus 1")
    assert "is proved" in controller.run("kilonova", "host", "verify", NODES[0])


def test_server_with_port_of_neutron_answers_ssh(
    cloud: Machine, controller: Machine, second: Machine, nodes: list[Machine]
) -> None:
    """Kilonova creates the bridge.

    Neutron adds the tunnel, and its DHCP server on another machine provides the address.
    """
    network = run_client_for_json(controller, "network create inside")["id"]
    run_client(controller, "subnet create inside --network inside --subnet-range 10.9.0.0/24")
    run_client(controller, "security group rule create default --protocol tcp --dst-port 22")
    cloud.shell("ssh-keygen -q -t ed25519 -N '' -f /root/key")
    shutil.copy(cloud.root / "root/key.pub", controller.root / "root/key.pub")
    run_client(controller, "keypair create --public-key key.pub mine")
    run_client(
        controller,
        "server create web --image tiny --flavor small --network inside --key-name mine "
        "--config-drive true",
    )
    await_status(controller, "ACTIVE")
    [port] = run_client_for_json(
        controller, "port list --network inside --device-owner compute:nova"
    )
    bound, host = run_client_for_json(controller, f"port show {port['ID']}"), read_host(controller)
    assert (bound["binding_host_id"], bound["binding_vif_type"]) == (host, "bridge")
    assert bound["status"] == "ACTIVE"
    [node] = [node for node in nodes if node.name == host]
    assert f"tap{port['ID'][:11]}" in node.run("ls", f"/sys/class/net/brq{network[:11]}/brif")
    await_ssh(cloud, controller, network)


def test_server_actions_succeed_when_first_controller_stops(
    cloud: Machine, controller: Machine, second: Machine, nodes: list[Machine]
) -> None:
    network = run_client_for_json(controller, "network show inside")["id"]
    controller.run("systemctl", "stop", *(f"kilonova-{name}" for name in PAIRED))
    run_client(controller, "server resize web --flavor larger")
    await_status(controller, "VERIFY_RESIZE")
    run_client(controller, "server resize confirm web")
    await_status(controller, "ACTIVE")
    await_ssh(cloud, controller, network)
    before = read_host(controller)
    run_client(controller, "server migrate --live-migration --block-migration web")
    await_true(
        lambda: read_host(controller) != before and read_status(controller) == "ACTIVE",
        START_SECONDS,
        lambda: (
            f"{read_status(controller)} on {read_host(controller)}; {read_timeline(controller)}"
        ),
        pause=2,
    )
    await_ssh(cloud, controller, network)
    console_log = controller.shell(". /root/admin\nopenstack console log show web")
    # The log of the new host begins with the move, so it shows that the guest did not reboot.
    assert "guest: booting" not in console_log
    url = run_client_for_json(controller, "console url show web")["url"]
    assert url.startswith(f"{PUBLIC}/") and "token" in url
    controller.run("systemctl", "start", *(f"kilonova-{name}" for name in PAIRED))
    run_client(controller, "server delete --wait web")
    assert (
        run_client_for_json(controller, "port list --network inside --device-owner compute:nova")
        == []
    )
    assert "all is well" in controller.run("kilonova", "doctor")


@pytest.mark.parametrize("suite", SUITES)
def test_contract_suite_passes_against_real_services(
    cloud: Machine, controller: Machine, suite: str
) -> None:
    own = controller.shell(
        "sed -n '/^\\[identity\\]/,/^\\[image/s/^password = //p' /etc/kilonova/kilonova.conf"
    ).strip()
    words = f"{external_services.CLOUD} {external_services.PASSWORD} {own}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, str(ROOT / "tests/contract" / suite)],
        env={**os.environ, REAL_CLOUD: words},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-5000:]
