# SPDX-License-Identifier: Apache-2.0
"""``SyncCookies``: host, session and age for which a cookie is fresh."""

from __future__ import annotations

from conductor.hosts.sync_cookies import SLOT_SECONDS, SyncCookies


class Wall:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def test_sync_cookie_is_fresh_only_for_its_host_and_session() -> None:
    freshness = SyncCookies("secret")
    cookie = freshness.cookie("h1", 7)
    assert freshness.is_fresh("h1", 7, cookie)
    assert SyncCookies("secret").is_fresh("h1", 7, cookie), "all conductors accept the cookie"
    assert not freshness.is_fresh("h2", 7, cookie)
    assert not freshness.is_fresh("h1", 8, cookie)
    assert not SyncCookies("another").is_fresh("h1", 7, cookie)
    assert not freshness.is_fresh("h1", 7, "")


def test_sync_cookie_is_fresh_after_one_minute_and_stale_after_two() -> None:
    wall = Wall()
    freshness = SyncCookies("secret", wall)
    cookie = freshness.cookie("h1", 7)
    wall.now += 2 * SLOT_SECONDS
    assert freshness.is_fresh("h1", 7, cookie)
    wall.now += 2 * SLOT_SECONDS
    assert not freshness.is_fresh("h1", 7, cookie)


def test_sync_cookie_of_a_conductor_with_a_clock_ahead_is_fresh() -> None:
    ahead, behind = Wall(), Wall()
    ahead.now += SLOT_SECONDS
    assert SyncCookies("secret", behind).is_fresh(
        "h1", 7, SyncCookies("secret", ahead).cookie("h1", 7)
    )


def test_cookie_of_either_secret_is_fresh_while_secret_is_changed() -> None:
    old, new = SyncCookies("old"), SyncCookies("new")
    both = SyncCookies("new, old")
    assert both.cookie("h1", 7) == new.cookie("h1", 7)
    assert both.is_fresh("h1", 7, old.cookie("h1", 7))
    assert not new.is_fresh("h1", 7, old.cookie("h1", 7))
