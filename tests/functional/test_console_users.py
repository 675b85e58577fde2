# SPDX-License-Identifier: Apache-2.0
"""The user and the browser of a console.

The session ends with the user's token, and a console token is bound to one browser.
"""

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
from tests.functional.test_console_service import (
    ALLOWED,
    OURS,
    SERVERS,
    World,
    echoes,
    read_close_frame,
)
from tests.log_lines import render_records
from tests.waiting import await_true

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PLAIN = "http://consoles.example"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def make_world(**options: Any) -> World:
            world = World(tmp_path, **options)
            stack.callback(world.close)
            return world

        yield make_world


def page_path(token: str) -> str:
    return f"/vnc_lite.html?path=%3Ftoken%3D{token}"


def fetch_cookie(world: World, token: str, path: str = "", **headers: str) -> str:
    """Fetch the page, and return the cookie of the response, or "" without a cookie."""
    status, _, headers_of_page = world.get(path or page_path(token), {**HTML, **headers})
    assert status == 200
    return headers_of_page.get("Set-Cookie", "").partition(";")[0]


# --- users ---
def test_console_session_ends_when_user_token_is_revoked(make: Callable[..., World]) -> None:
    world = make()
    with (
        world.open(world.token(caller="mine")) as browser,
        world.open(world.token(server=SERVERS[1], caller="another")) as other,
        world.open(world.token(server=SERVERS[2])) as old,
    ):
        assert echoes(browser) and echoes(other) and echoes(old)
        world.bad.add("mine")
        assert read_close_frame(browser) == (
            parts.REFUSED,
            "Your token was revoked, or your user or project is disabled.",
        )
        assert echoes(other) and echoes(old)
    await_true(lambda: len(world.sessions) == 0)


def test_console_token_is_refused_when_user_token_is_revoked(make: Callable[..., World]) -> None:
    world = make()
    token = world.token(caller="mine")
    world.bad.add("mine")
    assert world.hangs_up(token)


