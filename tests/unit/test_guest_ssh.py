# SPDX-License-Identifier: Apache-2.0
"""``tests.e2e.guests.Guest``: ssh is repeated until a login succeeds, and never after it.

After a login the command may have run.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.guests import IN, Guest

SILENT = "echo 'Connection timed out during banner exchange' >&2; exit 255"


@pytest.fixture
def script_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that takes scripts for the first, second and later runs of ssh.

    The function returns a guest and a function that counts the runs.
    """

    def prepare(*scripts: str) -> tuple[Guest, Any]:
        runs = tmp_path / "runs"
        cases = "".join(f"{number}) {script};;\n" for number, script in enumerate(scripts, 1))
        (tmp_path / "ssh").write_text(
            f"#!/bin/sh\necho >> {runs}\ncase $(wc -l < {runs}) in\n{cases}esac\n"
        )
        (tmp_path / "ssh").chmod(0o755)
        live: Any = SimpleNamespace(home=tmp_path)
        return Guest(live, "id", "name", "203.0.113.1"), lambda: len(runs.read_text().splitlines())

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return prepare


def test_guest_run_repeats_until_a_login_succeeds(script_ssh: Any) -> None:
    guest, runs = script_ssh(SILENT, SILENT, f"echo '{IN}it' >&2; cat")
    assert guest.run("a command", stdin=b"given") == "given"
    assert runs() == 3


@pytest.mark.parametrize("status", [0, 1])
def test_guest_can_run_follows_the_exit_status_of_the_command(script_ssh: Any, status: int) -> None:
    guest, runs = script_ssh(f"echo '{IN}it' >&2; exit {status}")
    assert guest.can_run("a command") == (status == 0)
    assert runs() == 1


def test_guest_can_run_is_not_repeated_after_a_login(script_ssh: Any) -> None:
    guest, runs = script_ssh(f"echo '{IN}it' >&2; echo 'Connection closed' >&2; exit 255")
    with pytest.raises(AssertionError, match="Connection closed"):
        guest.can_run("a command")
    assert runs() == 1


def test_guest_ssh_tries_once_when_the_guest_is_silent(script_ssh: Any) -> None:
    guest, runs = script_ssh(SILENT)
    assert guest.ssh("true", 5).returncode == 255
    assert runs() == 1


def test_guest_ssh_timeout_after_a_login_returns_255_with_the_login_marker(script_ssh: Any) -> None:
    guest, runs = script_ssh(f"echo '{IN}it' >&2; exec sleep 20")
    late = guest.ssh("a command", 2)
    assert late.returncode == 255 and IN in late.stderr
    assert runs() == 1
