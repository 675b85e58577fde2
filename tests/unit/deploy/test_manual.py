# SPDX-License-Identifier: Apache-2.0
"""Man pages say all of the command line, and a formatter of man pages finds nothing wrong in
them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.operator.commands import COMMANDS
from deploy.operator.main import parser
from deploy.packaging import manual

PAGES = manual.pages()


def plain(page: str) -> str:
    """What stands in it, in one line, without roff's marks."""
    text = re.sub(r"^\.\w+ ?", "", page, flags=re.MULTILINE)
    return " ".join(text.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\").split())


def page_of(words: tuple[str, ...]) -> str:
    return plain(PAGES[f"kilonova-{words[0]}.1"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_in_its_page_with_all_that_it_takes(words: tuple[str, ...]) -> None:
    command = dict(manual.verbs(parser()))[words]
    page = page_of(words)
    assert " ".join(command.format_usage().removeprefix("usage: ").split()) in page
    assert COMMANDS[words][2][1:] in page
    for action in manual.options(command)[1:]:
        if action.help:
            assert manual.argument_name(action) in page
            assert " ".join(action.help.split())[1:] in page


def test_first_page_has_every_command_in_a_line() -> None:
    first = plain(PAGES["kilonova.1"])
    for words, (_, _, about) in COMMANDS.items():
        assert f"kilonova {' '.join(words)} {about[0].upper()}{about[1:]}." in first
        assert f"kilonova-{words[0]}(1)" in first


def test_every_service_has_a_page() -> None:
    assert {name for name in PAGES if name.endswith(".8")} == {
        f"kilonova-{name}.8"
        for name in (
            *("api", "conductor", "scheduler", "agent"),
            *("placement", "metadata", "console", "image-gateway"),
        )
    }
    assert "/etc/kilonova/agent.conf" in plain(PAGES["kilonova-agent.8"])
    assert "/etc/kilonova/agent.conf" not in plain(PAGES["kilonova-api.8"])


@pytest.mark.parametrize("text", [".so /etc/passwd", "'br", "a\\fBb"])
def test_text_is_never_a_request(text: str) -> None:
    line = manual.escape(text)
    assert not line.startswith((".", "'"))
    assert "\\f" not in line


def test_formatter_warns_of_nothing(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    assert manual.main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
    formatted = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", "-K", "utf8", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (formatted.returncode, formatted.stderr) == (0, "")
