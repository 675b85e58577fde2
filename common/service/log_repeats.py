# SPDX-License-Identifier: Apache-2.0
"""Troubles that repeat themselves: one line a minute with a count, and no traceback for what an
operator can mend.

What an operator can mend is a neighbour, broker or database that does not answer or refuses our
password: all lines about one of these are the same trouble, whoever logs them. Other warnings and
errors are the same when they say the same, apart from numbers.
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
MAX_TROUBLES = 1000  #: that are remembered at a time
_OWN = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy", "__main__")
_MENDABLE = (errors.Unavailable, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
#: Of libraries that only some processes import.
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
    """What of this problem or its causes an operator can mend; None: it is a failure of ours."""
    return next((one for one in _causes(problem) if _is_mendable(one)), None)


def _is_mendable(problem: BaseException) -> bool:
    return isinstance(problem, _MENDABLE) or any(
        f"{kind.__module__}.{kind.__qualname__}" in _MENDABLE_NAMES
        for kind in type(problem).__mro__
    )


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """The problem and what it comes from, the nearest first."""
    seen: set[int] = set()
    one: BaseException | None = problem
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """The record. When it tells of what an operator can mend, the cause stands in its line in place
    of a traceback, and ``trouble`` says which it is."""
    said = _problems_in(record)
    cause = next((found for one in said if (found := mendable(one))), None)
    if cause is None or record.levelno < logging.WARNING:
        return record
    *_, root = _causes(cause)
    text = record.getMessage()
    for one in (cause, root):
        words = _first_line(one)
        if words and words not in text:
            text = f"{text}: {words}"
    line = copy.copy(record)
    line.msg, line.args, line.exc_info, line.exc_text = text, None, None, None
    line.trouble = (type(cause).__name__, _alike(_first_line(cause)))
    return line


def _problems_in(record: logging.LogRecord) -> list[BaseException]:
    given = record.args if isinstance(record.args, tuple) else ()
    raised = record.exc_info[1] if record.exc_info else None
    return [one for one in (raised, *given) if isinstance(one, BaseException)]


def _first_line(problem: BaseException) -> str:
    """Its first line: what a database's library says behind it holds values of the statement."""
    lines = str(problem).strip().splitlines()
    return (lines[0] if lines else type(problem).__name__)[:MAX_CAUSE_CHARS]


def _alike(text: str) -> str:
    return _NUMBERS.sub("#", text)


@dataclass(slots=True)
class _Trouble:
    since: float
    last: logging.LogRecord
    more: int = 0


class Repeats:
    """What of the records is news. Not for several threads at a time: logging's lock is around
    it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._troubles: dict[object, _Trouble] = {}  # the oldest first

    def news(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """What to write now that this record has come: it, or not, and counts of troubles that have
        not come again."""
        now = self._monotonic()
        if record.levelno < logging.WARNING:
            yield from self._over(now)
            yield record
            return
        key = _key(record)
        before = self._troubles.get(key)
        if before is not None and now - before.since < PERIOD_SECONDS:
            before.more, before.last = before.more + 1, record
            yield from self._over(now)
            return
        self._troubles.pop(key, None)
        yield from self._over(now)
        self._troubles[key] = _Trouble(now, record)
        yield record if before is None or not before.more else _counted(record, before.more)

    def rest(self) -> Iterator[logging.LogRecord]:
        """The counts of all that was held back."""
        yield from self._over(float("inf"))

    def _over(self, now: float) -> Iterator[logging.LogRecord]:
        while self._troubles:
            key, oldest = next(iter(self._troubles.items()))
            if now - oldest.since < PERIOD_SECONDS and len(self._troubles) <= MAX_TROUBLES:
                return
            del self._troubles[key]
            if oldest.more:
                yield _counted(oldest.last, oldest.more)


def _key(record: logging.LogRecord) -> object:
    if trouble := getattr(record, "trouble", None):
        return trouble
    said = _alike(record.getMessage())
    if record.name.partition(".")[0] not in _OWN:
        said = _IDS.sub("#", said)  # of connections, which are new with each try
    kind = record.exc_info[0] if record.exc_info else None
    return record.name, record.levelno, said, kind


def _counted(record: logging.LogRecord, more: int) -> logging.LogRecord:
    line = copy.copy(record)
    line.msg, line.args = f"{record.getMessage()} ({more} more like it in the last minute)", None
    return line
