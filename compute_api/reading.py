# SPDX-License-Identifier: Apache-2.0
"""What clients send, read within bounds: queries and bodies, for every HTTP service of ours.

Must stay true: no more than was allowed is ever read, and what a client sends broken is its own 400, never our 500.
"""
from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import falcon
from gunicorn.http.errors import ParseException

from common import errors

MAX_PARAMETERS = 200
MAX_DEPTH = 32


def query_of(text: str) -> dict[str, list[str]]:
    """Each parameter with the values that it was given. Raises BadRequest."""
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError as problem:
        raise errors.BadRequest("Too many query parameters.") from problem
    for name, value in pairs:
        if "\x00" in value or "\x00" in name:
            raise errors.BadRequest("A query parameter holds the character NUL.")
        found.setdefault(name, []).append(value)
    return found


def bytes_of(req: falcon.Request, most: int) -> bytes:
    """The body, whole or chunked. Raises TooLarge, BadRequest."""
    check_length(req, most)
    chunked = req.content_length is None and req.env.get("wsgi.input_terminated")
    try:
        data: bytes = (req.stream if chunked else req.bounded_stream).read(most + 1)
    except (OSError, ParseException) as problem:
        raise errors.BadRequest("The request body ended early or is badly chunked.") from problem
    if len(data) > most:
        raise _too_large(most)
    return data


def check_length(req: falcon.Request, most: int) -> None:
    """Raises TooLarge for a body that says so of itself."""
    if (req.content_length or 0) > most:
        raise _too_large(most)


def refuse_unfit(data: bytes, body: Any) -> None:
    """Raises BadRequest for a body, which was ``data``, that is deeper than anything we know, so that no schema and no
    view recurses without bound; and for one with a text that no database keeps."""
    if is_too_deep(data, body):
        raise errors.BadRequest(f"The request body is nested too deeply: at most {MAX_DEPTH} levels are accepted.")
    if b"\\u0000" in data and _holds_nul(body):
        raise errors.BadRequest("The request body holds the character NUL.")


def is_too_deep(data: bytes, body: Any) -> bool:
    """Are there more than MAX_DEPTH objects and lists within each other?"""
    if data.count(b"{") + data.count(b"[") <= MAX_DEPTH:
        return False
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [item for one in level if isinstance(one, (dict, list))
                 for item in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, (dict, list)) for one in level)


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_holds_nul(key) or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_holds_nul(item) for item in value)


def _too_large(most: int) -> errors.TooLarge:
    return errors.TooLarge(f"Request is too large: at most {most} bytes are accepted.")
