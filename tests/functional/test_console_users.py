# SPDX-License-Identifier: Apache-2.0
"""Whose a console is: it ends with the user's rights, and its address is good in one browser."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compute_api.console import sessions as parts
from tests.functional.test_console_service import ALLOWED, OURS, SERVERS, World, echoes, ended
from tests.waiting import await_true

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PLAIN = "http://consoles.example"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as made:

        def one(**options: Any) -> World:
            world = World(tmp_path, **options)
            made.callback(world.close)
            return world

        yield one


def page(token: str) -> str:
    return f"/vnc_lite.html?path=%3Ftoken%3D{token}"


def cookie(world: World, token: str, path: str = "", **headers: str) -> str:
    """What a browser would bring after it fetched the page; "" when it was given no cookie."""
    status, _, found = world.get(path or page(token), {**HTML, **headers})
    assert status == 200
    return found.get("Set-Cookie", "").partition(";")[0]


# --- users ---
def test_it_ends_when_the_users_token_is_revoked(make: Callable[..., World]) -> None:
    world = make()
    with (
        world.open(world.token(caller="mine")) as browser,
        world.open(world.token(server=SERVERS[1], caller="another")) as other,
        world.open(world.token(server=SERVERS[2])) as old,
    ):
        assert echoes(browser) and echoes(other) and echoes(old)
        world.bad.add("mine")
        assert ended(browser) == (
            parts.REFUSED,
            "Your token was revoked, or your user or project is disabled.",
        )
        assert echoes(other) and echoes(old)
    await_true(lambda: len(world.sessions) == 0)


def test_a_revoked_users_address_opens_nothing(make: Callable[..., World]) -> None:
    world = make()
    token = world.token(caller="mine")
    world.bad.add("mine")
    assert world.hangs_up(token)


def test_a_silent_identity_service_opens_nothing_and_ends_nothing(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    code, words = world.closed(world.token(caller="silence"))
    assert code == parts.BUSY and "identity service does not answer" in words
    with world.open(world.token(caller="mine")) as browser:
        assert echoes(browser)
        asked: list[str] = []

        def silent(token: str) -> bool:
            asked.append(token)
            return world.is_good("silence")

        monkeypatch.setattr(world.sessions._callers, "_validate", silent)
        await_true(lambda: len(asked) >= 2)
        assert echoes(browser)


def test_so_many_of_a_user(make: Callable[..., World]) -> None:
    world = make(most=9, per_user=2)
    with world.open(world.token()) as first, world.open(world.token(server=SERVERS[1])) as second:
        assert echoes(first) and echoes(second)
        code, words = world.closed(world.token(server=SERVERS[2]))
        assert code == parts.BUSY and "You have too many consoles open" in words
        with world.open(world.token(server=SERVERS[2], user="another")) as other:
            assert echoes(other)


# --- browsers ---
def test_an_address_belongs_to_the_browser_that_fetched_its_page(
    make: Callable[..., World],
) -> None:
    world = make(url=PLAIN, origins=())
    token = world.token()
    own = cookie(world, token)
    assert re.fullmatch(r"console-[0-9a-f]{16}=[\w-]{43}", own)
    assert cookie(world, token) == ""  # a second browser sees the page, and that is all
    for stranger in ({}, {"Cookie": own[:-1] + "~"}, {"Cookie": "console-0123456789abcdef=x"}):
        assert world.hangs_up(token, additional_headers=stranger)
        assert world.hangs_up(token, origin=PLAIN, additional_headers=stranger)
    with world.open(
        token, origin=PLAIN, additional_headers={"Cookie": f"other=1; {own}"}
    ) as browser:
        assert echoes(browser)
        assert world.hangs_up(token)


@pytest.mark.parametrize("is_open", [True, False])
def test_reload_in_the_same_browser_takes_the_console_over(
    make: Callable[..., World], is_open: bool
) -> None:
    world = make(url=PLAIN, origins=())
    token = world.token()
    own = {"additional_headers": {"Cookie": cookie(world, token)}}
    with world.open(token, **own) as first:
        assert echoes(first)
        if not is_open:
            first.close()
            await_true(lambda: len(world.sessions) == 0)
        with world.open(token, **own) as second:
            assert echoes(second)
            if is_open:
                assert ended(first) == (parts.DONE, "The console was opened again in this browser.")
            assert echoes(second)
            assert world.hangs_up(token), "another browser"
    await_true(lambda: len(world.sessions) == 0)


def test_reload_inside_a_page_that_is_allowed_takes_the_console_over(
    make: Callable[..., World],
) -> None:
    world = make(origins=(ALLOWED,))
    token = world.token()
    kept = cookie(world, token, **{"Sec-Fetch-Dest": "iframe", "Referer": f"{ALLOWED}/project/"})
    own = {"additional_headers": {"Cookie": kept}}
    with world.open(token, **own) as first:
        assert echoes(first)
        with world.open(token, **own) as second:
            assert echoes(second)
        assert world.hangs_up(token), "another browser"


def test_a_cookie_of_one_address_opens_no_other(make: Callable[..., World]) -> None:
    world = make(url=PLAIN, origins=())
    mine, theirs = world.token(), world.token()
    own = cookie(world, mine)
    assert cookie(world, theirs)
    assert world.hangs_up(theirs, additional_headers={"Cookie": own})


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        (
            OURS,
            r"__Host-console-[0-9a-f]{16}=[\w-]{43}; Path=/; Max-Age=60; HttpOnly; SameSite=Strict; Secure",
        ),
        (PLAIN, r"console-[0-9a-f]{16}=[\w-]{43}; Path=/; Max-Age=60; HttpOnly; SameSite=Strict"),
    ],
)
def test_how_the_cookie_is_kept(make: Callable[..., World], url: str, kept: str) -> None:
    world = make(url=url, origins=())
    for path in (page(world.token()), f"/serial.html?token={world.token()}"):
        assert re.fullmatch(kept, world.get(path, HTML)[2]["Set-Cookie"])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Accept": "*/*"},
        {**HTML, "Sec-Fetch-Dest": "iframe"},
        {**HTML, "Sec-Fetch-Dest": "empty"},
    ],
)
def test_programs_and_pages_inside_others_need_no_cookie(
    make: Callable[..., World], headers: dict[str, str]
) -> None:
    world = make(origins=())
    token = world.token()
    offered = world.get(page(token), headers)[2].get("Set-Cookie", "")
    assert ("Partitioned" in offered) == ("iframe" in headers.values())
    with world.open(token) as browser:
        assert echoes(browser)
    await_true(lambda: len(world.sessions) == 0)
    assert world.hangs_up(token)


def test_a_page_inside_another_is_not_bound_where_that_is_allowed(
    make: Callable[..., World],
) -> None:
    world = make(origins=(ALLOWED,))
    for headers, is_bound in (({}, False), ({"Sec-Fetch-Dest": "document"}, True)):
        token = world.token()
        assert cookie(world, token, **headers)
        if is_bound:
            assert world.hangs_up(token)
        else:
            with world.open(token) as browser:
                assert echoes(browser)


def test_neither_cookie_nor_caller_is_logged(
    make: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    world = make(url=PLAIN, origins=())
    token = world.token(caller="a-token-of-mira")
    own = cookie(world, token)
    with world.open(token, additional_headers={"Cookie": own}) as browser:
        assert echoes(browser)
    assert world.hangs_up(token)
    ours = [
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith("websockets.client")
    ]
    assert any("console serial of server" in line for line in ours)
    assert not [
        line
        for line in ours
        if token in line or own.partition("=")[2] in line or "a-token-of-mira" in line
    ]


def test_a_page_without_a_good_token_gives_no_cookie(make: Callable[..., World]) -> None:
    world = make(origins=())
    used = world.token()
    with world.open(used) as browser:
        assert echoes(browser)
        for path in (page(used), page("x"), page(world.token(seconds=0)), "/vnc_lite.html"):
            assert cookie(world, "", path) == ""
        assert cookie(world, "", f"/core/rfb.js?token={world.token()}") == ""


def test_pages_are_shown_while_the_database_is_away(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(origins=())
    token = world.token()
    with monkeypatch.context() as away:
        away.setattr(world.store, "read", lambda question: (_ for _ in ()).throw(world_away()))
        assert cookie(world, token) == ""
    began = time.monotonic()
    assert cookie(world, token) and time.monotonic() - began < 5


def world_away() -> Exception:
    from common.domain import errors

    return errors.Unavailable("no database")
