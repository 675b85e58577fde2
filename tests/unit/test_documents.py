# SPDX-License-Identifier: Apache-2.0
"""The files, names and tests that pages of docs/ mention exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from deploy.standalone.identity.bootstrap import SERVICES

ROOT = Path(__file__).resolve().parents[2]


def test_architecture_names_existing_files_and_definitions() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("## Where is …?")[1]
    # A file or folder, and the name in it, if the page has one.
    places = re.findall(r"`([a-z_]+/[\w./]+)`(?: \(`(\w+)`\))?", table)
    assert places
    assert [place for place in places if not is_defined(*place)] == []


def is_defined(path: str, name: str) -> bool:
    """True if the path exists and, unless the name is empty, defines it."""
    defined = rf"^(def|class) {name}\b|^{name}\b[^=\n]*=|^\w+(, \w+)*, {name}\b.* = "
    return (ROOT / path).exists() and (
        not name or re.search(defined, (ROOT / path).read_text(), re.MULTILINE) is not None
    )


def test_how_to_add_names_existing_files() -> None:
    paths = re.findall(r"`([a-z_]+/[\w./]+)`", (ROOT / "docs/how-to-add.md").read_text())
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_security_properties_name_existing_tests() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rows = re.findall(r"^\| (ST-\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [f"ST-{number}" for number in range(1, 41)]
    assert [name for name, tests in rows if not names_existing_tests(tests)] == []


def names_existing_tests(text: str) -> bool:
    """True if a row names at least one test file or test and all of them exist."""
    if text.startswith("not applicable: "):
        return True
    references = re.findall(r"`([^`]+)`", text)
    for reference in references:
        path, _, test = reference.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if not (test in tests if test else any(name.startswith("test_") for name in tests)):
            return False
    return bool(references)


def test_docs_name_services_of_catalogue_as_bootstrap_does() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"openstack service create --name (\S+) (\S+)", text)
    assert names
    assert [(kind, name) for name, kind in names] == [(kind, SERVICES[kind]) for _, kind in names]
