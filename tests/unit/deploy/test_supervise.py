# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real processes: a death is followed by a start, an end by silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.one_machine.cloud import lifecycle, process_control
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.one_machine.cloud.process_control import find_process, find_supervisor
from deploy.one_machine.machine import supervise
from deploy.packages import ROOT
from deploy.progress import Failure
from tests.waiting import await_true

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]  # does not end by itself


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    await_true(condition, seconds, "it happens")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # It ends before or while its file is read.
        return False


def program(folder: Path, name: str, command: list[str], grace: float = 1) -> supervise.Program:
    return supervise.Program(
        name,
        command,
        str(folder / f"{name}.log"),
        str(ROOT),
        {"PATH": os.environ["PATH"]},
        grace=grace,
    )


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud of two sleeping processes."""
    made = Cloud(tmp_path)
    made.run.mkdir()
    (tmp_path / "log").mkdir()
    supervise.write(
        made.run, [program(tmp_path, "one", SLEEPER), program(tmp_path, "two", SLEEPER)]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.one_machine.machine.supervise", str(made.run)],
        cwd=ROOT,
        stdout=(tmp_path / "log/supervise.log").open("ab"),
    )
    until(lambda: find_process(made, "one") and find_process(made, "two"))
    yield made
    process.terminate()
    process.wait(20)


def test_killed_process_is_started_again_and_the_other_left_alone(cloud: Cloud) -> None:
    two = find_process(cloud, "two")
    old = process_control.kill(cloud, "one")
    until(lambda: find_process(cloud, "one") not in (None, old))
    assert find_process(cloud, "two") == two


def test_stopped_process_stays_down_until_it_is_started(cloud: Cloud) -> None:
    old = find_process(cloud, "one")
    process_control.stop(cloud, "one")
    assert old is not None and not alive(old)
    with pytest.raises(Failure, match="does not run"):
        process_control.kill(cloud, "one")
    assert process_control.start(cloud, "one") != old


def test_power_cut_asks_nobody(cloud: Cloud, tmp_path: Path) -> None:
    # goes on until it is killed
    polite = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: print('ended', flush=True))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    supervise.write(cloud.run, [program(tmp_path, "polite", [sys.executable, "-c", polite])])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = tmp_path / "polite.log"
    until(lambda: log.exists() and log.read_text() == "ready\n")
    pid = find_process(cloud, "polite")
    (tmp_path / "marker").write_text(supervise.KILL)
    (tmp_path / "marker").rename(cloud.run / "polite.down")
    until(lambda: find_process(cloud, "polite") is None)
    assert pid is not None and not alive(pid) and log.read_text() == "ready\n"


def test_term_stops_everything(cloud: Cloud) -> None:
    pids = [find_process(cloud, "one"), find_process(cloud, "two")]
    assert lifecycle.shut_down(cloud, 20)
    assert not any(alive(pid) for pid in pids if pid)
    assert not lifecycle.shut_down(cloud)


def test_those_of_several_hosts_are_ended_together(cloud: Cloud, tmp_path: Path) -> None:
    """Each ends only when the other was told to, so one after the other they would be killed."""
    # until it is told
    patient = (
        "import pathlib, signal, sys, time\ndef told(*_):\n    here.touch()\n"
        # Only the other's file tells it.
        "    while not there.exists(): time.sleep(0.01)\n    print('ended', flush=True); sys.exit()\n"
        "here, there = map(pathlib.Path, sys.argv[1:])\nsignal.signal(signal.SIGTERM, told)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    files = [str(tmp_path / name) for name in ("first", "second")]
    logs = [tmp_path / f"{name}.log" for name in ("agent", "agent-2")]
    supervise.write(
        cloud.run,
        [
            program(tmp_path, log.stem, [sys.executable, "-c", patient, *order], grace=10)
            for log, order in zip(logs, (files, files[::-1]), strict=True)
        ],
    )
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    until(lambda: all(log.exists() and log.read_text() == "ready\n" for log in logs))
    assert lifecycle.shut_down(cloud, 30)
    assert [log.read_text() for log in logs] == ["ready\nended\n"] * 2


def test_killed_supervisor_takes_its_processes_along(cloud: Cloud) -> None:
    pids = [find_process(cloud, "one"), find_process(cloud, "two")]
    os.kill(find_supervisor(cloud) or 0, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids if pid))
    assert find_supervisor(cloud) is None


def test_new_list_stops_starts_and_keeps(cloud: Cloud, tmp_path: Path) -> None:
    one, two = find_process(cloud, "one"), find_process(cloud, "two")
    supervise.write(
        cloud.run, [program(tmp_path, "one", SLEEPER), program(tmp_path, "three", SLEEPER)]
    )
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    until(lambda: find_process(cloud, "three") and find_process(cloud, "two") is None)
    assert find_process(cloud, "one") == one and two is not None and not alive(two)


def test_process_that_ignores_term_is_killed_with_its_children(
    cloud: Cloud, tmp_path: Path
) -> None:
    # until killed
    stubborn = (
        "import os,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)"
    )
    supervise.write(cloud.run, [program(tmp_path, "stubborn", [sys.executable, "-c", stubborn])])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = tmp_path / "stubborn.log"
    until(lambda: log.exists() and log.read_text().strip())
    pid, child = find_process(cloud, "stubborn"), int(log.read_text())
    process_control.stop(cloud, "stubborn")
    until(lambda: pid is not None and not alive(pid) and not alive(child))


def test_process_that_cannot_run_is_tried_ever_later(cloud: Cloud, tmp_path: Path) -> None:
    supervise.write(cloud.run, [program(tmp_path, "broken", ["/nonexistent/program"])])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = cloud.log("supervise")
    until(lambda: log.read_text().count("broken cannot be started") >= 3)
    assert find_supervisor(cloud) is not None


def test_second_supervisor_of_a_folder_is_refused(cloud: Cloud) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "deploy.one_machine.machine.supervise", str(cloud.run)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        timeout=10,
    )
    assert second.returncode == 1 and b"another supervisor" in second.stderr


def test_two_clouds_share_no_port() -> None:
    first, second = Ports().taken(), Ports.from_base(25300).taken()
    assert len({*first.values(), *second.values()}) == 2 * Ports.COUNT


def test_only_the_home_of_a_cloud_is_purged(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(Failure, match="not the home"):
        lifecycle.purge(Cloud(tmp_path))
    assert (tmp_path / "precious").exists()
