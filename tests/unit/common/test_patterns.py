# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of users: accepted patterns, matches, refusals and their duration."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from common.domain.patterns import is_found, is_pattern
from common.store.engine import Store


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("", "web"),
        ("web", "my-web-1"),
        ("^web-[0-9]+$", "web-12"),
        ("^web.*prod.*1$", "web-a-prod-1"),
        ("(web|db)-1", "db-1"),
        ("a{3}", "aaa"),
        ("colou?r", "color"),
        ("^(?i:x)", "X"),
        ("(ab){2}c", "ababc"),
        (r"\bweb\b", "a web"),
        ("☃+", "☃☃"),
        ("[[:alpha:]]", "x"),
        ("(a+)+$", "aa"),
        (r"\d\.\d", "1.2"),
        ("a.b", "a☃b"),
    ],
)
def test_supported_pattern_is_accepted_and_found_only_in_matching_text(
    pattern: str, text: str
) -> None:
    assert is_pattern(pattern)
    assert is_found(pattern, text)
    assert is_found(pattern, None) is None
    assert pattern == "" or not is_found(pattern, "~")


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "*",
        "[z-a]",
        "(?P<x",
        "(" * 5000,
        "(?=web)w",
        r"(a)\1",
        "(?:(?:(?:^){60000}){60000}){60000}",
        "a{1001}",
        "(?:(a{40}){40})",
        r"\pL{1000}",
        "(*LIMIT_MATCH=9)a",
        "\ud800",
    ],
)
def test_malformed_unsupported_or_too_complex_pattern_is_refused(pattern: str) -> None:
    assert not is_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(a?){40}a{40}b",
        ".*" * 127 + "x",
        "(x+x+)+y",
        "a{1000}" * 36,
        "(.*a.{200}b)*x",
        "(.*a){20}b",
    ],
)
def test_pattern_search_with_exponential_backtracking_is_fast(pattern: str) -> None:
    assert is_pattern(pattern)
    start = time.thread_time()
    for _ in range(20):
        assert not is_found(pattern, "a" * 254 + "!")
    assert time.thread_time() - start < 0.5


def test_sqlite_regexp_operator_matches_patterns_without_backtracking() -> None:
    with closing(Store("sqlite://")) as store, store.engine.connect() as connection:
        assert connection.exec_driver_sql(
            "SELECT 'web-1' REGEXP '^w', NULL REGEXP 'w', 'x' REGEXP 'w'"
        ).one() == (1, None, 0)
        start = time.thread_time()
        connection.exec_driver_sql(f"SELECT '{'a' * 40}!' REGEXP '(a+)+$'").one()
    assert time.thread_time() - start < 0.5
