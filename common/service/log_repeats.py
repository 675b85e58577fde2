# SPDX-License-Identifier: Apache-2.0
"""Repeated problems in the log: one line a minute with a count.

Problems that an operator can fix are logged without a traceback. These are external services,
brokers or databases that do not answer or refuse the password. All lines about one of these count
as the same problem, whichever module logs them. Other warnings and errors are the same if their
texts and fields are equal apart from numbers.
"""

from __future__ import annotations

import copy
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.domain import errors

PERIOD_SECONDS = 60.0
#: The limit of problems that are tracked at a time.
MAX_TROUBLES = 1000
_OWN = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy", "__main__")
_MENDABLE = (errors.Unavailable, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
#: Exceptions of libraries that only some processes import.
_MENDABLE_NAMES = frozenset(
    (
        "sqlalchemy.exc.OperationalError",
        "amqp.exceptions.AccessRefused",
        "amqp.exceptions.NotAllowed",
        "kombu.exceptions.OperationalError",
        "oslo_messaging.exceptions.MessageDeliveryFailure",
        "oslo_messaging.exceptions.MessagingTimeout",
        "keystoneauth1.exceptions.connection.ConnectionError",
        "keystoneauth1.exceptions.discovery.DiscoveryFailure",
        "keystoneauth1.exceptions.http.Unauthorized",
        "keystonemiddleware.auth_token._exceptions.ServiceError",
    )
)
_NUMBERS = re.compile(r"(?<![\w.:-])\d+(\.\d+)?(?![\w:-]|\.\d)")
_IDS = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")
MAX_CAUSE_CHARS = 300


def mendable(problem: BaseException) -> BaseException | None:
    """Return the first of ``problem`` and its causes that an operator can fix, or None."""
    return next((cause for cause in _causes(problem) if _is_mendable(cause)), None)


def _is_mendable(problem: BaseException) -> bool:
    return isinstance(problem, _MENDABLE) or any(
        f"{kind.__module__}.{kind.__qualname__}" in _MENDABLE_NAMES
        for kind in type(problem).__mro__
    )


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """Yield the problem and its causes, nearest first."""
    seen: set[int] = set()
    current: BaseException | None = problem
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


def without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy of the record without traceback if an operator can fix the cause.

    The cause is looked for (``mendable``) in the logged exception, and in arguments and fields that
    are exceptions. The first lines of the cause and of its root cause become the field ``cause``,
    unless they are in the message or in another field. The attribute ``trouble`` identifies the
    problem. Records without such a cause, and records below WARNING, are returned unchanged.
    """
    problems = _problems_in(record)
    cause = next((cause_found for problem in problems if (cause_found := mendable(problem))), None)
    if cause is None or record.levelno < logging.WARNING:
        return record
    *_, root = _causes(cause)
    message, parts = record.getMessage(), fields_of(record)
    cause_text, root_text = (first_line(problem)[:MAX_CAUSE_CHARS] for problem in (cause, root))
    shown, missing = [message, *map(str, parts.values())], []
    for words in (cause_text, root_text):
        if not any(words in text for text in shown):
            missing.append(words)
            shown.append(words)
    line = copy.copy(record)
    line.msg, line.args, line.exc_info, line.exc_text = message, None, None, None
    line.parts = {**parts, "cause": ": ".join(missing)} if missing else parts
    line.trouble = (type(cause).__name__, _without_numbers(cause_text))
    return line


def _problems_in(record: logging.LogRecord) -> list[BaseException]:
    arguments = record.args if isinstance(record.args, tuple) else ()
    raised = record.exc_info[1] if record.exc_info else None
    values = (raised, *arguments, *getattr(record, "parts", {}).values())
    return [problem for problem in values if isinstance(problem, BaseException)]


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's text.

    Return the name of the exception's type if the text is empty.

    Why: a database library adds lines with values of the statement.
    """
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the record's fields. An exception becomes the first line of its text."""
    parts: dict[str, object] = getattr(record, "parts", {})
    return {
        name: first_line(part) if isinstance(part, BaseException) else part
        for name, part in parts.items()
    }


def _without_numbers(text: str) -> str:
    return _NUMBERS.sub("#", text)


@dataclass(slots=True)
class _Trouble:
    since: float
    last: logging.LogRecord
    more: int = 0


class Repeats:
    """Suppresses repeated records. Not thread-safe: callers hold logging's lock."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # Ordered by time, the oldest first.
        self._troubles: dict[object, _Trouble] = {}

    def news(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """Yield the records to write now.

        These are ``record``, unless it repeats a warning or error of the last minute, and a line
        with the count for each suppressed problem whose minute is over. If ``record`` repeats such
        a problem, ``record`` itself has the count. With more than ``MAX_TROUBLES`` problems, the
        minute of the oldest problems is cut short. Records below WARNING are always written.
        """
        now = self._monotonic()
        if record.levelno < logging.WARNING:
            yield from self._drop_ended(now)
            yield record
            return
        key = _key(record)
        before = self._troubles.get(key)
        if before is not None and now - before.since < PERIOD_SECONDS:
            before.more, before.last = before.more + 1, record
            yield from self._drop_ended(now)
            return
        self._troubles.pop(key, None)
        yield from self._drop_ended(now)
        self._troubles[key] = _Trouble(now, record)
        yield record if before is None or not before.more else _add_count(record, before.more)

    def rest(self) -> Iterator[logging.LogRecord]:
        """Yield a line with the count for each problem with suppressed records, and forget all."""
        yield from self._drop_ended(float("inf"))

    def _drop_ended(self, now: float) -> Iterator[logging.LogRecord]:
        while self._troubles:
            key, oldest = next(iter(self._troubles.items()))
            if now - oldest.since < PERIOD_SECONDS and len(self._troubles) <= MAX_TROUBLES:
                return
            del self._troubles[key]
            if oldest.more:
                yield _add_count(oldest.last, oldest.more)


def _key(record: logging.LogRecord) -> object:
    if trouble := getattr(record, "trouble", None):
        return trouble
    text = _without_numbers(record.getMessage())
    if record.name.partition(".")[0] not in _OWN:
        # Libraries log ids of connections, which differ for each attempt.
        text = _IDS.sub("#", text)
    parts = tuple((name, _without_numbers(str(part))) for name, part in fields_of(record).items())
    kind = record.exc_info[0] if record.exc_info else None
    return record.name, record.levelno, text, parts, kind


def _add_count(record: logging.LogRecord, more: int) -> logging.LogRecord:
    line = copy.copy(record)
    line.msg, line.args = f"{record.getMessage()} ({more} more like it in the last minute)", None
    return line
