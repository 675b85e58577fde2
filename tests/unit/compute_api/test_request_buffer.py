# SPDX-License-Identifier: Apache-2.0
"""The split of received bytes into requests, and the refusal of invalid requests."""

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


def read_bodies(pieces: Sequence[bytes], max_body: int = 1000) -> list[bytes]:
    """Return the bodies of the requests in these pieces."""
    incoming, bodies = RequestBuffer(Config(), ("192.0.2.1", 1), max_body), []
    for piece in pieces:
        incoming.arrived += piece
        while incoming.advance():
            bodies.append(incoming.request.body.read())
            incoming.forget()
    assert not incoming.arrived
    return bodies


@given(
    st.lists(st.sampled_from(BODIES), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), max_size=60),
)
def test_request_buffer_splits_requests_independently_of_pieces(
    requests: list[tuple[bytes, bytes]], sizes: list[int]
) -> None:
    content = b"".join(HEAD + text for text, _ in requests)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(content[at : at + size])
        at += size
    assert read_bodies([*pieces, content[at:]]) == [body for _, body in requests]


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
def test_request_buffer_raises_parse_exception_for_invalid_request(text: bytes) -> None:
    with pytest.raises(ParseException):
        read_bodies([text])


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"Content-Length: 50\r\n\r\nabc",
        CHUNKED + b"50\r\n" + b"a" * 20,
        CHUNKED + b"1\r\na\r\n" * 3,
    ],
)
def test_request_buffer_marks_request_with_too_long_body_as_cut(text: bytes) -> None:
    incoming = RequestBuffer(Config(), ("192.0.2.1", 1), 10)
    incoming.arrived += text
    assert incoming.advance()
    assert incoming.is_cut


def test_origin_is_ipv6_prefix_or_ipv4_address_of_client() -> None:
    client_origin = origin(("2001:db8::1", 1, 0, 0))
    assert (
        client_origin
        == origin(("2001:db8::2%eth0", 1, 0, 0))
        != origin(("2001:db8:0:1::1", 1, 0, 0))
    )
    assert origin(("::ffff:192.0.2.1", 1, 0, 0)) == origin(("192.0.2.1", 1)) == "192.0.2.1"
