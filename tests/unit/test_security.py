# SPDX-License-Identifier: Apache-2.0
"""docs/security.md names the test of each security property; what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| (ST-\d+) \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE
)


def test_every_property_has_one_row() -> None:
    assert [name for name, _ in ROWS] == [f"ST-{number}" for number in range(1, 41)]


@pytest.mark.parametrize(("name", "where"), ROWS, ids=[name for name, _ in ROWS])
def test_what_a_row_names_is_there(name: str, where: str) -> None:
    if where.startswith("not applicable: "):
        return
    for named in re.findall(r"`([^`]+)`", where) or pytest.fail(f"{name} names no test"):
        path, _, test = named.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in found if test else any(one.startswith("test_") for one in found), named
