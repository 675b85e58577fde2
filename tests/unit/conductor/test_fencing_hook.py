# SPDX-License-Identifier: Apache-2.0
"""The fencing hook: its exit status as proof, and one call for simultaneous requests of a host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.domain import errors
from conductor.hosts import fencing_hook


@pytest.fixture
def new_hook_of(tmp_path: Path) -> Callable[..., Callable[[str], None]]:
    """Return a factory of hooks that append their host to the file "asked" and run a command."""

    def write_hook(
        command: str, timeout: float = 10, shared: float = fencing_hook.SHARED_SECONDS
    ) -> Callable[[str], None]:
        program = tmp_path / "hook"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{command}\n')
        program.chmod(0o755)
        new_hook = fencing_hook.hook(str(program), timeout, shared)
        assert new_hook is not None
        return new_hook

    return write_hook


def read_hosts(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_fencing_hook_without_program_is_none() -> None:
    assert fencing_hook.hook("", 10) is None


def test_fencing_hook_with_exit_status_0_is_accepted_as_proof(
    new_hook_of: Callable[..., Callable[[str], None]], tmp_path: Path
) -> None:
    new_hook_of("exit 0")("host one")
    assert read_hosts(tmp_path) == ["host one"]


@pytest.mark.parametrize(
    ("command", "timeout", "message"),
    [
        ("exit 3", 10, "ended with 3; host h1 may still run its guests"),
        ("kill -9 $$", 10, "ended with -9"),
        ("exec sleep 20", 0.5, "within 0.5 seconds"),
    ],
)
def test_failing_killed_or_hanging_fencing_hook_raises_conflict(
    new_hook_of: Callable[..., Callable[[str], None]], command: str, timeout: float, message: str
) -> None:
    with pytest.raises(errors.Conflict, match=message):
        new_hook_of(command, timeout)("h1")


def test_fencing_hook_with_missing_program_raises_conflict(tmp_path: Path) -> None:
    fence = fencing_hook.hook(str(tmp_path / "nothing"), 10)
    assert fence is not None
    with pytest.raises(errors.Conflict, match=r"cannot be run; .*fencing_hook"):
        fence("h1")


@pytest.mark.parametrize("status", [0, 1])
def test_fencing_hook_runs_once_a_host_for_simultaneous_calls(
    new_hook_of: Callable[..., Callable[[str], None]], tmp_path: Path, status: int
) -> None:
    fence = new_hook_of(f"sleep 0.3; exit {status}")

    def is_fenced(host: str) -> bool:
        try:
            fence(host)
        except errors.Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(is_fenced, ["h1", "h2"] * 8)) == {status == 0}
    assert sorted(read_hosts(tmp_path)) == ["h1", "h2"]


def test_fencing_hook_runs_again_for_a_later_call(
    new_hook_of: Callable[..., Callable[[str], None]], tmp_path: Path
) -> None:
    fence = new_hook_of("exit 0", shared=0)
    fence("h1")
    fence("h1")
    assert read_hosts(tmp_path) == ["h1", "h1"]
