# SPDX-License-Identifier: Apache-2.0
"""A machine joins a running cloud with two commands, is proved with a guest, and is removed.

The machine is this machine with another libvirtd. The cloud has TLS and no management API of its
broker, so the test runs the commands that ``kilonova`` prints for the administrator.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.security.host_joins import BEGIN
from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.machine import libvirtd
from tests.e2e.conftest import new_home
from tests.e2e.live import PROGRAMS, SETTLE, Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

NAME = "joined"
RABBITMQCTL = re.compile(r"^  rabbitmqctl (.+)$", re.MULTILINE)


def run_kilonova(
    cloud: Live, folder: Path, *words: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``kilonova`` in a folder, to which it writes files."""
    return subprocess.run(
        [str(PROGRAMS / "kilonova"), *words],
        cwd=folder,
        env=cloud.environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def administer(cloud: Live, folder: Path, complaints: str) -> int:
    """Run the printed rabbitmqctl commands with their passwords, and return their number."""
    path = folder / f"{NAME}-broker.txt"
    passwords = (
        dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    )
    commands = [shlex.split(line) for line in RABBITMQCTL.findall(complaints)]
    for verb, *rest in commands:
        if verb in ("add_user", "change_password"):
            rest.append(passwords[rest[0]])
        # The command change_password is for existing users only.
        if verb != "change_password":
            Broker.of(cloud.cloud).control(verb, *rest)
    return len(commands)


@pytest.fixture
def machine() -> Iterator[Path]:
    """Yield the folder of a hypervisor that belongs to no cloud."""
    folder = new_home()
    uri = libvirtd.start(folder / "libvirt")
    (folder / "etc").mkdir(mode=0o700)
    (folder / "etc/agent.conf").write_text(
        f"[DEFAULT]\nstate_dir = {folder}/state\n[agent]\nlibvirt_uri = {uri}\n"
        "reserved_memory_mb = 0\n[migration]\ntransfer_port = 0\n"
    )
    yield folder
    libvirtd.stop(folder / "libvirt")
    shutil.rmtree(folder)


@contextmanager
def run_agent(cloud: Live, folder: Path) -> Iterator[Path]:
    """Run the agent of the machine for a with block, and yield the path of its log."""
    log = folder / "agent.log"
    with log.open("w") as file:
        agent = subprocess.Popen(
            [str(PROGRAMS / "kilonova-agent"), "--config", str(folder / "etc/agent.conf")],
            env=cloud.environment,
            stdout=file,
            stderr=file,
        )
        try:
            yield log
        finally:
            agent.terminate()
            agent.wait(30)


def test_host_is_joined_verified_and_removed_without_remains(cloud: Live, machine: Path) -> None:
    controller, conf = str(cloud.cloud.config()), machine / "etc/agent.conf"
    added = run_kilonova(cloud, machine, "--config", controller, "host", "add", NAME)
    token = added.stdout.strip()
    assert (added.returncode, token.startswith(BEGIN)) == (0, True), added
    # Five commands for the user of the host, and five for the user that joins.
    assert administer(cloud, machine, added.stderr) == 10

    proof = Authority(cloud.home / "tls").issue(NAME, cloud.cloud.address)
    join = ("--config", str(conf), "join", "-", "--no-start", "--user", "root")
    refused = run_kilonova(cloud, machine, *join, text=token)
    assert refused.returncode == 1 and "--cert-file" in refused.stderr, refused
    bring = ("--cert-file", proof.cert, "--key-file", proof.key)
    joined = run_kilonova(cloud, machine, *join, *bring, text=token)
    assert joined.returncode == 0, joined
    assert f"address: {cloud.cloud.address}" in joined.stdout
    again = run_kilonova(cloud, machine, *join, *bring, text=token)
    assert again.returncode == 1 and "was used at" in again.stderr, again

    with run_agent(cloud, machine) as log:
        proved = run_kilonova(cloud, machine, "--config", controller, "host", "verify", NAME)
        assert proved.returncode == 0, (proved, log.read_text()[-3000:])
        assert [line.split(":")[0] for line in proved.stdout.splitlines()[:3]] == [
            "created",
            "reached",
            "removed",
        ]
        second_add = run_kilonova(cloud, machine, "--config", controller, "host", "add", NAME)
        assert second_add.returncode == 1 and "has joined" in second_add.stderr, second_add
    removed = run_kilonova(cloud, machine, "--config", controller, "host", "remove", NAME)
    assert removed.returncode == 0, removed
    assert administer(cloud, machine, removed.stderr) == 4
    assert NAME not in Broker.of(cloud.cloud).control("list_users")
    assert NAME not in run_kilonova(cloud, machine, "--config", controller, "hosts").stdout
    admin = cloud.seed.admin
    assert all(record.host != NAME for record in admin.compute.services())
    await_true(
        lambda: all(record.name != NAME for record in admin.placement.resource_providers()), SETTLE
    )
    cloud.assert_healthy()
