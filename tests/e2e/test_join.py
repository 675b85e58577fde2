# SPDX-License-Identifier: Apache-2.0
"""A machine joins a running cloud by two commands, is proved by a guest, and leaves nothing when it
is removed.

The machine is this one with a libvirtd of its own. The cloud has TLS and no management of its
broker, so the test does what the commands tell an administrator to do.
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


def told(
    cloud: Live, folder: Path, *words: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """``kilonova``, in a folder for what it writes."""
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
    """Run what was printed for the broker's administrator; passwords are asked for there."""
    path = folder / f"{NAME}-broker.txt"
    passwords = (
        dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    )
    commands = [shlex.split(line) for line in RABBITMQCTL.findall(complaints)]
    for verb, *rest in commands:
        if verb in ("add_user", "change_password"):
            rest.append(passwords[rest[0]])
        if verb != "change_password":  # for one who is there
            Broker.of(cloud.cloud).control(verb, *rest)
    return len(commands)


@pytest.fixture
def machine() -> Iterator[Path]:
    """The folder of a hypervisor that is no cloud's."""
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
def running(cloud: Live, folder: Path) -> Iterator[Path]:
    """Its agent; yields the log."""
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


def test_a_host_joins_is_proved_and_leaves_nothing(cloud: Live, machine: Path) -> None:
    controller, conf = str(cloud.cloud.config()), machine / "etc/agent.conf"
    added = told(cloud, machine, "--config", controller, "host", "add", NAME)
    token = added.stdout.strip()
    assert (added.returncode, token.startswith(BEGIN)) == (0, True), added
    assert administer(cloud, machine, added.stderr) == 8

    proof = Authority(cloud.home / "tls").issue(NAME, cloud.cloud.address)
    join = ("--config", str(conf), "join", "-", "--no-start", "--user", "root")
    refused = told(cloud, machine, *join, text=token)
    assert refused.returncode == 1 and "--cert-file" in refused.stderr, refused
    bring = ("--cert-file", proof.cert, "--key-file", proof.key)
    joined = told(cloud, machine, *join, *bring, text=token)
    assert joined.returncode == 0, joined
    assert f"address: {cloud.cloud.address}" in joined.stdout
    again = told(cloud, machine, *join, *bring, text=token)
    assert again.returncode == 1 and "was used at" in again.stderr, again

    with running(cloud, machine) as log:
        proved = told(cloud, machine, "--config", controller, "host", "prove", NAME)
        assert proved.returncode == 0, (proved, log.read_text()[-3000:])
        assert [line.split(":")[0] for line in proved.stdout.splitlines()[:3]] == [
            "created",
            "reached",
            "removed",
        ]
        known = told(cloud, machine, "--config", controller, "host", "add", NAME)
        assert known.returncode == 1 and "has joined" in known.stderr, known
    removed = told(cloud, machine, "--config", controller, "host", "remove", NAME)
    assert removed.returncode == 0, removed
    assert administer(cloud, machine, removed.stderr) == 4
    assert NAME not in Broker.of(cloud.cloud).control("list_users")
    assert NAME not in told(cloud, machine, "--config", controller, "hosts").stdout
    admin = cloud.seed.admin
    assert all(one.host != NAME for one in admin.compute.services())
    await_true(
        lambda: all(one.name != NAME for one in admin.placement.resource_providers()), SETTLE
    )
    cloud.judge()
