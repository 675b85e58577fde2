# SPDX-License-Identifier: Apache-2.0
"""One module runs qemu-img, and tells it the format of every file that it opens."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOOR = "compute_agent/virt/libvirt/disks/qemu_img.py"
RAW = "driver=raw"
PROGRAMS = ("qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon")
#: Each subcommand, and what says the format of what it opens; what it makes has -f or -O.
SAYS = {
    "create": {"-f", "-F"},
    "rebase": {"-f", "-F"},
    "resize": {"describe_chain"},
    "info": {"-f"},
}
CONVERTS = [{"-f", "-O"}, {"describe_chain", "-O"}]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(word: str) -> Iterator[Path]:
    """Files of the agent in which a word stands."""
    return (path for path in (ROOT / "compute_agent").rglob("*.py") if word in path.read_text())


def constants(node: ast.AST) -> Iterator[str]:
    return (
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    )


def commands() -> list[tuple[str, set[str]]]:
    """(subcommand, its options and whether the chain is spelled out) of each list of arguments at
    the door."""
    tree, found = parsed(ROOT / DOOR), []
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        for made in (one for one in ast.walk(function) if isinstance(one, ast.List)):
            words = [one.value for one in made.elts if isinstance(one, ast.Constant)]
            if words and words[0] in (*SAYS, "convert"):
                said = {one for one in constants(function) if one in ("-f", "-F", "-O")}
                said |= {RAW for one in constants(function) if one.startswith(f"{RAW},")}
                called = {
                    one.func.id
                    for one in ast.walk(made)
                    if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
                }
                found.append((words[0], said | (called & {"describe_chain"})))
    return found


def test_each_call_says_the_format_of_what_it_opens() -> None:
    found = commands()
    assert sorted(name for name, _ in found) == [
        "convert",
        "convert",
        "create",
        "info",
        "info",
        "rebase",
        "resize",
    ]
    for name, said in found:
        if name == "info" and said == {RAW}:
            continue  # told as options, with the format among them
        assert said in CONVERTS if name == "convert" else said >= SAYS[name], (name, said)


def test_each_layer_of_a_chain_has_a_driver_and_says_what_is_below() -> None:
    import json

    from compute_agent.virt.libvirt.disks import qemu_img
    from compute_agent.virt.libvirt.xml.domain_xml import Disk

    def told(disk: Disk) -> dict[str, object]:
        return dict(json.loads(qemu_img.describe_chain(disk).removeprefix("json:")))

    own, below = ({"driver": "file", "filename": f"/dev/fd/{number}"} for number in (3, 4))
    disk = Path("/d/disk")
    assert told(Disk(disk)) == {"driver": "qcow2", "file": own, "backing": None}
    assert told(Disk(disk, Path("/d/base"), "raw")) == {
        "driver": "qcow2",
        "file": own,
        "backing": {"driver": "raw", "file": below},
    }
    assert told(Disk(disk, Path("/d/base"), "qcow2")) == {
        "driver": "qcow2",
        "file": own,
        "backing": {"driver": "qcow2", "file": below, "backing": None},
    }


def test_nobody_else_of_the_agent_names_the_program() -> None:
    def code(tree: ast.Module) -> Iterator[str]:
        texts = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        return (
            one.value
            for one in ast.walk(tree)
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in texts
        )

    named = {
        str(path.relative_to(ROOT))
        for path in sources("qemu-")
        for text in code(parsed(path))
        if text in PROGRAMS
    }
    assert named == {DOOR}


def test_the_inspector_is_loaded_by_helpers_alone() -> None:
    """Nothing of the agent imports what reads tenants' bytes; helpers are told its name."""
    importers = {
        str(path.relative_to(ROOT))
        for path in sources("inspector")
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.split(".")[-1] in ("inspector", "format_inspector")
    }
    assert importers == {"compute_agent/virt/libvirt/disks/inspector.py"}
