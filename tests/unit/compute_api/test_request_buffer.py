# SPDX-License-Identifier: Apache-2.0
"""Where a request ends, however its bytes arrive, and what is no request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gunicorn.config import Config
from gunicorn.http.errors import ParseException
from hypothesis import given
from hypothesis import strategies as st

from common.security.unproved import origin
from compute_api.http.worker.request_buffer import MAX_HEAD_BYTES, RequestBuffer

HEAD = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODIES = (
    (b"\r\n", b""),
    (b"Content-Length: 5\r\n\r\nabcde", b"abcde"),
    (b"Content-Length: 0\r\n\r\n", b""),
    (b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n", b"abcde"),
    (
        b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\n\r\n\r\nA\r\n0123456789\r\n0\r\nX-A: b\r\n\r\n",
        b"\r\n0123456789",
    ),
)


def taken(pieces: Sequence[bytes], most: int = 1000) -> list[bytes]:
    """The bodies of the requests in these pieces."""
    incoming, found = RequestBuffer(Config(), ("192.0.2.1", 1), most), []
    for piece in pieces:
        incoming.arrived += piece
        while incoming.advance():
            found.append(incoming.request.body.read())
            incoming.forget()
    assert not incoming.arrived
    return found


@given(
    st.lists(st.sampled_from(BODIES), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), max_size=60),
)
def test_requests_end_where_they_end_however_they_arrive(
    requests: list[tuple[bytes, bytes]], sizes: list[int]
) -> None:
    whole = b"".join(HEAD + text for text, _ in requests)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(whole[at : at + size])
        at += size
    assert taken([*pieces, whole[at:]]) == [body for _, body in requests]


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x2\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"1" * 9000,
        b"a" * (MAX_HEAD_BYTES + 1),
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    ],
)
def test_what_is_no_request_is_said_to_be(text: bytes) -> None:
    with pytest.raises(ParseException):
        taken([text])


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"Content-Length: 50\r\n\r\nabc",
        CHUNKED + b"50\r\n" + b"a" * 20,
        CHUNKED + b"1\r\na\r\n" * 3,
    ],
)
def test_what_is_too_long_begins_at_once_and_is_the_last(text: bytes) -> None:
    incoming = RequestBuffer(Config(), ("192.0.2.1", 1), 10)
    incoming.arrived += text
    assert incoming.advance()
    assert incoming.is_cut


def test_an_address_is_what_one_client_has() -> None:
    one = origin(("2001:db8::1", 1, 0, 0))
    assert one == origin(("2001:db8::2%eth0", 1, 0, 0)) != origin(("2001:db8:0:1::1", 1, 0, 0))
    assert origin(("::ffff:192.0.2.1", 1, 0, 0)) == origin(("192.0.2.1", 1)) == "192.0.2.1"
