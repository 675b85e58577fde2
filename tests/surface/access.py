# SPDX-License-Identifier: Apache-2.0
"""The table tests/surface/access.txt as data: the status of each operation for each persona."""

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
    """The row of an operation.

    Attributes:
        words: (owner, persona) -> status or "ok".
        success: The status for "ok", or 0 for the success status of the operation.
    """

    words: dict[tuple[str, str], str]
    success: int = 0

    def fits(self, operation: Operation, owner: str, persona: str, status: int) -> bool:
        """Return True if the status agrees with the table."""
        word = self.words[owner, persona]
        if word != "ok":
            return status == int(word)
        expected = self.success or operation.success
        return status == expected if expected else 200 <= status < 400


def _groups() -> Iterator[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    for text in "\n".join(lines).strip().split("\n\n"):
        yield text.splitlines()


@cache
def rows() -> dict[tuple[str, str], Row]:
    """Return (service, name of the operation) -> row."""
    table: dict[tuple[str, str], Row] = {}
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
                name, _, success = name.strip().partition(" = ")
                assert (service, name) not in table, f"{name} stands there twice"
                table[service, name] = Row(words, int(success or 0))
    return table


def name_of(operation: Operation) -> tuple[str, str]:
    """Return the operation's key in the table. Aliases have the key of the first name."""
    return operation.service, operation.name.replace("/os-volumes_boot", "/servers").replace(
        " @2.102", ""
    )
