# SPDX-License-Identifier: Apache-2.0
"""Nova's own schemas, and what they say of an answer: ``judge`` fails when Nova would not have
given it.

They are data, written by reader.py in an environment of its own; nothing of Nova is imported here.
Without that environment there are no ``operations``, and nobody complains.
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
    found = urllib.parse.urlsplit(text)
    return bool(found.scheme and found.netloc) and text.isprintable() and " " not in text


#: What Nova's format checker asks of the formats that stand in its responses; others it passes
#: over.
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
    """What holds from one version to another."""

    listed: list[tuple[int, int, Any]]

    def at(self, version: int) -> Any:
        return next((what for since, until, what in self.listed if since <= version <= until), None)


@dataclass
class Operation:
    """One of Nova's operations; of an action's path one for each key of the body."""

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

    def problems(self, version: int, status: int, answer: Any) -> Iterator[tuple[str, str]]:
        """Where this answer, to a request that went well, is not Nova's, and how."""
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
    """Skip, or below ./deploy/test fail, what needs Nova's schemas where they are not."""
    if has_nova_schemas():
        return
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail("Nova's schemas are not there: ./deploy/test fetches them in its first steps")
    pytest.skip("needs Nova's own schemas; fetched by: ./deploy/test api")


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Nova's operations, in the order of its routes."""
    if not has_nova_schemas():
        return ()
    return tuple(
        Operation(
            **{
                **one,
                **{kind: Ranges(one[kind]) for kind in ("status", "body", "query", "response")},
            }
        )
        for one in json.loads(NOVA_SCHEMAS.read_text())["operations"]
    )


@functools.cache
def _templates(method: str) -> list[tuple[re.Pattern[str], str]]:
    paths = dict.fromkeys(one.path for one in operations() if one.method == method)
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), path) for path in paths]


@functools.cache
def _by_path() -> dict[tuple[str, str, str | None], Operation]:
    return {(one.method, one.path, one.key): one for one in operations()}


#: The roots of the API, and the project that may stand behind them.
_ROOT = re.compile(r"/v2(\.1)?(/[a-z0-9-]{32,36}(?=/))?(?=/|$)")


def find(method: str, url: str, body: Any = None) -> Operation | None:
    """The operation that this request means."""
    path = _ROOT.sub("", url.partition("?")[0], count=1).rstrip("/") or "/"
    template = next(
        (template for pattern, template in _templates(method) if pattern.fullmatch(path)), None
    )
    if template is None:
        return None
    key = (
        next(iter(body))
        if template.endswith("/action") and isinstance(body, dict) and body
        else None
    )
    return _by_path().get((method, template, key))


def is_own(url: str) -> bool:
    """Is this an operation that Nova is not meant to have?"""
    path = _ROOT.sub("", url.partition("?")[0], count=1)
    return any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", own), path) for own in OWN)


def problems(
    method: str, url: str, body: Any, version: int, status: int, answer: Any
) -> Iterator[tuple[str, str, str]]:
    """(operation, place, what) in which this answer is not Nova's. An error has no schema, so
    nothing is said of it."""
    if not 200 <= status < 300 or not operations() or is_own(url):
        return
    operation = find(method, url, body)
    if operation is None:
        yield f"{method} {url}", "path", "Nova has no such operation"
        return
    for place, what in operation.problems(version, status, answer):
        yield operation.title, place, what


def disagreements(
    method: str, url: str, body: Any, version: int, status: int, answer: Any
) -> Iterator[tuple[str, str]]:
    """(operation and place, all of it in words) of what Nova would not have answered, when no
    reason is known."""
    for operation, place, what in problems(method, url, body, version, status, answer):
        if (operation, place) not in ANSWERS:
            yield f"{operation}: {place}", f"{operation} at 2.{version}, {status}: {place}: {what}"


def judge(method: str, url: str, body: Any, version: int, status: int, answer: Any) -> None:
    """Fail when Nova would not have given this answer, and no reason is known."""
    for _, words in disagreements(method, url, body, version, status, answer):
        pytest.fail(f"{words}\n{json.dumps(answer)[:2000]}")
