# SPDX-License-Identifier: Apache-2.0
"""Texts from hosts, guests and external services that reach a terminal or a column."""

from __future__ import annotations

import pytest

from common.domain.text import is_printable, one_line, printable


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Wörter, 漢字 😀", "Wörter, 漢字 😀"),
        ("a\x1b]0;T\x07b", "a?]0;T?b"),
        ("\x9b31m", "?31m"),
        ("a\r\nb\n\tc", "a b c"),
        ("a\u2028b", "a b"),
        ("\u202etxt", "?txt"),
        ("\x7f\x00", "??"),
        ("\ud800", "?"),
    ],
)
def test_text_one_line_has_printable_characters_only(text: str, line: str) -> None:
    assert one_line(text) == line
    assert is_printable(one_line(text))


def test_text_one_line_is_cut_at_its_limit() -> None:
    assert one_line("x" * 501) == "x" * 499 + "…"
    assert one_line("x" * 500) == "x" * 500


def test_text_printable_replaces_controls_but_keeps_lines_and_tabs() -> None:
    assert printable("a\n\tb\rc\x1b[2J") == "a\n\tb?c?[2J"
