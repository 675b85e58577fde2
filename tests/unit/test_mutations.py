# SPDX-License-Identifier: Apache-2.0
"""Each mutation applies to the code and names a decision and tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, OutOfDate, read_mutations
from tests.mutations.__main__ import copy_tree


def test_mutations_apply_and_name_existing_tests() -> None:
    mutations = list(read_mutations())
    assert len({mutation.id for mutation in mutations}) == len(mutations) > 0
    assert [problem for mutation in mutations for problem in find_problems(mutation)] == []


def find_problems(mutation: Mutation) -> list[str]:
    """List what is out of date in a mutation."""
    problems = []
    try:
        changed = mutation.apply_to((ROOT / mutation.file).read_text())
        compile(changed, mutation.file, "exec")
    except (OutOfDate, SyntaxError, FileNotFoundError) as problem:
        problems.append(f"{mutation.id}: {problem}")
    if not mutation.protects or not list(
        (ROOT / "docs/decisions").glob(f"{mutation.decision}-*.md")
    ):
        problems.append(f"{mutation.id}: no decision {mutation.decision}")
    paths = [ROOT / test.split("::")[0] for test in mutation.tests]
    names = [
        *(test.split("::")[-1].partition("[")[0] for test in mutation.tests if "::" in test),
        *re.findall(r"\btest_\w+", mutation.k),
    ]
    if not paths or not all(path.exists() for path in paths):
        return [*problems, f"{mutation.id}: a file of its tests does not exist"]
    texts = [text for path in paths for text in read_texts(path)]
    return problems + [
        f"{mutation.id}: its tests have no {name}"
        for name in names
        if not any(name in text for text in texts)
    ]


@cache
def read_texts(path: Path) -> list[str]:
    """Read a test file, or all test files of a folder."""
    files = path.rglob("*.py") if path.is_dir() else (path,)
    return [file.read_text() for file in files]


def test_mutation_raises_when_text_is_not_found_once() -> None:
    mutation = Mutation("a", "f", "x = 1", "x = 2", "p", "0001", ("t",))
    assert mutation.apply_to("x = 1\n") == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(OutOfDate):
            mutation.apply_to(text)


def test_copy_of_tree_has_files_of_every_mutation_and_no_environment(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for mutation in read_mutations():
        assert (tmp_path / mutation.file).read_text() == (ROOT / mutation.file).read_text()
        assert all((tmp_path / test.split("::")[0]).exists() for test in mutation.tests)
    assert not (tmp_path / ".venv").exists() and not (tmp_path / ".git").exists()
    assert not list(tmp_path.rglob("__pycache__"))