def test_consoles_are_refused_and_sessions_kept_while_identity_is_silent(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    code, words = world.read_close(world.token(caller="silence"))
    assert code == parts.BUSY and "identity service does not answer" in words
    with world.open(world.token(caller="mine")) as browser:
        assert echoes(browser)
        checked_tokens: list[str] = []

        def raise_unavailable(token: str) -> bool:
            checked_tokens.append(token)
            return world.is_good("silence")

        monkeypatch.setattr(world.sessions._callers, "_validate", raise_unavailable)
        await_true(lambda: len(checked_tokens) >= 2)
        assert echoes(browser)


def test_console_limits_sessions_per_user(make: Callable[..., World]) -> None:
    world = make(most=9, per_user=2)
    with world.open(world.token()) as first, world.open(world.token(server=SERVERS[1])) as second:
        assert echoes(first) and echoes(second)
        code, words = world.read_close(world.token(server=SERVERS[2]))
        assert code == parts.BUSY and "You have too many consoles open" in words
        with world.open(world.token(server=SERVERS[2], user="another")) as other:
            assert echoes(other)


# --- browsers ---
def test_console_token_is_bound_to_browser_of_its_page(
    make: Callable[..., World],
) -> None:
    world = make(url=PLAIN, origins=())
    token = world.token()
    own = fetch_cookie(world, token)
    assert re.fullmatch(r"console-[0-9a-f]{16}=[\w-]{43}", own)
    # A second browser gets the page, but no cookie.
    assert fetch_cookie(world, token) == ""
    for stranger in ({}, {"Cookie": own[:-1] + "~"}, {"Cookie": "console-0123456789abcdef=x"}):
        assert world.hangs_up(token, additional_headers=stranger)
        assert world.hangs_up(token, origin=PLAIN, additional_headers=stranger)
    with world.open(
        token, origin=PLAIN, additional_headers={"Cookie": f"other=1; {own}"}
    ) as browser:
        assert echoes(browser)
        assert world.hangs_up(token)


@pytest.mark.parametrize("is_open", [True, False])
def test_console_reload_in_same_browser_takes_over_session(
    make: Callable[..., World], is_open: bool
) -> None:
    world = make(url=PLAIN, origins=())
    token = world.token()
    own = {"additional_headers": {"Cookie": fetch_cookie(world, token)}}
    with world.open(token, **own) as first:
        assert echoes(first)
        if not is_open:
            first.close()
            await_true(lambda: len(world.sessions) == 0)
        with world.open(token, **own) as second:
            assert echoes(second)
            if is_open:
                assert read_close_frame(first) == (
                    parts.DONE,
                    "The console was opened again in this browser.",
                )
            assert echoes(second)
            assert world.hangs_up(token), "another browser"
    await_true(lambda: len(world.sessions) == 0)


def test_console_reload_in_allowed_frame_takes_over_session(
    make: Callable[..., World],
) -> None:
    world = make(origins=(ALLOWED,))
    token = world.token()
    kept = fetch_cookie(
        world, token, **{"Sec-Fetch-Dest": "iframe", "Referer": f"{ALLOWED}/project/"}
    )
    own = {"additional_headers": {"Cookie": kept}}
    with world.open(token, **own) as first:
        assert echoes(first)
        with world.open(token, **own) as second:
            assert echoes(second)
        assert world.hangs_up(token), "another browser"


def test_console_cookie_of_one_token_opens_no_other(make: Callable[..., World]) -> None:
    world = make(url=PLAIN, origins=())
    own_token, other_token = world.token(), world.token()
    own = fetch_cookie(world, own_token)
    assert fetch_cookie(world, other_token)
    assert world.hangs_up(other_token, additional_headers={"Cookie": own})


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
def test_console_cookie_has_security_attributes(
    make: Callable[..., World], url: str, kept: str
) -> None:
    world = make(url=url, origins=())
    for path in (page_path(world.token()), f"/serial.html?token={world.token()}"):
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
def test_console_in_program_or_frame_needs_no_cookie(
    make: Callable[..., World], headers: dict[str, str]
) -> None:
    world = make(origins=())
    token = world.token()
    offered = world.get(page_path(token), headers)[2].get("Set-Cookie", "")
    assert ("Partitioned" in offered) == ("iframe" in headers.values())
    with world.open(token) as browser:
        assert echoes(browser)
    await_true(lambda: len(world.sessions) == 0)
    assert world.hangs_up(token)


def test_console_token_is_bound_only_by_top_page_when_frames_are_allowed(
    make: Callable[..., World],
) -> None:
    world = make(origins=(ALLOWED,))
    for headers, is_bound in (({}, False), ({"Sec-Fetch-Dest": "document"}, True)):
        token = world.token()
        assert fetch_cookie(world, token, **headers)
        if is_bound:
            assert world.hangs_up(token)
        else:
            with world.open(token) as browser:
                assert echoes(browser)


def test_console_cookie_and_user_token_are_not_logged(
    make: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    world = make(url=PLAIN, origins=())
    token = world.token(caller="a-token-of-mira")
    own = fetch_cookie(world, token)
    with world.open(token, additional_headers={"Cookie": own}) as browser:
        assert echoes(browser)
    assert world.hangs_up(token)
    lines = render_records(
        record for record in caplog.records if not record.name.startswith("websockets.client")
    )
    assert any("a console is opened kind=serial server=" in line for line in lines)
    assert not [
        line
        for line in lines
        if token in line or own.partition("=")[2] in line or "a-token-of-mira" in line
    ]


def test_console_page_without_valid_token_sets_no_cookie(make: Callable[..., World]) -> None:
    world = make(origins=())
    used = world.token()
    with world.open(used) as browser:
        assert echoes(browser)
        for path in (
            page_path(used),
            page_path("x"),
            page_path(world.token(seconds=0)),
            "/vnc_lite.html",
        ):
            assert fetch_cookie(world, "", path) == ""
        assert fetch_cookie(world, "", f"/core/rfb.js?token={world.token()}") == ""


def test_console_page_is_shown_without_cookie_when_database_is_down(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(origins=())
    token = world.token()
    with monkeypatch.context() as away:
        away.setattr(
            world.store, "read", lambda question: (_ for _ in ()).throw(make_unavailable())
        )
        assert fetch_cookie(world, token) == ""
    began = time.monotonic()
    assert fetch_cookie(world, token) and time.monotonic() - began < 5


def make_unavailable() -> Exception:
    from common.domain import errors

    return errors.Unavailable("no database")
