# SPDX-License-Identifier: Apache-2.0
"""Programs in forks of the supervisor of ``deploy/up``, with real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.one_machine.cloud import process_control, processes
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.process_control import find_process, find_supervisor
from deploy.one_machine.machine import preload, supervise
from deploy.one_machine.machine.preload import Entry
from deploy.packages import ROOT
from tests.waiting import await_true

MODULE = "tests.unit.deploy.preloaded_program"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Yield a cloud with a supervisor that has loaded the modules, and without programs."""
    new_cloud = Cloud(tmp_path_factory.mktemp("cloud"))
    new_cloud.run.mkdir()
    new_cloud.log("x").parent.mkdir()
    supervise.write(new_cloud.run, [])
    command = [sys.executable, "-m", "deploy.one_machine.machine.supervise", str(new_cloud.run)]
    with new_cloud.log("supervise").open("wb") as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as of ``make_environment``
        process = subprocess.Popen([*command, "--preload"], cwd=ROOT, stdout=log, env=environment)
    await_true(lambda: find_supervisor(new_cloud))
    yield new_cloud
    process.terminate()
    process.wait(20)


def start(cloud: Cloud, name: str, entry: Entry) -> None:
    """Let the supervisor start a program whose command would fail."""
    environment = {"KILONOVA_CONF": "/the/configuration"}
    program = supervise.Program(
        name, ["/absent"], str(cloud.log(name)), str(cloud.run), environment, entry=entry
    )
    supervise.write(cloud.run, [*supervise.read(cloud.run), program])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    await_true(lambda: cloud.log(name).exists() and cloud.log(name).read_text(), 60)


def read_facts(cloud: Cloud, name: str) -> list[dict[str, Any]]:
    """Return the facts that each start of the program has written."""
    lines = cloud.log(name).read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_fork_has_environment_arguments_folder_and_title_of_program(cloud: Cloud) -> None:
    start(cloud, "one", Entry(MODULE, ["stay"]))
    [facts] = read_facts(cloud, "one")
    assert facts == {
        "arguments": ["kilonova-one", "stay"],
        "environment": {"KILONOVA_CONF": "/the/configuration"},
        "folder": str(cloud.run),
        "is_leader": True,
        "input": "/dev/null",
        "title": "kilonova-one /the/configuration",
        "has_sqlalchemy": True,
    }


def test_supervisor_restarts_killed_fork_and_stops_it_on_request(cloud: Cloud) -> None:
    start(cloud, "killed", Entry(MODULE, ["stay"]))
    old = process_control.kill(cloud, "killed")
    await_true(lambda: find_process(cloud, "killed") not in (None, old))
    await_true(lambda: len(read_facts(cloud, "killed")) == 2)
    process_control.stop(cloud, "killed")


def test_supervisor_restarts_ended_fork_and_logs_status(cloud: Cloud) -> None:
    start(cloud, "short", Entry(MODULE))
    await_true(lambda: len(read_facts(cloud, "short")) >= 2)
    assert "short ended with 3 and restarts in 0.2 s" in cloud.log("supervise").read_text()
    process_control.stop(cloud, "short")


def test_fork_with_missing_network_logs_the_reason(cloud: Cloud) -> None:
    start(cloud, "lost", Entry(MODULE, network="/absent/network"))
    process_control.stop(cloud, "lost")
    text = cloud.log("lost").read_text()
    assert "lost cannot start: " in text and "/absent/network" in text
    assert "Run ./deploy/up" in text


def test_fork_does_not_keep_lock_of_killed_supervisor(cloud: Cloud) -> None:
    start(cloud, "holder", Entry(MODULE, ["stay"]))
    pid = find_process(cloud, "holder")
    assert not [
        file
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(file).endswith("supervise.lock")
    ]


def test_modules_start_no_thread_and_load_every_program_but_scheduler() -> None:
    """A fork of a process with threads may wait for ever for a lock that another thread held."""
    script = (
        "import os, sys\nfrom deploy.one_machine.machine import preload\npreload.load()\n"
        "print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules, preload.is_current())"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert process.stdout == "1 False True\n"


def test_modules_of_all_entries_exist_and_are_loaded_except_rare_ones(tmp_path: Path) -> None:
    cloud = Cloud(
        tmp_path,
        hosts=("one", "two"),
        driver="libvirt",
        broker_url="rabbit://u:p@127.0.0.1/",
        networks=True,
        volumes=True,
    )
    entries = [program.entry for program in processes.programs(cloud) if program.entry]
    assert {entry.module for entry in entries} >= set(processes.MODULES.values())
    assert all(importlib.util.find_spec(entry.module) for entry in entries)
    rarely_used = {"scheduler.service", "compute_api.console.service"}
    only_some_clouds = {
        "deploy.one_machine.services.network.host.__main__",
        "deploy.one_machine.services.volume.__main__",
    }
    assert {entry.module for entry in entries} - set(preload.MODULES) == (
        rarely_used | only_some_clouds
    )


def test_preload_is_not_current_after_change_of_loaded_file(tmp_path: Path) -> None:
    (tmp_path / "changing.py").touch()
    script = (
        "import os, sys\nfrom deploy.one_machine.machine import preload\n"
        "print(preload.is_current())\nsys.path.insert(0, sys.argv[1])\n"
        "preload.MODULES = ('changing',)\npreload.load()\nprint(preload.is_current())\n"
        "os.utime(sys.argv[1] + '/changing.py', (1, 1))\nprint(preload.is_current())"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert process.stdout.split() == ["False", "True", "False"]
