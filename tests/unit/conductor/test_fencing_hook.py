# SPDX-License-Identifier: Apache-2.0
"""The fencing hook: only its exit with 0 is proof, and what it says of a host is said to all who
ask together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.domain import errors
from conductor.hosts import fencing_hook


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Callable[[str], None]]:
    """A hook that notes each host that it is called for in "asked", and then does this."""

    def made(
        does: str, timeout: float = 10, shared: float = fencing_hook.SHARED_SECONDS
    ) -> Callable[[str], None]:
        program = tmp_path / "hook"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{does}\n')
        program.chmod(0o755)
        found = fencing_hook.hook(str(program), timeout, shared)
        assert found is not None
        return found

    return made


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_without_a_program_there_is_no_hook() -> None:
    assert fencing_hook.hook("", 10) is None


def test_exit_with_0_is_proof(make: Callable[..., Callable[[str], None]], tmp_path: Path) -> None:
    make("exit 0")("host one")
    assert asked(tmp_path) == ["host one"]


@pytest.mark.parametrize(
    ("does", "timeout", "said"),
    [
        ("exit 3", 10, "ended with 3; host h1 may still run its guests"),
        ("kill -9 $$", 10, "ended with -9"),
        ("exec sleep 20", 0.5, "within 0.5 seconds"),
    ],
)
def test_anything_else_proves_nothing(
    make: Callable[..., Callable[[str], None]], does: str, timeout: float, said: str
) -> None:
    with pytest.raises(errors.Conflict, match=said):
        make(does, timeout)("h1")


def test_program_that_is_not_there_proves_nothing(tmp_path: Path) -> None:
    fence = fencing_hook.hook(str(tmp_path / "nothing"), 10)
    assert fence is not None
    with pytest.raises(errors.Conflict, match=r"cannot be run; .*fencing_hook"):
        fence("h1")


@pytest.mark.parametrize("status", [0, 1])
def test_those_who_ask_together_get_one_answer_for_each_host(
    make: Callable[..., Callable[[str], None]], tmp_path: Path, status: int
) -> None:
    fence = make(f"sleep 0.3; exit {status}")

    def proved(host: str) -> bool:
        try:
            fence(host)
        except errors.Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(proved, ["h1", "h2"] * 8)) == {status == 0}
    assert sorted(asked(tmp_path)) == ["h1", "h2"]


def test_who_asks_later_has_it_made_sure_again(
    make: Callable[..., Callable[[str], None]], tmp_path: Path
) -> None:
    fence = make("exit 0", shared=0)
    fence("h1")
    fence("h1")
    assert asked(tmp_path) == ["h1", "h1"]
