# SPDX-License-Identifier: Apache-2.0
"""The completion scripts for bash and zsh: commands, options, choices and file names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from common.security.broker_names import ROLES
from deploy.operator.main import parser
from deploy.packaging import completion
from deploy.packaging.manual import options, verbs

#: Bash code that reads lines, in which each word ends with a bar, and prints the completions of
#: each in a line.
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


def complete_lines(script: Path, *lines: str) -> list[list[str]]:
    """Return the completions of the last word of each line.

    A line that ends with a space has an empty last word.
    """
    input_lines = "".join(
        "".join(f"{word}|" for word in ("kilonova", *line.split(" "))) + "\n" for line in lines
    )
    done = subprocess.run(
        ["bash", "--norc", script],
        cwd=script.parent,
        input=input_lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completion_offers_subcommands_of_each_command(script: Path) -> None:
    below = {
        words: sorted(other[-1] for other in COMMANDS if other and other[:-1] == words)
        for words in COMMANDS
    }
    leading = [words for words in COMMANDS if below[words]]
    offered = complete_lines(script, *(" ".join((*words, "")) for words in leading))
    assert [sorted(words) for words in offered] == [below[words] for words in leading]


def test_bash_completion_offers_options_of_each_command(script: Path) -> None:
    flags = [
        sorted(flag for action in options(command) for flag in action.option_strings)
        for command in COMMANDS.values()
    ]
    offered = complete_lines(script, *(" ".join((*words, "-")) for words in COMMANDS))
    assert [sorted(words) for words in offered] == flags


def test_bash_completion_offers_only_words_with_prefix(script: Path) -> None:
    assert complete_lines(script, "host dr", "host drain node1 --pa", "nothing") == [
        ["drain"],
        ["--parallel"],
        [],
    ]


def test_bash_completion_offers_choices_of_argument(script: Path) -> None:
    assert complete_lines(script, "broker add ", "broker add --file x ", "broker add api ") == [
        list(ROLES),
        list(ROLES),
        [],
    ]


def test_bash_completion_offers_files_only_for_file_options(script: Path) -> None:
    (script.parent / "node1.key").touch()
    assert complete_lines(
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
        name = "_".join(("_shtab_kilonova", *words, "options")).replace("-", "_")
        entries = script.partition(f"\n{name}=(\n")[2].partition("\n)\n")[0]
        for action in options(command):
            described = f'{{{",".join(action.option_strings)}}}"['
            assert all(f"{flag}[" in entries for flag in action.option_strings) or (
                described in entries
            )
