# SPDX-License-Identifier: Apache-2.0
"""Each mutation still applies to the code, and says which decision it is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, OutOfDate, every
from tests.mutations.__main__ import copy_tree

MUTATIONS = {one.id: one for one in every()}


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_applies(name: str) -> None:
    one = MUTATIONS[name]
    changed = one.applied((ROOT / one.file).read_text())
    compile(changed, one.file, "exec")
    assert one.protects and list((ROOT / "docs/decisions").glob(f"{one.decision}-*.md"))
    assert one.tests and all((ROOT / test.split("::")[0]).exists() for test in one.tests)
    for test in re.findall(r"\btest_\w+", one.k):
        assert any(test in text for text in texts(one)), f"its tests have no {test}"


def texts(one: Mutation) -> list[str]:
    """What stands in its tests' files."""
    paths = [ROOT / test.split("::")[0] for test in one.tests]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else (path,))]
    return [file.read_text() for file in files]


def test_there_are_enough_and_each_once() -> None:
    assert len(MUTATIONS) == len(list(every())) >= 46


def test_one_that_is_out_of_date_says_so() -> None:
    one = Mutation("a", "f", "x = 1", "x = 2", "p", "0001", ("t",))
    assert one.applied("x = 1\n") == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(OutOfDate, match="mend tests/mutations"):
            one.applied(text)


def test_copy_of_tree_has_files_of_every_mutation_and_no_environment(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for one in MUTATIONS.values():
        assert (tmp_path / one.file).read_text() == (ROOT / one.file).read_text()
        assert all((tmp_path / test.split("::")[0]).exists() for test in one.tests), one.id
    assert not (tmp_path / ".venv").exists() and not (tmp_path / ".git").exists()
    assert not list(tmp_path.rglob("__pycache__"))
