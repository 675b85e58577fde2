# SPDX-License-Identifier: Apache-2.0
"""A cloud after the ten commands at the beginning of docs/install.md.

The machines reach each other by ssh. The first run of ``kilonova setup controller`` is killed. The
tests depend on each other and run in the order of the file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.packages import ROOT
from tests.install import external_services
from tests.install.documentation import fill_words
from tests.install.installation import (
    CONTROLLER,
    NODES,
    SECOND,
    copy_packages,
    proxy,
    read_page_commands,
    run_client,
    run_client_for_json,
)
from tests.install.machines import Machine, machine
from tests.waiting import await_true

START_SECONDS = 300
#: Run a command, wait until the command prints "step 5" or ends, kill it, and show the output.
KILLED = """{} > output &
while kill -0 $! && ! grep -q '^step 5' output; do sleep 0.2; done
kill -KILL $!
cat output"""
CONFIGURATION = "/etc/kilonova/kilonova.conf"
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def machines(
    tmp_path_factory: pytest.TempPathFactory, cloud: Machine, packages: list[Path]
) -> Iterator[dict[str, Machine]]:
    """Yield empty machines with packages and ssh, the proxy, and Neutron's agents on hosts."""
    with ExitStack() as running:
        by_name = {
            name: running.enter_context(machine(tmp_path_factory.mktemp(name), name))
            for name in (CONTROLLER, SECOND, *NODES)
        }
        first, *others = by_name.values()
        first.apt("update")
        first.apt("install", "nginx-light", "openssh-client", "python3-openstackclient")
        first.write("/root/admin", external_services.format_admin_environment(), 0o600)
        first.shell("ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")
        first.write("/root/.ssh/config", "StrictHostKeyChecking accept-new\n", 0o600)
        key = (first.root / "root/.ssh/id_ed25519.pub").read_text()
        for other in others:
            other.apt("update")
            other.apt("install", "openssh-server")
            other.write("/root/.ssh/authorized_keys", key, 0o600)
        for name in NODES:
            external_services.join(by_name[name])
        for new_machine in by_name.values():
            copy_packages(new_machine, packages)
        proxy(first)
        yield by_name


@pytest.fixture(scope="module")
def first(machines: dict[str, Machine]) -> Machine:
    return machines[CONTROLLER]


def split_commands(heading: str) -> list[str]:
    """Return the commands of the page below a heading. A command may have several lines."""
    return re.sub(r"\\\n *", "", read_page_commands(heading)).splitlines()


def run_as_admin(first: Machine, command: str) -> str:
    return first.shell(f". /root/admin\n{command}")


def read_server(first: Machine) -> Any:
    return run_client_for_json(first, "server show first")


def test_setup_controller_continues_after_kill(
    machines: dict[str, Machine], first: Machine
) -> None:
    # Another file of this ring may have left a user with another password.
    run_as_admin(first, "openstack user delete kilonova || true")
    install, setup, install_second, bundle = split_commands("Controllers")
    setup = f"{setup} --yes"
    first.shell(install)
    first.write(CONFIGURATION, "[identity]\nallow_plain_text = true\n")
    output = run_as_admin(first, KILLED.format(setup))
    assert "to do" in output and "step 6" not in output
    output = run_as_admin(first, setup)
    assert "done " in output and "nova-conductor" in output
    first.shell(install_second)
    assert "nova-scheduler" in first.shell(bundle.replace(" - |", " --yes - |"))
    proxy(first, machines[SECOND].address)


def test_setup_repeated_without_admin_changes_nothing(first: Machine) -> None:
    *_, bundle = split_commands("Controllers")
    passwords = (first.root / CONFIGURATION[1:]).read_text()
    for command in ("kilonova setup controller --yes", bundle):
        output = first.shell(command)
        assert "This command changed nothing" in output and "to do" not in output
    assert (first.root / CONFIGURATION[1:]).read_text() == passwords
    mode = first.run("stat", "--format=%a %U %G", CONFIGURATION)
    assert mode == "640 root kilonova\n"


def test_short_way_hosts_are_up(machines: dict[str, Machine], first: Machine) -> None:
    for command in split_commands("Hosts"):
        first.shell(command)
    for name in NODES:
        # Unlike a machine, a container cannot write control groups of the kernel.
        machines[name].shell("echo 'cgroup_controllers = [ ]' >> /etc/libvirt/qemu.conf")
        machines[name].run("systemctl", "restart", "libvirtd")

    def read_states() -> dict[str, str]:
        rows = run_client_for_json(first, 'hypervisor list -c "Hypervisor Hostname" -c State')
        return {row["Hypervisor Hostname"]: row["State"] for row in rows}

    await_true(
        lambda: read_states() == dict.fromkeys(NODES, "up"), START_SECONDS, read_states, pause=2
    )
    again = machines[NODES[0]].run("kilonova", "setup", "live-migration", "--yes")
    assert "This command changed nothing" in again


def test_short_way_server_is_active_and_migrates_live(first: Machine) -> None:
    disk = ROOT / "build/images/tiny.qcow2"
    if not disk.exists():
        subprocess.run([ROOT / "deploy/images/tiny/build", disk], check=True)
    shutil.copy(disk, first.root / "root/tiny.qcow2")
    run_client(first, "image create short --disk-format qcow2 --file tiny.qcow2")
    run_client(first, "network create short")
    run_client(first, "subnet create short --network short --subnet-range 10.8.0.0/24")
    words = {"IMAGE": "short", "NETWORK": "short"}
    for command in split_commands("The first server"):
        run_as_admin(first, fill_words(command, words))
    server = read_server(first)
    assert server["status"] == "ACTIVE", server
    host = server["OS-EXT-SRV-ATTR:host"]
    run_client(first, "server migrate --live-migration --block-migration first")
    await_true(
        lambda: (
            read_server(first)["OS-EXT-SRV-ATTR:host"] != host
            and read_server(first)["status"] == "ACTIVE"
        ),
        START_SECONDS,
        lambda: first.run("kilonova", "timeline", server["id"], check=False),
        pause=2,
    )
    run_client(first, "server delete --wait first")
    assert "all is well" in first.run("kilonova", "doctor")
