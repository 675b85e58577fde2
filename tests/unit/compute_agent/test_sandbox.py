# SPDX-License-Identifier: Apache-2.0
"""Helpers that read what tenants wrote: what they may not do, and how they end."""

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
    made = Helpers(SandboxSettings(user="nobody"))
    yield made
    made.close()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[int]:
    """An open file that only its owner may open, below a folder that only its owner may enter."""
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


def test_a_helper_has_its_files_and_nothing_else(helpers: Helpers, secret: int) -> None:
    ended = call(helpers, "look", secret)
    assert ended.status == 0, ended.reason
    told = json.loads(ended.output)
    assert told["read"] == "bytes of a tenant" and told["files"] == [0, 1, 2, 3]
    assert {*told["environment"]} <= {*client.ENVIRONMENT, "LC_CTYPE"}
    assert set(told["refused"].values()) == {"EPERM"}
    assert told["limits"] == {"AS": 1 << 30, "CPU": 5, "FSIZE": 0, "NOFILE": 64, "CORE": 0}


@is_root
def test_a_helper_is_nobody(helpers: Helpers, secret: int) -> None:
    assert helpers.user is not None
    user, group = helpers.user
    told = json.loads(call(helpers, "look", secret).output)
    assert (told["user"], told["group"], told["groups"]) == ([user] * 3, [group] * 3, [])


@is_root
def test_a_process_without_the_right_keeps_its_user_and_says_so(tmp_path: Path) -> None:
    """As under the unit of systemd, or unprivileged."""
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
    done = subprocess.run(
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
    *looked, status = done.stdout.split("\n", 2)
    for line in looked:
        told = json.loads(line)
        assert told["user"] == [0] * 3 and set(told["refused"].values()) == {"EPERM"}, told
    has = {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in status.splitlines())
    }
    assert {has[f"Cap{kind}"] for kind in ("Eff", "Prm", "Inh", "Amb")} == {"0" * 16} and has[
        "NoNewPrivs"
    ] == "1"
    assert done.stderr.count("run as its own") == 1


@is_root
def test_a_program_as_the_agents_own_user_opens_no_file_of_the_agents(tmp_path: Path) -> None:
    """As under the unit of systemd: the kernel's Landlock keeps it from what its user may open."""
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
    done = subprocess.run(
        ["setpriv", "--bounding-set=-setuid,-setgid", sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    read, *others = json.loads(done.stdout)
    assert read == "5ecret" and 0 not in others, others
    assert sorted(one.name for one in tmp_path.iterdir()) == ["key", "lent"]
    assert "Landlock" not in done.stderr


@pytest.mark.slice("guests")
def test_too_much_time_ends_it(helpers: Helpers, secret: int) -> None:
    assert (
        call(helpers, "spin", secret, HelperLimits(memory=1 << 30, cpu=1, seconds=20)).status
        == -signal.SIGKILL
    )


def test_too_much_of_anything_ends_it(helpers: Helpers, secret: int) -> None:
    assert "MemoryError" in call(helpers, "eat", secret).reason
    assert "File too large" in call(helpers, "write", secret).reason
    began = time.monotonic()
    ended = call(
        helpers, "sleep", secret, HelperLimits(memory=1 << 30, cpu=1, seconds=0.3), seconds=60
    )
    assert (ended.status, ended.why) == (-signal.SIGKILL, "time") and time.monotonic() - began < 10
    assert "took too long" in ended.reason
    assert len(call(helpers, "chatter", secret).output) == client.MAX_OUTPUT_BYTES


def test_one_that_vanishes_is_a_definite_answer(helpers: Helpers, secret: int) -> None:
    assert call(helpers, "vanish", secret).status == -signal.SIGSEGV


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def server_of(helpers: Helpers) -> int:
    assert helpers._server is not None
    return helpers._server.pid


def test_who_leaves_leaves_no_helper(helpers: Helpers, secret: int) -> None:
    gone = threading.Event()
    threading.Timer(0.3, gone.set).start()
    with pytest.raises(Cancelled):
        call(helpers, "sleep", secret, run=VerbContext(lambda name: None, gone.is_set), seconds=60)
    await_true(lambda: not children(server_of(helpers)), 5, lambda: "a helper outlived who asked")


def test_fork_server_that_was_killed_is_started_again(helpers: Helpers, secret: int) -> None:
    assert call(helpers, "look", secret).status == 0
    os.kill(server_of(helpers), signal.SIGKILL)
    assert call(helpers, "look", secret).status == 0


@pytest.mark.slice("guests")
def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
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
            lambda: any(children(one) for one in children(server)),
            10,
            lambda: "no helper was started",
        )
        # The process that watched the first helper may not have ended yet.
        [watch] = [one for one in children(server) if children(one)]
        [helper] = children(watch)
        agent.kill()
    for pid in (server, watch, helper):
        await_true(lambda pid=pid: is_over(pid), 10, lambda pid=pid: f"{pid}: {read_status(pid)}")  # type: ignore[misc]


def is_over(pid: int) -> bool:
    try:
        return read_status(pid)["State"].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def executed(helpers: Helpers, path: Path, write: bool, *command: str) -> HelperResult:
    return helpers.execute(
        command, {path: write}, HelperLimits(memory=1 << 30, cpu=5, seconds=20, file=1 << 20)
    )


@is_root
def test_a_program_opens_the_file_it_was_lent_and_no_other(
    helpers: Helpers, tmp_path: Path
) -> None:
    path, other = tmp_path / "disk", tmp_path / "other"
    for one in (path, other):
        one.touch(0o600)
        one.write_text("bytes")
    assert executed(helpers, path, False, "/bin/cat", client.name(0)).output == b"bytes"
    zeros = ("/bin/dd", "if=/dev/zero", f"of={client.name(0)}", "bs=9", "count=1")
    assert executed(helpers, path, True, *zeros).status == 0
    assert path.read_bytes() == bytes(9) and path.stat().st_uid == os.geteuid()
    assert executed(helpers, path, False, "/bin/cat", str(other)).status != 0
    assert (
        executed(helpers, path, True, "/bin/false").status == 1
        and path.stat().st_uid == os.geteuid()
    )


@is_root
def test_file_that_was_lent_when_the_agent_died_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.touch(0o600)
    user = client.helpers().user
    assert user is not None
    os.chown(path, user[0], -1)
    assert (
        executed(client.helpers(), path, True, "/bin/true").status == 0
        and path.stat().st_uid == os.geteuid()
    )
    os.chown(path, user[0], -1)
    client.take_back(path)
    assert path.stat().st_uid == os.geteuid()


def test_a_program_has_no_network(helpers: Helpers, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o644)
    code = "import socket; socket.socket()"
    ended = executed(helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code)
    assert "PermissionError: [Errno 1]" in ended.reason


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
def test_program_makes_no_process_and_signals_none(
    helpers: Helpers, tmp_path: Path, code: str
) -> None:
    (tmp_path / "file").touch(0o644)
    ended = executed(helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code)
    assert ended.status != 0
    assert "PermissionError: [Errno 1]" in ended.reason


def test_program_makes_threads(helpers: Helpers, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o644)
    code = (
        "import threading; one = threading.Thread(target=print, args=('here',)); "
        "one.start(); one.join()"
    )
    ended = executed(helpers, tmp_path / "file", False, str(PYTHON_OF_ALL_USERS), "-Ic", code)
    assert (ended.status, ended.output.strip()) == (0, b"here")


def test_user_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no user no-such-user"):
        Helpers(SandboxSettings(user="no-such-user"))
