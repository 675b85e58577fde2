# SPDX-License-Identifier: Apache-2.0
"""Sandboxed helpers and programs in real processes: their permissions, limits and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compute_agent.sandbox import client, landlock
from compute_agent.sandbox.client import HelperResult, Helpers, SandboxSettings
from compute_agent.sandbox.lockdown import HelperLimits
from compute_agent.verb_context import Cancelled, VerbContext
from tests.other_users import PYTHON_OF_ALL_USERS
from tests.unit.compute_agent.sandbox_functions import read_status
from tests.waiting import await_true

MODULE = "tests.unit.compute_agent.sandbox_functions"
LIMITS = HelperLimits(memory=1 << 30, cpu=5, seconds=20)
is_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="gives helpers another user, which takes root"
)


@pytest.fixture(scope="module")
def helpers() -> Iterator[Helpers]:
    new_helpers = Helpers(SandboxSettings(user="nobody"))
    yield new_helpers
    new_helpers.close()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[int]:
    """Yield an open file of mode 600 below a folder of mode 700."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("bytes of a tenant")
    file = os.open(path, os.O_RDWR)
    yield file
    os.close(file)


def call(
    helpers: Helpers,
    function: str,
    file: int,
    limits: HelperLimits = LIMITS,
    run: VerbContext | None = None,
    **arguments: Any,
) -> HelperResult:
    return helpers.call(f"{MODULE}:{function}", [file], limits, run, **arguments)


def test_sandbox_helper_has_limits_and_may_use_only_passed_file(
    helpers: Helpers, secret: int
) -> None:
    result = call(helpers, "look", secret)
    assert result.status == 0, result.reason
    report = json.loads(result.output)
    assert report["read"] == "bytes of a tenant" and report["files"] == [0, 1, 2, 3]
    assert {*report["environment"]} <= {*client.ENVIRONMENT, "LC_CTYPE"}
    assert set(report["refused"].values()) == {"EPERM"}
    assert report["limits"] == {"AS": 1 << 30, "CPU": 5, "FSIZE": 0, "NOFILE": 64, "CORE": 0}


@is_root
def test_sandbox_helper_runs_as_configured_user(helpers: Helpers, secret: int) -> None:
    assert helpers.user is not None
    user, group = helpers.user
    report = json.loads(call(helpers, "look", secret).output)
    assert (report["user"], report["group"], report["groups"]) == ([user] * 3, [group] * 3, [])


