# SPDX-License-Identifier: Apache-2.0
"""What tests/surface/access.txt says: who is answered what, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.surface.identity import PERSONAS
from tests.surface.operations import Operation

TABLE = Path(__file__).with_name("access.txt")
OWNERS = ("own", "foreign", "missing")


@dataclass(frozen=True)
class Row:
    """An operation's: (owner, persona) -> status or "ok"; ``done``: what "ok" is if not the
    operation's success."""

    words: dict[tuple[str, str], str]
    done: int = 0

    def fits(self, operation: Operation, owner: str, persona: str, status: int) -> bool:
        """Is this what the table says?"""
        word = self.words[owner, persona]
        if word != "ok":
            return status == int(word)
        wanted = self.done or operation.success
        return status == wanted if wanted else 200 <= status < 400


def _groups() -> Iterator[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    for text in "\n".join(lines).strip().split("\n\n"):
        yield text.splitlines()


@cache
def rows() -> dict[tuple[str, str], Row]:
    """(service, name of the operation) -> what it answers."""
    found: dict[tuple[str, str], Row] = {}
    for head, *lines in _groups():
        assert head.split() == list(PERSONAS), head
        words = {
            (line.split()[0], persona): word
            for line in lines
            if not line.startswith(" ")
            for persona, word in zip(PERSONAS, line.split()[1:], strict=True)
        }
        for line in lines:
            if line.startswith(" "):
                service, _, name = line.strip().partition(" ")
                name, _, done = name.strip().partition(" = ")
                assert (service, name) not in found, f"{name} stands there twice"
                found[service, name] = Row(words, int(done or 0))
    return found


def name_of(operation: Operation) -> tuple[str, str]:
    """Where it stands in the table: the second name of servers is answered as the first."""
    return operation.service, operation.name.replace("/os-volumes_boot", "/servers").replace(
        " @2.102", ""
    )
