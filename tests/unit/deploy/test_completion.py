# SPDX-License-Identifier: Apache-2.0
"""Shells complete every command, option and choice of ``kilonova``, and the names of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from common.security.broker_names import ROLES
from deploy.operator.main import parser
from deploy.packaging import completion
from deploy.packaging.manual import options, verbs

#: Completes each line of its input, each of whose words ends with a bar; a line for each.
TRY = """
while IFS='|' read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _shtab_kilonova
    (IFS=' '; echo "${COMPREPLY[*]}")
done
"""
COMMANDS = dict(verbs(parser()))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(completion.write_completion("bash") + TRY)
    return path


def completed(script: Path, *lines: str) -> list[list[str]]:
    """What may stand in place of the last word of each line; one that ends with a space has an
    empty last word."""
    given = "".join(
        "".join(f"{word}|" for word in ("kilonova", *line.split(" "))) + "\n" for line in lines
    )
    done = subprocess.run(
        ["bash", "--norc", script],
        cwd=script.parent,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_words_that_may_follow_are_those_of_the_command_line(script: Path) -> None:
    below = {
        words: sorted(other[-1] for other in COMMANDS if other and other[:-1] == words)
        for words in COMMANDS
    }
    leading = [words for words in COMMANDS if below[words]]
    offered = completed(script, *(" ".join((*words, "")) for words in leading))
    assert [sorted(words) for words in offered] == [below[words] for words in leading]


def test_options_are_those_of_each_command(script: Path) -> None:
    flags = [
        sorted(flag for action in options(command) for flag in action.option_strings)
        for command in COMMANDS.values()
    ]
    offered = completed(script, *(" ".join((*words, "-")) for words in COMMANDS))
    assert [sorted(words) for words in offered] == flags


def test_what_begins_so_is_offered_and_nothing_else(script: Path) -> None:
    assert completed(script, "host dr", "host drain node1 --pa", "nothing") == [
        ["drain"],
        ["--parallel"],
        [],
    ]


def test_choices_are_offered_where_they_are_meant(script: Path) -> None:
    assert completed(script, "broker add ", "broker add --file x ", "broker add api ") == [
        list(ROLES),
        list(ROLES),
        [],
    ]


def test_files_are_offered_where_a_file_is_meant(script: Path) -> None:
    (script.parent / "node1.key").touch()
    assert completed(
        script,
        "--config nod",
        "--config node1.key host dr",
        "host add node1 --file nod",
        "explain --flavor nod",
        "host add nod",
    ) == [["node1.key"], ["drain"], ["node1.key"], [], []]


def test_zsh_completion_describes_every_command_and_option() -> None:
    script = completion.write_completion("zsh")
    assert script.startswith("#compdef kilonova\n")
    for words, command in COMMANDS.items():
        name = "_".join(("_shtab_kilonova", *words, "options"))
        entries = script.partition(f"\n{name}=(\n")[2].partition("\n)\n")[0]
        for action in options(command):
            described = f'{{{",".join(action.option_strings)}}}"['
            assert all(f"{flag}[" in entries for flag in action.option_strings) or (
                described in entries
            )