@is_root
def test_sandbox_without_setuid_capability_uses_agent_user_and_logs_once(tmp_path: Path) -> None:
    """The agent has no CAP_SETUID under the systemd unit, or as another user than root."""
    (tmp_path / "file").touch(0o600)
    (tmp_path / "file").write_text("bytes")
    code = (
        f"import logging, os, sys; logging.basicConfig(); from compute_agent.sandbox import client\n"
        f"helpers = client.Helpers(client.SandboxSettings())\n"
        f"for _ in range(2): print(helpers.call('{MODULE}:look', [os.open(sys.argv[1], os.O_RDONLY)], "
        f"helpers.limits()).output.decode())\n"
        f"import pathlib\n"
        f"lent = {{pathlib.Path(sys.argv[1]): True}}\n"
        f"ended = helpers.execute(['/bin/cat', client.name(0)], lent, helpers.limits())\n"
        f"assert ended.output == b'bytes', ended\n"
        f"os.chown(sys.argv[1], 65534, -1)\n"
        f"ended = helpers.execute(['/bin/cat', client.name(0)], lent, helpers.limits())\n"
        f"assert ended.output == b'bytes' and os.stat(sys.argv[1]).st_uid == 65534, ended\n"
        f"print(helpers.execute(['/bin/cat', '/proc/self/status'], lent, helpers.limits()).output.decode())"
    )
    process = subprocess.run(
        [
            "setpriv",
            "--bounding-set=-setuid,-setgid",
            sys.executable,
            "-c",
            code,
            tmp_path / "file",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    *reports, status = process.stdout.split("\n", 2)
    for line in reports:
        report = json.loads(line)
        assert report["user"] == [0] * 3 and set(report["refused"].values()) == {"EPERM"}, report
    process_status = {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in status.splitlines())
    }
    assert {process_status[f"Cap{kind}"] for kind in ("Eff", "Prm", "Inh", "Amb")} == {
        "0" * 16
    } and process_status["NoNewPrivs"] == "1"
    assert process.stderr.count("run as the same user") == 1


@is_root
def test_sandbox_program_as_agent_user_cannot_open_agent_files(tmp_path: Path) -> None:
    """Without CAP_SETUID, as under the systemd unit, Landlock limits the files of the program."""
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    for name in ("lent", "key"):
        (tmp_path / name).write_text("5ecret")
    code = (
        "import json, sys; from pathlib import Path; from compute_agent.sandbox import client\n"
        "helpers, folder = client.Helpers(client.SandboxSettings()), Path(sys.argv[1])\n"
        "assert helpers.user is None\n"
        "lent = {folder / 'lent': False}\n"
        "def told(*command): return helpers.execute(command, lent, helpers.limits(file=100))\n"
        "tried = [('/bin/cat', str(folder / 'key')), ('/bin/ls', str(folder)), ('/bin/cat', '/etc/passwd'),\n"
        "         ('/bin/cp', client.name(0), str(folder / 'new')), ('/bin/rm', str(folder / 'key')),\n"
        "         ('/bin/dd', 'if=/dev/zero', 'count=1', f'of={client.name(0)}')]\n"
        "read = told('/bin/cat', client.name(0)).output.decode()\n"
        "print(json.dumps([read, *(told(*command).status for command in tried)]))"
    )
    process = subprocess.run(
        ["setpriv", "--bounding-set=-setuid,-setgid", sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    read, *others = json.loads(process.stdout)
    assert read == "5ecret" and 0 not in others, others
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "lent"]
    assert "Landlock" not in process.stderr


@pytest.mark.slice("guests")
def test_sandbox_kills_helper_beyond_cpu_limit(helpers: Helpers, secret: int) -> None:
    assert (
        call(helpers, "spin", secret, HelperLimits(memory=1 << 30, cpu=1, seconds=20)).status
        == -signal.SIGKILL
    )


def test_sandbox_limits_memory_file_size_time_and_output_of_helper(
    helpers: Helpers, secret: int
) -> None:
    assert "MemoryError" in call(helpers, "eat", secret).reason
    assert "File too large" in call(helpers, "write", secret).reason
    began = time.monotonic()
    result = call(
        helpers, "sleep", secret, HelperLimits(memory=1 << 30, cpu=1, seconds=0.3), seconds=60
    )
    assert (result.status, result.why) == (
        -signal.SIGKILL,
        "time",
    ) and time.monotonic() - began < 10
    assert "took too long" in result.reason
    assert len(call(helpers, "chatter", secret).output) == client.MAX_OUTPUT_BYTES


def test_sandbox_helper_crash_is_returned_as_signal_status(helpers: Helpers, secret: int) -> None:
    assert call(helpers, "vanish", secret).status == -signal.SIGSEGV


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def find_server_pid(helpers: Helpers) -> int:
    assert helpers._server is not None
    return helpers._server.pid


def test_sandbox_cancel_ends_helper(helpers: Helpers, secret: int) -> None:
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(Cancelled):
        call(
            helpers,
            "sleep",
            secret,
            run=VerbContext(lambda name: None, cancelled.is_set),
            seconds=60,
        )
    await_true(
        lambda: not list_children(find_server_pid(helpers)),
        5,
        lambda: "a helper outlived who asked",
    )


def test_sandbox_restarts_killed_fork_server(helpers: Helpers, secret: int) -> None:
    assert call(helpers, "look", secret).status == 0
    os.kill(find_server_pid(helpers), signal.SIGKILL)
    assert call(helpers, "look", secret).status == 0


@pytest.mark.slice("guests")
def test_sandbox_processes_end_when_agent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        f"import os, sys, threading; from compute_agent.sandbox import client; helpers = client.helpers()\n"
        f"file = os.open(sys.argv[1], os.O_RDONLY); helpers.call('{MODULE}:look', [file], helpers.limits())\n"
        f"print(helpers._server.pid, flush=True)\n"
        f"helpers.call('{MODULE}:sleep', [file], helpers.limits(), seconds=60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "file"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as agent:
        assert agent.stdout is not None
        server = int(agent.stdout.readline())
        await_true(
            lambda: any(list_children(child) for child in list_children(server)),
            10,
            lambda: "no helper was started",
        )
        # The process that watched the first helper may not have ended yet.
        [watch] = [child for child in list_children(server) if list_children(child)]
        [helper] = list_children(watch)
        agent.kill()
    for pid in (server, watch, helper):
        await_true(lambda pid=pid: is_over(pid), 10, lambda pid=pid: f"{pid}: {read_status(pid)}")  # type: ignore[misc]


def is_over(pid: int) -> bool:
    try:
        return read_status(pid)["State"].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def execute_program(helpers: Helpers, path: Path, write: bool, *command: str) -> HelperResult:
    return helpers.execute(
        command, {path: write}, HelperLimits(memory=1 << 30, cpu=5, seconds=20, file=1 << 20)
    )


@is_root
def test_sandbox_program_opens_only_lent_file(helpers: Helpers, tmp_path: Path) -> None:
    path, other = tmp_path / "disk", tmp_path / "other"
    for file in (path, other):
        file.touch(0o600)
        file.write_text("bytes")
    assert execute_program(helpers, path, False, "/bin/cat", client.name(0)).output == b"bytes"
    zeros = ("/bin/dd", "if=/dev/zero", f"of={client.name(0)}", "bs=9", "count=1")
    assert execute_program(helpers, path, True, *zeros).status == 0
    assert path.read_bytes() == bytes(9) and path.stat().st_uid == os.geteuid()
    assert execute_program(helpers, path, False, "/bin/cat", str(other)).status != 0
    assert (
        execute_program(helpers, path, True, "/bin/false").status == 1
        and path.stat().st_uid == os.geteuid()
    )


@is_root
def test_program_run_or_take_back_returns_file_lent_by_killed_agent(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.touch(0o600)
    user = client.helpers().user
    assert user is not None
    os.chown(path, user[0], -1)
    assert (
        execute_program(client.helpers(), path, True, "/bin/true").status == 0
        and path.stat().st_uid == os.geteuid()
    )
    os.chown(path, user[0], -1)
    client.take_back(path)
    assert path.stat().st_uid == os.geteuid()


def test_sandbox_program_has_no_network(helpers: Helpers, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o644)
    code = "import socket; socket.socket()"
    result = execute_program(
        helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code
    )
    assert "PermissionError: [Errno 1]" in result.reason


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.kill(os.getppid(), 0)",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    ],
)
def test_sandbox_program_cannot_start_or_signal_processes(
    helpers: Helpers, tmp_path: Path, code: str
) -> None:
    (tmp_path / "file").touch(0o644)
    result = execute_program(
        helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code
    )
    assert result.status != 0
    assert "PermissionError: [Errno 1]" in result.reason


def test_sandbox_program_can_start_threads(helpers: Helpers, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o644)
    code = (
        "import threading; one = threading.Thread(target=print, args=('here',)); "
        "one.start(); one.join()"
    )
    result = execute_program(
        helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code
    )
    assert (result.status, result.output.strip()) == (0, b"here")


def test_sandbox_helpers_with_missing_user_raise_value_error_naming_user() -> None:
    with pytest.raises(ValueError, match="there is no user no-such-user"):
        Helpers(SandboxSettings(user="no-such-user"))
