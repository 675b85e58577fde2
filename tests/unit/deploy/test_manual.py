# SPDX-License-Identifier: Apache-2.0
"""The generated man pages: their contents, and their syntax as checked by groff."""

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


def strip_roff(page: str) -> str:
    """Return the text of a man page in one line, without roff requests and escapes."""
    text = re.sub(r"^\.\w+ ?", "", page, flags=re.MULTILINE)
    return " ".join(text.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\").split())


def page_of(words: tuple[str, ...]) -> str:
    return strip_roff(PAGES[f"kilonova-{words[0]}.1"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_man_page_has_usage_and_options_of_every_command(words: tuple[str, ...]) -> None:
    command = dict(manual.verbs(parser()))[words]
    page = page_of(words)
    assert " ".join(command.format_usage().removeprefix("usage: ").split()) in page
    assert COMMANDS[words][2][1:] in page
    for action in manual.options(command)[1:]:
        if action.help:
            assert manual.argument_name(action) in page
            assert " ".join(action.help.split())[1:] in page


def test_main_man_page_lists_every_command() -> None:
    first = strip_roff(PAGES["kilonova.1"])
    for words, (_, _, about) in COMMANDS.items():
        assert f"kilonova {' '.join(words)} {about[0].upper()}{about[1:]}." in first
        assert f"kilonova-{words[0]}(1)" in first


def test_man_pages_exist_for_every_service() -> None:
    assert {name for name in PAGES if name.endswith(".8")} == {
        f"kilonova-{name}.8"
        for name in (
            *("api", "conductor", "scheduler", "agent"),
            *("placement", "metadata", "console", "image-gateway"),
        )
    }
    assert "/etc/kilonova/agent.conf" in strip_roff(PAGES["kilonova-agent.8"])
    assert "/etc/kilonova/agent.conf" not in strip_roff(PAGES["kilonova-api.8"])


@pytest.mark.parametrize("text", [".so /etc/passwd", "'br", "a\\fBb"])
def test_man_page_escape_never_yields_roff_request(text: str) -> None:
    line = manual.escape(text)
    assert not line.startswith((".", "'"))
    assert "\\f" not in line


def test_man_pages_format_without_groff_warnings(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    assert manual.main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
    result = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", "-K", "utf8", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
