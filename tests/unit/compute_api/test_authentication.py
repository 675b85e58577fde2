# SPDX-License-Identifier: Apache-2.0
"""The cache of what tokens stand for."""

from __future__ import annotations

from compute_api.edge import authentication


def test_it_forgets_after_its_time() -> None:
    now = [0.0]
    cache = authentication.TokenCache(lambda: now[0])
    cache.set("a", b"1", time=60)
    assert cache.get("a") == b"1"
    assert cache.get("b") is None
    now[0] = 60
    assert cache.get("a") is None


def test_one_that_is_empty_is_a_cache() -> None:
    assert authentication.TokenCache()


def test_it_never_grows_beyond_its_bound() -> None:
    now = [0.0]
    cache = authentication.TokenCache(lambda: now[0])
    for number in range(authentication.MAX_CACHED_TOKENS):
        cache.set(str(number), b"x", time=number % 2)
    now[0] = 0.5
    cache.set("new", b"y", time=60)
    assert cache.get("1") == b"x", "those that are still good are kept while there is room"
    for number in range(2 * authentication.MAX_CACHED_TOKENS):
        cache.set(f"more{number}", b"x", time=60)
    assert len(cache) <= authentication.MAX_CACHED_TOKENS
