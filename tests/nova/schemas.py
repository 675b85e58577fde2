# SPDX-License-Identifier: Apache-2.0
"""Nova's own schemas, and what they say of an answer: ``judge`` fails when Nova would not have given it.

They are data, written by reader.py in an environment of its own; nothing of Nova is imported here. Without that
environment there are no ``operations``, and nobody complains.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
import pytest

from deploy.environment import NOVA_SCHEMAS, nova_is_there
from tests.nova.known import ANSWERS


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


#: What Nova's format checker asks of the formats that stand in its responses; others it passes over.
FORMATS: dict[str, Callable[[str], bool]] = {
    "date-time": _parses(datetime.datetime.fromisoformat), "uuid": _parses(uuid.UUID), "uri": _is_url,
    "ipv4": _parses(ipaddress.IPv4Address), "ipv6": _parses(ipaddress.IPv6Address),
    "base64": _parses(functools.partial(base64.b64decode, validate=True)),
    "cidr": _parses(functools.partial(ipaddress.ip_network, strict=False)),
    "name": lambda text: bool(text) and text == text.strip() and text.isprintable()}


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

    def problem(self, version: int, status: int, answer: Any) -> tuple[str, str] | None:
        """Where this answer, to a request that went well, is not Nova's, and how."""
        if not self.serves(version):
            return "version", "Nova does not serve it"
        expected = self.status.at(version) or 200
        if status != expected:
            return "status", f"Nova answers {expected}"
        schema = self.response.at(version)
        if schema is None:
            return None
        if id(schema) not in self._compiled:
            self._compiled[id(schema)] = jsonschema_rs.Draft202012Validator(schema, formats=FORMATS,
                                                                            validate_formats=True)
        error = next(self._compiled[id(schema)].iter_errors(answer), None)
        if error is None:
            return None
        place = "/".join("*" if isinstance(step, int) else step for step in error.instance_path)
        return place, error.message


def require() -> None:
    """Skip, or below ./deploy/test fail, what needs Nova's schemas where they are not."""
    if nova_is_there():
        return
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail("Nova's schemas are not there: ./deploy/test fetches them in its first steps")
    pytest.skip("needs Nova's own schemas; fetched by: ./deploy/test api")


@functools.cache
def operations() -> tuple[Operation, ...]:
    """Nova's operations, in the order of its routes."""
    if not nova_is_there():
        return ()
    return tuple(Operation(**{**one, **{kind: Ranges(one[kind]) for kind in ("status", "body", "query", "response")}})
                 for one in json.loads(NOVA_SCHEMAS.read_text())["operations"])


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
    template = next((template for pattern, template in _templates(method) if pattern.fullmatch(path)), None)
    if template is None:
        return None
    key = next(iter(body)) if template.endswith("/action") and isinstance(body, dict) and body else None
    return _by_path().get((method, template, key))


def problem(method: str, url: str, body: Any, version: int, status: int, answer: Any
            ) -> tuple[str, str, str] | None:
    """(operation, place, what) in which this answer is not Nova's; None: it is, or an error, for which is no schema."""
    if not 200 <= status < 300 or not operations():
        return None
    operation = find(method, url, body)
    if operation is None:
        return f"{method} {url}", "path", "Nova has no such operation"
    found = operation.problem(version, status, answer)
    return None if found is None else (operation.title, *found)


def judge(method: str, url: str, body: Any, version: int, status: int, answer: Any) -> None:
    """Fail when Nova would not have given this answer, and no reason is known."""
    found = problem(method, url, body, version, status, answer)
    if found is not None and found[:2] not in ANSWERS:
        pytest.fail(f"{found[0]} at 2.{version}, {status}: {found[1]}: {found[2]}\n{json.dumps(answer)[:2000]}")
