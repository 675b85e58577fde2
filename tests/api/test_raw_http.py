# SPDX-License-Identifier: Apache-2.0
"""Requests as bytes at the worker of all services: ambiguous, broken and random.

The worker and a proxy before it must agree on the end of each request. No request may be answered
by an HTML page, a crash or silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fuzz import raw

REQUESTS, SEED = 300, 2026


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with raw.serving() as server_port:
        yield server_port


def test_http_request_of_ambiguous_length_is_refused(port: int) -> None:
    accepted = raw.ambiguous(port)
    assert not accepted, "\n".join(accepted)


def test_http_request_of_unambiguous_length_is_read_exactly_to_its_end(port: int) -> None:
    after = b"GET /after HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for name, request in raw.TAKEN.items():
        documents = [json.loads(document.body) for document in raw.ask(port, request + after)]
        assert [(document["path"], document["body"]) for document in documents] == [
            ("/asked", len(raw.SMUGGLED)),
            ("/after", 0),
        ], name


def test_http_header_with_underscore_is_dropped(port: int) -> None:
    [first, second] = raw.ask(
        port,
        b"GET /a HTTP/1.1\r\nHost: x\r\n" + raw.UNDERSCORED + b"\r\n"
        b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n",
    )
    assert json.loads(first.body)["headers"] == ["HTTP_HOST"]
    assert json.loads(second.body)["path"] == "/b"


def test_http_script_name_and_path_info_headers_do_not_change_path(port: int) -> None:
    [answer] = raw.ask(port, b"GET /a HTTP/1.1\r\nHost: x\r\n" + raw.FORWARDED + b"\r\n")
    assert json.loads(answer.body) == {
        "path": "/a",
        "body": 0,
        "headers": ["HTTP_HOST", "HTTP_SCRIPT_NAME"],
    }


def test_random_http_bytes_get_no_html_page_and_do_not_stop_server(port: int) -> None:
    failures = [
        failure for number in range(REQUESTS) if (failure := raw.wrong_of(port, SEED, number))
    ]
    assert not failures, "\n".join(failures)
    assert raw.ask(port, b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")[0].status == 200
