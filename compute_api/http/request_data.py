# SPDX-License-Identifier: Apache-2.0
"""Queries and bodies, read within bounds.

Must stay true: no more than allowed is ever read, and a broken request is a 400, never a 500."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl

import falcon
import orjson
from falcon.typing import ReadableIO
from gunicorn.http.errors import ParseException

from common.domain import errors
from common.domain.json_types import JsonValue

MAX_PARAMETERS = 200
MAX_DEPTH = 32
MAX_CONTAINERS = 65536  # objects and lists of a body: each costs the garbage collector


def query_of(text: str) -> dict[str, list[str]]:
    """Each parameter with the values that it was given. Raises BadRequest."""
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError as problem:
        raise errors.BadRequest(
            f"Too many query parameters: at most {MAX_PARAMETERS} are accepted."
        ) from problem
    for name, value in pairs:
        if "\x00" in value or "\x00" in name:
            raise errors.BadRequest("A query parameter holds the character NUL.")
        found.setdefault(name, []).append(value)
    return found


def bytes_of(req: falcon.Request, most: int) -> bytes:
    """The body, whole or chunked. Raises TooLarge, BadRequest."""
    check_length(req, most)
    try:
        data: bytes = stream_of(req).read(most + 1)
    except (OSError, ParseException) as problem:
        raise errors.BadRequest("The request body ended early or is badly chunked.") from problem
    check_size(len(data), most)
    return data


def stream_of(req: falcon.Request) -> ReadableIO:
    """What the body is read from, whole or chunked."""
    is_chunked = req.content_length is None and req.env.get("wsgi.input_terminated")
    return req.stream if is_chunked else req.bounded_stream


def json_of(req: falcon.Request, most: int, malformed: Callable[[ValueError], str]) -> JsonValue:
    """The body as JSON, of which never more than ``most`` bytes are read.

    Args:
        malformed: words the error of a body that is no JSON.
    Raises:
        TooLarge, BadRequest.
    """
    return parse_json(bytes_of(req, most), malformed)


def parse_json(data: bytes, malformed: Callable[[ValueError], str]) -> JsonValue:
    """The bytes of a body as JSON, see ``json_of``."""
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise errors.BadRequest(
            f"The request body has too many objects and lists: at most {MAX_CONTAINERS} are accepted."
        )
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest(malformed(problem)) from problem
    refuse_unfit(data, body)
    return body


def media_type_of(content_type: str | None) -> str:
    """The type that a Content-Type names, without its parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def check_path(parameters: Iterable[str]) -> None:
    """Raises NotFound for a part of a path that no database holds."""
    if any("\x00" in value for value in parameters):
        raise errors.NotFound("The resource could not be found.")


def check_length(req: falcon.Request, most: int) -> None:
    """Raises TooLarge for a body that says so of itself."""
    check_size(req.content_length or 0, most)


def check_size(size: int, most: int) -> None:
    """Raises TooLarge for a body of more than ``most`` bytes."""
    if size > most:
        raise errors.TooLarge(f"Request is too large: at most {most} bytes are accepted.")


def refuse_unfit(data: bytes, body: object) -> None:
    """Raises BadRequest for a body, which was ``data``, that is deeper than anything we know, so
    that no schema and no view recurses without bound; and for one with a text that no database
    keeps."""
    if is_too_deep(data, body):
        raise errors.BadRequest(
            f"The request body is nested too deeply: at most {MAX_DEPTH} levels are accepted."
        )
    if b"\\u0000" in data and _holds_nul(body):
        raise errors.BadRequest("The request body holds the character NUL.")


def is_too_deep(data: bytes, body: object) -> bool:
    """Are there more than MAX_DEPTH objects and lists within each other?"""
    if data.count(b"{") + data.count(b"[") <= MAX_DEPTH:
        return False
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, (dict, list)) for one in level)


def _holds_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_holds_nul(key) or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_holds_nul(item) for item in value)
