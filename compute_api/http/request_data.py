# SPDX-License-Identifier: Apache-2.0
"""Read queries and bodies within limits.

Invariant: no more than the allowed number of bytes is read, and an invalid request gets 400, never
500.
"""

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
#: Objects and lists of a body. The limit bounds the work of the garbage collector.
MAX_CONTAINERS = 65536
#: The error text for a request body that the API cannot read to its end.
UNREADABLE_BODY = (
    "The request body cannot be read: a chunk is missing or malformed, or the connection failed. Send "
    "the request again."
)


def query_of(text: str) -> dict[str, list[str]]:
    """Return the values of each query parameter. A parameter without a value has the value "".

    Raises:
        BadRequest: The query has too many parameters, or a NUL character.
    """
    parameters: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError as problem:
        raise errors.BadRequest(
            f"Too many query parameters: at most {MAX_PARAMETERS} are accepted."
        ) from problem
    for name, value in pairs:
        if "\x00" in value or "\x00" in name:
            raise errors.BadRequest("A query parameter contains the character NUL.")
        parameters.setdefault(name, []).append(value)
    return parameters


def bytes_of(req: falcon.Request, most: int) -> bytes:
    """Read the body of a request, whether it is chunked or not.

    A body that ends before its Content-Length is returned as far as it came.

    Raises:
        TooLarge: The body has more than ``most`` bytes.
        BadRequest: A chunked body is incomplete or badly chunked, or the connection fails.
    """
    check_length(req, most)
    try:
        data: bytes = stream_of(req).read(most + 1)
    except (OSError, ParseException) as problem:
        raise errors.BadRequest(UNREADABLE_BODY) from problem
    check_size(len(data), most)
    return data


def stream_of(req: falcon.Request) -> ReadableIO:
    """Return a stream that ends with the body, whether the body is chunked or not."""
    is_chunked = req.content_length is None and req.env.get("wsgi.input_terminated")
    return req.stream if is_chunked else req.bounded_stream


def json_of(req: falcon.Request, most: int, malformed: Callable[[ValueError], str]) -> JsonValue:
    """Read the body of a request, and return the JSON value.

    Args:
        req: The request.
        most: Largest number of bytes.
        malformed: Returns the error text for a body that is not valid JSON.

    Raises:
        TooLarge: The body has more than ``most`` bytes.
        BadRequest: The body is incomplete or not valid JSON, has too many or too deeply nested
            objects and lists, or contains a NUL character.
    """
    return parse_json(bytes_of(req, most), malformed)


def parse_json(data: bytes, malformed: Callable[[ValueError], str]) -> JsonValue:
    """Return the JSON value in the bytes of a body, without a limit of the size.

    Args:
        data: The body.
        malformed: Returns the error text for bytes that are not valid JSON.

    Raises:
        BadRequest: The body is not valid JSON, has more than ``MAX_CONTAINERS`` characters { and [
            (also in texts), is nested too deeply, or contains a NUL character.
    """
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise errors.BadRequest(
            f"The request body has too many objects and lists: at most {MAX_CONTAINERS} characters {{ and [ "
            "are accepted, also in texts."
        )
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise errors.BadRequest(malformed(problem)) from problem
    refuse_unfit(data, body)
    return body


def media_type_of(content_type: str | None) -> str:
    """Return the media type of a Content-Type in lower case, without parameters, "" for None."""
    return (content_type or "").partition(";")[0].strip().lower()


def check_path(parameters: Iterable[str]) -> None:
    """Check the parameters of a path.

    Raises:
        NotFound: A parameter has a NUL character, which PostgreSQL does not store.
    """
    if any("\x00" in value for value in parameters):
        raise errors.NotFound("The resource could not be found.")


def check_length(req: falcon.Request, most: int) -> None:
    """Check the declared length of the body. A body without Content-Length passes.

    Raises:
        TooLarge: Content-Length exceeds ``most``.
    """
    check_size(req.content_length or 0, most)


def check_size(size: int, most: int) -> None:
    """Check the size of a body.

    Raises:
        TooLarge: ``size`` exceeds ``most``.
    """
    if size > most:
        raise errors.TooLarge(f"Request is too large: at most {most} bytes are accepted.")


def refuse_unfit(data: bytes, body: object) -> None:
    """Check the depth of a body, and its texts.

    The limit of the depth bounds the recursion of schemas and views.

    Args:
        data: The bytes of the body.
        body: The parsed body.

    Raises:
        BadRequest: The body is nested too deeply, or has a NUL character, which PostgreSQL does
            not store.
    """
    if is_too_deep(data, body):
        raise errors.BadRequest(
            f"The request body is nested too deeply: at most {MAX_DEPTH} levels are accepted."
        )
    if b"\\u0000" in data and _has_nul(body):
        raise errors.BadRequest("The request body contains the character NUL.")


def is_too_deep(data: bytes, body: object) -> bool:
    """Return True if objects and lists of the body are nested in more than MAX_DEPTH levels."""
    if data.count(b"{") + data.count(b"[") <= MAX_DEPTH:
        return False
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return any(isinstance(container, (dict, list)) for container in level)


def _has_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_nul(item) for item in value)
