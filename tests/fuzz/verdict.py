# SPDX-License-Identifier: Apache-2.0
"""Faults that no answer may have: crashes, HTML, internal details, records of a foreign project."""

from __future__ import annotations

import logging
import re

import orjson
from gunicorn.http.wsgi import HEADER_VALUE_RE

from common.service.log import TextFormatter
from tests.fuzz.requests import Answer, Request
from tests.surface.world import World

#: Statuses of 500 and more that the services return intentionally, in JSON.
DELIBERATE = (501, 503)
INSIDES = re.compile(
    rb"Traceback|site-packages|sqlalchemy|sqlite3?\.|psycopg|pymysql|IntegrityError|OperationalError"
    rb"|(SELECT|INSERT INTO|UPDATE|DELETE FROM) \w+|<class |object at 0x|\.py\b|, line \d+, in"
    rb"|/dev/shm|/tmp/|/usr/|(Key|Type|Value|Attribute|Unicode|Index|Assertion|Recursion|Overflow)\w*Error"
    rb"|NoneType|\bcompute_api\.|deploy\.standalone|\bcommon\.\w+\."
)
TENANTS = ("none", "reader", "member", "manager", "other")
#: Services with refusals in plain text.
PLAIN = ("metadata", "image-gateway")
MOST_REFUSAL, MOST_LOG, MOST_SECONDS = 8192, 16384, 3.0


class Log(logging.Handler):
    """A handler that collects log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(TextFormatter())
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def take(self) -> str:
        lines, self._lines = self._lines, []
        return "\n".join(lines)


def faults(
    world: World, request: Request, answer: Answer, logged: str, before: bytes = b""
) -> list[str]:
    """Return the faults of an answer, in a few words each.

    Args:
        world: The services.
        request: The request.
        answer: The answer.
        logged: Log lines of the request.
        before: Text of earlier requests of admins, which tenants may see.
    """
    problems = []
    kind, sent = answer.headers.get("content-type", ""), request.text
    if answer.status >= 500 and answer.status not in DELIBERATE:
        problems.append(f"status {answer.status}: {_cause(logged)}")
    if "html" in kind or answer.body.lstrip()[:1] == b"<":
        problems.append("a page, not JSON")
    is_plain = request.operation.service in PLAIN and kind.startswith("text/plain")
    if (answer.body and answer.status >= 300 and not is_plain) or "json" in kind:
        problems += _not_json(answer)
    if answer.status >= 400:
        leak = INSIDES.search(answer.body)
        if leak and leak.group() not in sent:
            problems.append(f"tells of our insides: {leak.group().decode()!r}")
        if len(answer.body) > MOST_REFUSAL:
            problems.append(f"a refusal of {len(answer.body)} bytes")
    if len(logged) > MOST_LOG and answer.status < 500:
        problems.append(f"{len(logged)} characters were logged")
    if answer.seconds > MOST_SECONDS:
        problems.append(f"{answer.seconds:.1f} seconds")
    problems += [
        f"header {name} cannot be sent"
        for name, value in answer.headers.items()
        if not HEADER_VALUE_RE.fullmatch(value)
    ]
    if request.persona in TENANTS:
        problems += _foreign(world, request, answer, sent + before)
    return problems


def _cause(logged: str) -> str:
    """Return the last line of a traceback and the last line with a file of Kilonova."""
    lines = logged.splitlines()
    ours = [
        line.strip()
        for line in lines
        if line.strip().startswith("File ") and "site-packages" not in line
    ]
    return f"{lines[-1][:200] if lines else ''} {ours[-1] if ours else ''}"


def _not_json(answer: Answer) -> list[str]:
    if not answer.body:
        return []
    try:
        orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return [f"status {answer.status} without JSON: {answer.body[:80]!r}"]
    return []


def _foreign(world: World, request: Request, answer: Answer, sent: bytes) -> list[str]:
    """Return the ids of foreign records in the answer that are not in the request."""
    site = world.sites[request.operation.service]
    own = set(site.ids["own"].values())
    return [
        f"tells of a foreign record: {kind}"
        for kind, value in site.ids["foreign"].items()
        if len(value) >= 32
        and value not in own
        and value.encode() in answer.body
        and value.encode() not in sent
    ]
