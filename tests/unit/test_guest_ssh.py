# SPDX-License-Identifier: Apache-2.0
"""How the tests of real guests ask them (tests/e2e/guests.py): again while a guest does not let ssh
in, and never again once it did, for the command may have run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.guests import IN, Guest

SILENT = "echo 'Connection timed out during banner exchange' >&2; exit 255"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes what ssh does the first time, the second and so on; returns a guest and who tells how
    often it was run."""

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


def test_guest_that_does_not_let_in_is_asked_again(answers: Any) -> None:
    guest, runs = answers(SILENT, SILENT, f"echo '{IN}it' >&2; cat")
    assert guest.run("a command", given=b"given") == "given"
    assert runs() == 3


@pytest.mark.parametrize("status", [0, 1])
def test_what_a_command_says_is_its_answer(answers: Any, status: int) -> None:
    guest, runs = answers(f"echo '{IN}it' >&2; exit {status}")
    assert guest.does("a command") == (status == 0)
    assert runs() == 1


def test_command_that_may_have_run_is_not_run_again(answers: Any) -> None:
    guest, runs = answers(f"echo '{IN}it' >&2; echo 'Connection closed' >&2; exit 255")
    with pytest.raises(AssertionError, match="Connection closed"):
        guest.does("a command")
    assert runs() == 1


def test_where_silence_is_expected_one_try_is_all(answers: Any) -> None:
    guest, runs = answers(SILENT)
    assert guest.ssh("true", 5).returncode == 255
    assert runs() == 1


def test_answer_that_comes_too_late_is_none_and_tells_how_far_it_came(answers: Any) -> None:
    guest, runs = answers(f"echo '{IN}it' >&2; exec sleep 20")
    late = guest.ssh("a command", 2)
    assert late.returncode == 255 and IN in late.stderr
    assert runs() == 1
