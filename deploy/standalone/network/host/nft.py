# SPDX-License-Identifier: Apache-2.0
"""A table of nft as a value: written whole, or as what differs from another.

`whole` replaces whatever was there; `changes` is much less for nft to do when a port comes or goes. Either is one
transaction, so a packet sees the old rules or the new ones. Pure.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

HOOK = "type "      # a base chain's first line begins so


@dataclass(frozen=True, slots=True)
class Set:
    """A set or map ("noun"); ``elements``: key -> what a map has there, "" in a set. ``kind`` as nft writes it."""

    noun: str
    kind: str
    elements: Mapping[str, str]

    def listed(self, keys: Iterable[str]) -> str:
        """These elements as nft reads them."""
        return ", ".join(f"{key} : {self.elements[key]}" if self.elements[key] else key for key in keys)


@dataclass(frozen=True, slots=True)
class Table:
    """Chains are their lines; that of a base chain begins with its hook."""

    family: str
    name: str
    sets: Mapping[str, Set]
    chains: Mapping[str, tuple[str, ...]]

    @property
    def full_name(self) -> str:
        """Family and name."""
        return f"{self.family} {self.name}"


def read_chains(text: str) -> dict[str, tuple[str, ...]]:
    """Chains written as in a table's body, one statement a line."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("chain "):
            lines = found.setdefault(line.split()[1], [])
        elif line != "}":
            lines.append(line)
    return {name: tuple(lines) for name, lines in found.items()}


def whole(tables: Iterable[Table]) -> str:
    """The text that replaces these tables."""
    return "".join("".join(_whole(table)) for table in tables)


def gone(family: str, name: str) -> str:
    """The text that removes a table, there or not."""
    return f"add table {family} {name}\ndelete table {family} {name}\n"


def changes(before: Iterable[Table], after: Iterable[Table]) -> str | None:
    """The text that makes one into the other, "" for none; None when only the whole does."""
    texts = []
    for old, new in zip(before, after, strict=True):
        if old.full_name != new.full_name or any(
                name in old.sets and (old.sets[name].noun, old.sets[name].kind) != (one.noun, one.kind)
                for name, one in new.sets.items()):
            return None
        texts += [*_new(old, new), *_elements(old, new), *_rules(old, new), *_old(old, new)]
    return "".join(f"{line}\n" for line in texts)


def _whole(table: Table) -> Iterator[str]:
    yield f"{gone(table.family, table.name)}table {table.full_name} {{\n"
    for name, one in table.sets.items():
        inside = f" elements = {{ {one.listed(one.elements)} }};" if one.elements else ""
        yield f"  {one.noun} {name} {{ {one.kind};{inside} }}\n"
    for name, lines in table.chains.items():
        yield "".join([f"  chain {name} {{\n", *(f"    {line}\n" for line in lines), "  }\n"])
    yield "}\n"


def _new(old: Table, new: Table) -> Iterator[str]:
    for name, one in new.sets.items():
        if name not in old.sets:
            yield f"add {one.noun} {new.full_name} {name} {{ {one.kind}; }}"
    for name, lines in new.chains.items():
        if name not in old.chains:
            yield f"add chain {new.full_name} {name}" + (f" {{ {lines[0]} }}" if _is_base(lines) else "")


def _elements(old: Table, new: Table) -> Iterator[str]:
    for name, one in new.sets.items():
        before = old.sets[name].elements if name in old.sets else {}
        if before == one.elements:
            continue
        if "interval" in one.kind:       # merged by nft: its elements are not ours
            yield f"flush set {new.full_name} {name}"
            before = {}
        less = [key for key, value in before.items() if one.elements.get(key) != value]
        more = [key for key, value in one.elements.items() if before.get(key) != value]
        if less:
            yield f"delete element {new.full_name} {name} {{ {old.sets[name].listed(less)} }}"
        if more:
            yield f"add element {new.full_name} {name} {{ {one.listed(more)} }}"


def _rules(old: Table, new: Table) -> Iterator[str]:
    for name, lines in new.chains.items():
        if name in old.chains and old.chains[name] == lines:
            continue
        if name in old.chains:
            yield f"flush chain {new.full_name} {name}"
        yield from (f"add rule {new.full_name} {name} {line}" for line in lines[1 if _is_base(lines) else 0:])


def _old(old: Table, new: Table) -> Iterator[str]:
    yield from (f"delete chain {new.full_name} {name}" for name in old.chains if name not in new.chains)
    yield from (f"delete {one.noun} {new.full_name} {name}" for name, one in old.sets.items() if name not in new.sets)


def _is_base(lines: tuple[str, ...]) -> bool:
    return bool(lines) and lines[0].startswith(HOOK)
