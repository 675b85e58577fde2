# SPDX-License-Identifier: Apache-2.0
"""The operators of requirements in extra specs."""

from __future__ import annotations

import pytest

from scheduler.filters.requirements import meets

MEETS = [
    ("= 4", "5"),
    ("= 4", "4"),
    ("== 4", "4.0"),
    ("!= 4", "5"),
    (">= 4", "4"),
    ("<= 4", "3.5"),
    (">= 1e3", "1000"),
    ("s== abc", "abc"),
    ("s!= abc", "abd"),
    ("s>= b", "b"),
    ("s> a", "b"),
    ("s<= b", "a"),
    ("s< b", "a"),
    ("s== 4", "4"),
    ("<in> avx", "['sse', 'avx2']"),
    ("<all-in> sse avx", "['sse', 'avx2']"),
    ("<or> a <or> b", "a"),
    ("<or> a <or> b", "b"),
    ("<or> a <or> b <or>", "b"),
    ("abc", "abc"),
    ("a b", "a b"),
    ("", ""),
    ("> 4", "> 4"),
    ("true", "true"),
    ("  == 4", "4"),
    ("== 4 5", "4"),
]
DOES_NOT = [
    ("= 4", "3"),
    ("== 4", "5"),
    ("!= 4", "4.0"),
    (">= 4", "3"),
    ("<= 4", "5"),
    ("s== 4", "4.0"),
    ("s== abc", "ab"),
    ("s!= abc", "abc"),
    ("s>= b", "a"),
    ("s> b", "b"),
    ("s<= b", "c"),
    ("s< b", "b"),
    ("<in> avx5", "avx2"),
    ("<all-in> sse avx", "sse"),
    ("<or> a <or> b", "c"),
    ("<or> a b c", "b"),
    ("<or>", "<or>"),
    ("<or>", ""),
    ("==", "=="),
    ("<in>", "anything"),
    ("<all-in>", "anything"),
    ("s==", ""),
    (">= many", "4"),
    (">= 4", "many"),
    ("true", "True"),
    ("> 4", "5"),
    ("", "x"),
]


@pytest.mark.parametrize(("requirement", "value"), MEETS)
def test_extra_spec_requirement_is_met_by_value(requirement: str, value: str) -> None:
    assert meets(requirement, value)


@pytest.mark.parametrize(("requirement", "value"), DOES_NOT)
def test_extra_spec_requirement_is_not_met_by_value(requirement: str, value: str) -> None:
    assert not meets(requirement, value)
