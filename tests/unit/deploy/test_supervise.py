# SPDX-License-Identifier: Apache-2.0
"""The supervisor of ``deploy/up`` with real processes."""

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

#: Command of a process that does not end by itself.
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def await_condition(condition: Callable[[], object], seconds: float = 10) -> None:
    await_true(condition, seconds, "it happens")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    # The process can end before or while the file is read.
    except (FileNotFoundError, ProcessLookupError):
        return False


def make_program(
    folder: Path, name: str, command: list[str], grace: float = 1
) -> supervise.Program:
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
    """Yield a cloud of two sleeping processes."""
    new_cloud = Cloud(tmp_path)
    new_cloud.run.mkdir()
    (tmp_path / "log").mkdir()
    supervise.write(
        new_cloud.run,
        [make_program(tmp_path, "one", SLEEPER), make_program(tmp_path, "two", SLEEPER)],
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.one_machine.machine.supervise", str(new_cloud.run)],
        cwd=ROOT,
        stdout=(tmp_path / "log/supervise.log").open("ab"),
    )
    await_condition(lambda: find_process(new_cloud, "one") and find_process(new_cloud, "two"))
    yield new_cloud
    process.terminate()
    process.wait(20)


def test_supervisor_restarts_killed_process_and_keeps_others(cloud: Cloud) -> None:
    two = find_process(cloud, "two")
    old = process_control.kill(cloud, "one")
    await_condition(lambda: find_process(cloud, "one") not in (None, old))
    assert find_process(cloud, "two") == two


def test_supervisor_keeps_stopped_process_down_until_start(cloud: Cloud) -> None:
    old = find_process(cloud, "one")
    process_control.stop(cloud, "one")
    assert old is not None and not is_alive(old)
    with pytest.raises(Failure, match="does not run"):
        process_control.kill(cloud, "one")
    assert process_control.start(cloud, "one") != old


def test_supervisor_ends_process_with_kill_file_without_sigterm(
    cloud: Cloud, tmp_path: Path
) -> None:
    # On SIGTERM this process writes a line and continues, so only SIGKILL ends it.
    polite = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: print('ended', flush=True))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    supervise.write(cloud.run, [make_program(tmp_path, "polite", [sys.executable, "-c", polite])])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = tmp_path / "polite.log"
    await_condition(lambda: log.exists() and log.read_text() == "ready\n")
    pid = find_process(cloud, "polite")
    (tmp_path / "marker").write_text(supervise.KILL)
    (tmp_path / "marker").rename(cloud.run / "polite.down")
    await_condition(lambda: find_process(cloud, "polite") is None)
    assert pid is not None and not is_alive(pid) and log.read_text() == "ready\n"


def test_supervisor_shutdown_ends_all_processes(cloud: Cloud) -> None:
    pids = [find_process(cloud, "one"), find_process(cloud, "two")]
    assert lifecycle.shut_down(cloud, 20)
    assert not any(is_alive(pid) for pid in pids if pid)
    assert not lifecycle.shut_down(cloud)


def test_supervisor_shutdown_ends_processes_of_hosts_together(cloud: Cloud, tmp_path: Path) -> None:
    """Each process ends only after both got SIGTERM. Stopped in turn, they would be killed."""
    # The process waits for SIGTERM. It writes without a buffer, because a signal may interrupt it.
    patient = (
        "import os, pathlib, signal, sys, time\ndef end(*_):\n    here.touch()\n"
        # The file of the other process shows that the other got SIGTERM too.
        "    while not there.exists(): time.sleep(0.01)\n    os.write(1, b'ended\\n'); sys.exit()\n"
        "here, there = map(pathlib.Path, sys.argv[1:])\nsignal.signal(signal.SIGTERM, end)\n"
        "os.write(1, b'ready\\n')\ntime.sleep(600)"
    )
    files = [str(tmp_path / name) for name in ("first", "second")]
    logs = [tmp_path / f"{name}.log" for name in ("agent", "agent-2")]
    supervise.write(
        cloud.run,
        [
            make_program(tmp_path, log.stem, [sys.executable, "-c", patient, *order], grace=10)
            for log, order in zip(logs, (files, files[::-1]), strict=True)
        ],
    )
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    await_condition(lambda: all(log.exists() and log.read_text() == "ready\n" for log in logs))
    assert lifecycle.shut_down(cloud, 30)
    assert [log.read_text() for log in logs] == ["ready\nended\n"] * 2


def test_supervised_processes_end_when_supervisor_is_killed(cloud: Cloud) -> None:
    pids = [find_process(cloud, "one"), find_process(cloud, "two")]
    os.kill(find_supervisor(cloud) or 0, signal.SIGKILL)
    await_condition(lambda: not any(is_alive(pid) for pid in pids if pid))
    assert find_supervisor(cloud) is None


def test_supervisor_reload_stops_removed_and_starts_added_processes_only(
    cloud: Cloud, tmp_path: Path
) -> None:
    one, two = find_process(cloud, "one"), find_process(cloud, "two")
    supervise.write(
        cloud.run,
        [make_program(tmp_path, "one", SLEEPER), make_program(tmp_path, "three", SLEEPER)],
    )
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    await_condition(lambda: find_process(cloud, "three") and find_process(cloud, "two") is None)
    assert find_process(cloud, "one") == one and two is not None and not is_alive(two)


def test_supervisor_kills_process_ignoring_sigterm_with_children(
    cloud: Cloud, tmp_path: Path
) -> None:
    # The process and its child ignore SIGTERM.
    stubborn = (
        "import os,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)"
    )
    supervise.write(
        cloud.run, [make_program(tmp_path, "stubborn", [sys.executable, "-c", stubborn])]
    )
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = tmp_path / "stubborn.log"
    await_condition(lambda: log.exists() and log.read_text().strip())
    pid, child = find_process(cloud, "stubborn"), int(log.read_text())
    process_control.stop(cloud, "stubborn")
    await_condition(lambda: pid is not None and not is_alive(pid) and not is_alive(child))


def test_supervisor_keeps_retrying_unstartable_process(cloud: Cloud, tmp_path: Path) -> None:
    supervise.write(cloud.run, [make_program(tmp_path, "broken", ["/nonexistent/program"])])
    os.kill(find_supervisor(cloud) or 0, signal.SIGHUP)
    log = cloud.log("supervise")
    await_condition(lambda: log.read_text().count("broken cannot be started") >= 3)
    assert find_supervisor(cloud) is not None


def test_supervisor_refuses_folder_of_another_supervisor(cloud: Cloud) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "deploy.one_machine.machine.supervise", str(cloud.run)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        timeout=10,
    )
    assert second.returncode == 1 and b"another supervisor" in second.stderr


def test_ports_of_two_clouds_are_disjoint() -> None:
    first, second = Ports().taken(), Ports.from_base(25300).taken()
    assert len({*first.values(), *second.values()}) == 2 * Ports.COUNT


def test_purge_refuses_folder_not_home_of_cloud(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(Failure, match="not the home"):
        lifecycle.purge(Cloud(tmp_path))
    assert (tmp_path / "precious").exists()
