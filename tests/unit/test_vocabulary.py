# SPDX-License-Identifier: Apache-2.0
"""The words of docs/glossary.md are kept: what this project once had words of its own for has the
field's.

A name in the code is split into its words (``hasBegun``, ``has_begun``); none of them may be among
REPLACED.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy")
#: A word that is not used for names any more -> the field's.
REPLACED = {
    "bell": "wake, notify",
    "errand": "plan",
    "fitting": "assignment",
    "forgive": "discard",
    "greet": "register",
    "hands": "dependencies",
    "insists": "retry until done",
    "lapses": "needs a lease",
    "lively": "capable of live migration",
    "owe": "debt",
    "owes": "debt",
    "patience": "timeout",
    "placing": "claim",
    "steering": "control",
    "tale": "events",
    "tales": "events",
    "teller": "sender",
    "telling": "notifications",
    "told": "reported, shown, notified",
    "wish": "request",
    "wishes": "requests",
}
#: Class names that two modules may have, and why.
SHARED_CLASSES = {
    "Failure": "of a step; and of a command of deploy",
    "Reader": "of limits; and of packets",
    "Records": "of the network service; and of guests that are to come",
    "Result": "of a command; and of a job of the tests",
    "UnifiedLimits": "Keystone's; and as the API's driver of quotas",
    "Way": "how a server leaves its host; and how a libvirtd calls another",
}


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Every file of the product but upgrades, which name what once was."""
    return tuple(
        (path, ast.parse(path.read_text()))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "versions" not in path.parts
    )


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a file gives a name to, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def test_names_have_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}: {REPLACED[word]}"
        for path, tree in trees()
        for name, line in names(tree)
        for word in words(name) & set(REPLACED)
    ]
    found += [
        f"{path.relative_to(ROOT)}: {REPLACED[word]}"
        for path, _ in trees()
        for word in words(path.stem) & set(REPLACED)
    ]
    assert found == []


def test_public_class_names_are_unique() -> None:
    places: dict[str, set[str]] = {}
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    shared = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert set(shared) == set(SHARED_CLASSES), shared


@pytest.mark.parametrize(
    ("name", "found"), [("wakeBell", {"wake", "bell"}), ("_HAS_WISH", {"has", "wish"})]
)
def test_names_are_split_into_words(name: str, found: set[str]) -> None:
    assert words(name) == found
