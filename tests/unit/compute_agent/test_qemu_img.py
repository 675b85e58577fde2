# SPDX-License-Identifier: Apache-2.0
"""Static checks of the agent's source: one module runs qemu-img, and always with file formats."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODULE = "compute_agent/virt/libvirt/disks/qemu_img.py"
RAW = "driver=raw"
PROGRAMS = ("qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon")
#: Each subcommand and the options that state the format of opened and created files.
FORMAT_OPTIONS = {
    "create": {"-f", "-F"},
    "rebase": {"-f", "-F"},
    "resize": {"describe_chain"},
    "info": {"-f"},
}
CONVERT_OPTIONS = [{"-f", "-O"}, {"describe_chain", "-O"}]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def find_sources(word: str) -> Iterator[Path]:
    """Yield the files of the agent that contain a word."""
    return (path for path in (ROOT / "compute_agent").rglob("*.py") if word in path.read_text())


def find_constants(node: ast.AST) -> Iterator[str]:
    return (
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    )


def find_commands() -> list[tuple[str, set[str]]]:
    """Return (subcommand, its format options) of each argument list in the module.

    The options include "describe_chain" if that function describes the opened files.
    """
    tree, results = parse(ROOT / MODULE), []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for argument_list in (node for node in ast.walk(function) if isinstance(node, ast.List)):
            words = [node.value for node in argument_list.elts if isinstance(node, ast.Constant)]
            if words and words[0] in (*FORMAT_OPTIONS, "convert"):
                options = {node for node in find_constants(function) if node in ("-f", "-F", "-O")}
                options |= {RAW for node in find_constants(function) if node.startswith(f"{RAW},")}
                called = {
                    node.func.id
                    for node in ast.walk(argument_list)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                }
                results.append((words[0], options | (called & {"describe_chain"})))
    return results


def test_qemu_img_commands_state_format_of_opened_files() -> None:
    calls = find_commands()
    assert sorted(name for name, _ in calls) == [
        "convert",
        "convert",
        "create",
        "info",
        "info",
        "rebase",
        "resize",
    ]
    for name, options in calls:
        if name == "info" and options == {RAW}:
            continue  # the file is described by options, which include the format
        assert (
            options in CONVERT_OPTIONS if name == "convert" else options >= FORMAT_OPTIONS[name]
        ), (name, options)


def test_describe_chain_names_driver_and_backing_of_each_layer() -> None:
    import json

    from compute_agent.virt.libvirt.disks import qemu_img
    from compute_agent.virt.libvirt.xml.domain_xml import Disk

    def describe(disk: Disk) -> dict[str, object]:
        return dict(json.loads(qemu_img.describe_chain(disk).removeprefix("json:")))

    own, below = ({"driver": "file", "filename": f"/dev/fd/{number}"} for number in (3, 4))
    disk = Path("/d/disk")
    assert describe(Disk(disk)) == {"driver": "qcow2", "file": own, "backing": None}
    assert describe(Disk(disk, Path("/d/base"), "raw")) == {
        "driver": "qcow2",
        "file": own,
        "backing": {"driver": "raw", "file": below},
    }
    assert describe(Disk(disk, Path("/d/base"), "qcow2")) == {
        "driver": "qcow2",
        "file": own,
        "backing": {"driver": "qcow2", "file": below, "backing": None},
    }


def test_qemu_img_is_named_in_one_module_of_agent() -> None:
    def code(tree: ast.Module) -> Iterator[str]:
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        return (
            child.value
            for child in ast.walk(tree)
            if isinstance(child, ast.Constant)
            and isinstance(child.value, str)
            and id(child) not in docstrings
        )

    files = {
        str(path.relative_to(ROOT))
        for path in find_sources("qemu-")
        for text in code(parse(path))
        if text in PROGRAMS
    }
    assert files == {MODULE}


def test_format_inspector_is_imported_only_by_inspector_module() -> None:
    """Only sandboxed helpers load the parser of tenants' bytes, by name."""
    importers = {
        str(path.relative_to(ROOT))
        for path in find_sources("inspector")
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.split(".")[-1] in ("inspector", "format_inspector")
    }
    assert importers == {"compute_agent/virt/libvirt/disks/inspector.py"}
