# SPDX-License-Identifier: Apache-2.0
"""What documents say of the code is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs/architecture.md").read_text().split("## Where is …?")[1]
WALKS = (ROOT / "docs/how-to-add.md").read_text()
#: File or folder, and the name in it, if one is given.
PLACES = re.findall(r"`([a-z_]+/[\w./]+)`(?: \(`(\w+)`\))?", TABLE)


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_place_in_architecture_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    if name:
        defined = rf"^(def|class) {name}\b|^{name}\b[^=\n]*=|^\w+(, \w+)*, {name}\b.* = "
        assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[\w./]+)`", WALKS))))
def test_file_in_how_to_add_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_architecture_answers_twenty_questions() -> None:
    assert sum(line.startswith("| ") for line in TABLE.splitlines()) >= 22
