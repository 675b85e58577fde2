# SPDX-License-Identifier: Apache-2.0
"""What no answer may be, whatever was asked: a crash, a page, a word about our insides, a foreign
project's record."""

from __future__ import annotations

import logging
import re

import orjson
from gunicorn.http.wsgi import HEADER_VALUE_RE

from tests.fuzz.requests import Answer, Request
from tests.surface.world import World

#: Statuses of the fifth hundred that we answer on purpose, in JSON.
DELIBERATE = (501, 503)
INSIDES = re.compile(
    rb"Traceback|site-packages|sqlalchemy|sqlite3?\.|psycopg|pymysql|IntegrityError|OperationalError"
    rb"|(SELECT|INSERT INTO|UPDATE|DELETE FROM) \w+|<class |object at 0x|\.py\b|, line \d+, in"
    rb"|/dev/shm|/tmp/|/usr/|(Key|Type|Value|Attribute|Unicode|Index|Assertion|Recursion|Overflow)\w*Error"
    rb"|NoneType|\bcompute_api\.|deploy\.standalone|\bcommon\.\w+\."
)
TENANTS = ("none", "reader", "member", "manager", "other")
PLAIN = ("metadata", "image-gateway")  # whose refusals are words
MOST_REFUSAL, MOST_LOG, MOST_SECONDS = 8192, 16384, 3.0


class Log(logging.Handler):
    """How much was logged since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def taken(self) -> str:
        lines, self._lines = self._lines, []
        return "\n".join(lines)


def faults(
    world: World, request: Request, answer: Answer, logged: str, before: bytes = b""
) -> list[str]:
    """What is wrong with this answer, in few words each. ``before``: what admins have sent, which
    others may see."""
    found = []
    kind, sent = answer.headers.get("content-type", ""), request.text
    if answer.status >= 500 and answer.status not in DELIBERATE:
        found.append(f"status {answer.status}: {_cause(logged)}")
    if "html" in kind or answer.body.lstrip()[:1] == b"<":
        found.append("a page, not JSON")
    is_plain = request.operation.service in PLAIN and kind.startswith("text/plain")
    if (answer.body and answer.status >= 300 and not is_plain) or "json" in kind:
        found += _not_json(answer)
    if answer.status >= 400:
        leak = INSIDES.search(answer.body)
        if leak and leak.group() not in sent:
            found.append(f"tells of our insides: {leak.group().decode()!r}")
        if len(answer.body) > MOST_REFUSAL:
            found.append(f"a refusal of {len(answer.body)} bytes")
    if len(logged) > MOST_LOG and answer.status < 500:
        found.append(f"{len(logged)} characters were logged")
    if answer.seconds > MOST_SECONDS:
        found.append(f"{answer.seconds:.1f} seconds")
    found += [
        f"header {name} cannot be sent"
        for name, value in answer.headers.items()
        if not HEADER_VALUE_RE.fullmatch(value)
    ]
    if request.persona in TENANTS:
        found += _foreign(world, request, answer, sent + before)
    return found


def _cause(logged: str) -> str:
    """The last line of a traceback and of ours before it."""
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
    """Ids of a foreign project's records that nobody asked for."""
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
