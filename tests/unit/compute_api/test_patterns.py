# SPDX-License-Identifier: Apache-2.0
"""Which regular expressions of users are tried."""
from __future__ import annotations

import re
import time

import pytest

from compute_api.patterns import is_harmless


@pytest.mark.parametrize("pattern", [
    "", "web", "^web-[0-9]+$", "^web.*prod.*1$", "(web|db)-1", "a{3}", "colou?r", "[a-z]{2,5}", "^(?i:x)", "a.b",
    "(ab){2}c", "[a-f]{1000}", "(?:(ab){2}c){4}",
    r"\\Aweb\\b", "(?=web)w", "☃+"])
def test_what_people_search_with(pattern: str) -> None:
    re.compile(pattern)
    assert is_harmless(pattern)


@pytest.mark.parametrize("pattern", [
    "(a+)+$", "(a*)*b", "(a|a)*b", "((a+))+", "(a?){40}a{40}", "a?" * 30 + "a" * 30, ".*.*.*.*.*x", "(?:(?:a+)b?)+",
    "(x+x+)+y", "(?=(a+)+b)", "(?:(?:(?:^){60000}){60000}){60000}", "a{1001}", "(?:(ab){40}c){40}", "(a{0,2000})",
    "(?:a{2,}){600}", "(?>(a|b)+)*"])
def test_what_would_keep_an_engine_busy(pattern: str) -> None:
    assert not is_harmless(pattern)


@pytest.mark.parametrize("pattern", ["(", "*", "[z-a]", "(?P<x", "(" * 5000])
def test_what_is_no_expression(pattern: str) -> None:
    assert not is_harmless(pattern)


def test_the_worst_that_is_let_through_is_quick() -> None:
    begun = time.thread_time()
    for pattern in ("a*a*b", ".*.*.*=", "a+a+a+$"):
        assert is_harmless(pattern)
        re.search(pattern, "a" * 255 + "!")
    assert time.thread_time() - begun < 5
