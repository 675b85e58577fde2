# SPDX-License-Identifier: Apache-2.0
"""Requests as bytes at the worker that all our services have: none is two requests to us and one to
who is before us, and none is answered by a page, a crash or silence."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fuzz import raw

REQUESTS, SEED = 300, 2026


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with raw.serving() as found:
        yield found


def test_what_can_be_counted_in_two_ways_is_refused(port: int) -> None:
    wrong = raw.ambiguous(port)
    assert not wrong, "\n".join(wrong)


def test_what_is_one_request_is_read_to_its_end(port: int) -> None:
    after = b"GET /after HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for name, said in raw.TAKEN.items():
        found = [json.loads(one.body) for one in raw.ask(port, said + after)]
        assert [(one["path"], one["body"]) for one in found] == [
            ("/asked", len(raw.SMUGGLED)),
            ("/after", 0),
        ], name


def test_a_header_with_an_underscore_is_no_other_header(port: int) -> None:
    [found, after] = raw.ask(
        port,
        b"GET /a HTTP/1.1\r\nHost: x\r\n" + raw.UNDERSCORED + b"\r\n"
        b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    assert json.loads(found.body)["headers"] == ["HTTP_HOST"]
    assert json.loads(after.body)["path"] == "/b"


def test_nobody_says_where_in_the_urls_we_are(port: int) -> None:
    [found] = raw.ask(port, b"GET /a HTTP/1.1\r\nHost: x\r\n" + raw.FORWARDED + b"\r\n")
    assert json.loads(found.body) == {
        "path": "/a",
        "body": 0,
        "headers": ["HTTP_HOST", "HTTP_SCRIPT_NAME"],
    }


def test_nothing_by_chance_is_answered_by_a_page_or_a_crash(port: int) -> None:
    wrong = [found for number in range(REQUESTS) if (found := raw.wrong_of(port, SEED, number))]
    assert not wrong, "\n".join(wrong)
    assert raw.ask(port, b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")[0].status == 200
