# SPDX-License-Identifier: Apache-2.0
"""Nova's schemas of answers. ``judge`` fails a test if an answer differs from them.

The schemas are data, which reader.py writes in a separate environment. This module does not import
Nova. Without that environment ``read_operations`` returns no operations, and ``judge`` accepts
every answer.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import ipaddress
import json
import os
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
import pytest

from deploy.environment import NOVA_SCHEMAS, has_nova_schemas
from tests.nova.known import ANSWERS, OWN


def _parses(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except (ValueError, binascii.Error):
            return False
        return True

    return check


def _is_url(text: str) -> bool:
    url = urllib.parse.urlsplit(text)
    return bool(url.scheme and url.netloc) and text.isprintable() and " " not in text


#: The checks of Nova's format checker for the formats in Nova's responses. Nova ignores other
#: formats.
FORMATS: dict[str, Callable[[str], bool]] = {
    "date-time": _parses(datetime.datetime.fromisoformat),
    "uuid": _parses(uuid.UUID),
    "uri": _is_url,
    "ipv4": _parses(ipaddress.IPv4Address),
    "ipv6": _parses(ipaddress.IPv6Address),
    "base64": _parses(functools.partial(base64.b64decode, validate=True)),
    "cidr": _parses(functools.partial(ipaddress.ip_network, strict=False)),
    "name": lambda text: bool(text) and text == text.strip() and text.isprintable(),
}


@dataclass
class Ranges:
    """Values for ranges of microversions, as (first version, last version, value)."""

    listed: list[tuple[int, int, Any]]

    def at(self, version: int) -> Any:
        """Return the value at a microversion, or None."""
        return next(
            (value for since, until, value in self.listed if since <= version <= until), None
        )


@dataclass
class Operation:
    """An operation of Nova.

    Attributes:
        name: Qualified name of the controller's method.
        method: HTTP method.
        path: Path with names of parameters in braces.
        key: The single key of the body for an action, or None.
        versions: First and last minor version.
        removed: True if Nova answers 410.
        status: Success status by version, if declared.
        body: Schema of the request's body by version.
        query: Schema of the query by version.
        response: Schema of the answer by version.
    """

    name: str
    method: str
    path: str
    key: str | None
    versions: tuple[int, int]
    removed: bool
    status: Ranges
    body: Ranges
    query: Ranges
    response: Ranges
    _compiled: dict[int, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.method} {self.path}" + (f" {self.key}" if self.key else "")

    def serves(self, version: int) -> bool:
        return not self.removed and self.versions[0] <= version <= self.versions[1]

    def find_problems(self, version: int, status: int, answer: Any) -> Iterator[tuple[str, str]]:
        """Yield (place, difference) for each difference of a successful answer from Nova's."""
        if not self.serves(version):
            yield "version", "Nova does not serve it"
            return
        expected = self.status.at(version) or 200
        if status != expected:
            yield "status", f"Nova answers {expected}"
        schema = self.response.at(version)
        if schema is None or (status != expected and answer is None):
            return
        if id(schema) not in self._compiled:
            self._compiled[id(schema)] = jsonschema_rs.Draft202012Validator(
                schema, formats=FORMATS, validate_formats=True
            )
        for error in self._compiled[id(schema)].iter_errors(answer):
            yield (
                "/".join("*" if isinstance(step, int) else step for step in error.instance_path),
                error.message,
            )


def require() -> None:
    """Skip the test if there are no schemas of Nova. Below ./deploy/test, fail the test."""
    if has_nova_schemas():
        return
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail("There are no schemas of Nova, which ./deploy/test fetches in its first steps.")
    pytest.skip("needs Nova's schemas, which ./deploy/test api fetches")


@functools.cache
def read_operations() -> tuple[Operation, ...]:
    """Return Nova's operations in the order of Nova's routes, or () without Nova's schemas."""
    if not has_nova_schemas():
        return ()
    return tuple(
        Operation(
            **{
                **entry,
                **{kind: Ranges(entry[kind]) for kind in ("status", "body", "query", "response")},
            }
        )
        for entry in json.loads(NOVA_SCHEMAS.read_text())["operations"]
    )


@functools.cache
def _path_patterns(method: str) -> list[tuple[re.Pattern[str], str]]:
    paths = dict.fromkeys(
        operation.path for operation in read_operations() if operation.method == method
    )
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), path) for path in paths]


@functools.cache
def _operations_by_path() -> dict[tuple[str, str, str | None], Operation]:
    return {
        (operation.method, operation.path, operation.key): operation
        for operation in read_operations()
    }


#: The root of the API, and an optional project.
_ROOT = re.compile(r"/v2(\.1)?(/[a-z0-9-]{32,36}(?=/))?(?=/|$)")


def find(method: str, url: str, body: Any = None) -> Operation | None:
    """Return Nova's operation for this request, or None."""
    path = _ROOT.sub("", url.partition("?")[0], count=1).rstrip("/") or "/"
    template = next(
        (template for pattern, template in _path_patterns(method) if pattern.fullmatch(path)), None
    )
    if template is None:
        return None
    key = (
        next(iter(body))
        if template.endswith("/action") and isinstance(body, dict) and body
        else None
    )
    return _operations_by_path().get((method, template, key))


def is_own(url: str) -> bool:
    """Return True if the path is an extension of Kilonova."""
    path = _ROOT.sub("", url.partition("?")[0], count=1)
    return any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", own), path) for own in OWN)


def find_problems(
    method: str, url: str, body: Any, version: int, status: int, answer: Any
) -> Iterator[tuple[str, str, str]]:
    """Yield (operation, place, difference) for each difference of an answer from Nova's schemas.

    Errors have no schema, so they have no differences.

    Args:
        method: HTTP method.
        url: Path of the request, with or without a query.
        body: Body of the request.
        version: Minor version of the request.
        status: Status of the answer.
        answer: Body of the answer.
    """
    if not 200 <= status < 300 or not read_operations() or is_own(url):
        return
    operation = find(method, url, body)
    if operation is None:
        yield f"{method} {url}", "path", "Nova has no such operation"
        return
    for place, difference in operation.find_problems(version, status, answer):
        yield operation.title, place, difference


def find_disagreements(
    method: str, url: str, body: Any, version: int, status: int, answer: Any
) -> Iterator[tuple[str, str]]:
    """Yield a key and a text for each problem of an answer that is not a known difference.

    The key has the operation and the place. For the arguments see ``find_problems``.
    """
    for operation, place, difference in find_problems(method, url, body, version, status, answer):
        if (operation, place) not in ANSWERS:
            text = f"{operation} at 2.{version}, {status}: {place}: {difference}"
            yield f"{operation}: {place}", text


def judge(method: str, url: str, body: Any, version: int, status: int, answer: Any) -> None:
    """Fail the test if an answer differs from Nova's schemas, unless the difference is known.

    For the arguments see ``find_problems``.
    """
    for _, text in find_disagreements(method, url, body, version, status, answer):
        pytest.fail(f"{text}\n{json.dumps(answer)[:2000]}")
