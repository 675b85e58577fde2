# SPDX-License-Identifier: Apache-2.0
"""Logging: one line an event to standard error, where systemd or the supervisor keeps it.

Below systemd each line begins with its priority, which the journal reads (sd-daemon(3)). ``event``
logs what has parts: in text they stand behind the message as name=value, in JSON they are members.
A trouble that repeats itself is one line a minute (``common.service.log_repeats``). Libraries that
tell of every connection are quieted; values of options marked secret never reach a log because
nothing here prints configuration.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from typing import TextIO

import orjson

from common.service.log_repeats import Repeats, without_traceback

TEXT, JSON = "text", "json"
_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_JOURNAL_FORMAT = "%(levelname)s %(name)s: %(message)s"  # the journal has the rest
_PLAIN = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,500}\Z")  # what needs no quotes as a value
MAX_VALUE_CHARS = 500
_QUIET = (
    "amqp",
    "kombu",
    "oslo_messaging",
    "oslo.messaging",
    "keystoneauth",
    "urllib3",
    "stevedore",
    "keystonemiddleware",
    "oslo_policy",
    "alembic",
    "oslo_service",
)
#: Of the request that this thread works for; it stands in every line that the thread logs.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def start(level: str = "INFO", form: str = TEXT) -> None:
    """Log from this level on, in this form."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(LogHandler(sys.stderr, form))
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def event(logger: logging.Logger, what: str, level: int = logging.INFO, **parts: object) -> None:
    """Log what has happened, with its parts; a part that is None or empty is left out."""
    if logger.isEnabledFor(level):
        logger.log(level, what, extra={"parts": parts})


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records, and of a trouble that repeats itself one a minute with a count."""

    def __init__(self, stream: TextIO, form: str = TEXT, repeats: Repeats | None = None) -> None:
        super().__init__(stream)
        is_journal = is_journal_stream(stream)
        chosen = JsonFormatter() if form == JSON else TextFormatter(is_journal)
        self.setFormatter(JournalFormatter(chosen) if is_journal else chosen)
        self._repeats = repeats or Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, with its lock."""
        for one in self._repeats.news(without_traceback(record)):
            super().emit(one)

    def close(self) -> None:
        """Called by logging at the end: what was held back is told."""
        self.acquire()
        try:
            for one in self._repeats.rest():
                super().emit(one)
        finally:
            self.release()
        super().close()


def is_journal_stream(stream: TextIO) -> bool:
    """Does the journal read what is written here? systemd says so in $JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class TextFormatter(logging.Formatter):
    """A line for people, which programs can read too."""

    def __init__(self, is_journal: bool = False) -> None:
        super().__init__(_JOURNAL_FORMAT if is_journal else _FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        """Called by format()."""
        said = super().formatMessage(record)
        parts = _parts(record)
        return " ".join((said, *(f"{name}={_value(part)}" for name, part in parts.items())))


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, process, logger, message, the parts, and a traceback as
    exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        milliseconds = int(record.created * 1000)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
        said = {
            "time": f"{moment}.{milliseconds % 1000:03}Z",
            "level": record.levelname,
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **_parts(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(said, default=str).decode()


class JournalFormatter(logging.Formatter):
    """What another one makes, each line with its priority."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        mark = f"<{priority(record.levelno)}>"
        return mark + self._inner.format(record).replace("\n", "\n" + mark)


def priority(level: int) -> int:
    """syslog's number of a level: 2 critical, 3 error, 4 warning, 6 info, 7 debug."""
    known = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for least, number in known if level >= least), 7)


def _parts(record: logging.LogRecord) -> dict[str, object]:
    """The parts that a record was given, and the request that its thread works for."""
    given: dict[str, object] = getattr(record, "parts", {})
    parts = {name: part for name, part in given.items() if part is not None and part != ""}
    if "request" not in parts and (request := request_id.get()):
        parts["request"] = request
    return parts


def _value(part: object) -> str:
    """A part in a line: in quotes, and in ASCII, where it holds anything else."""
    if isinstance(part, float):
        return f"{part:.1f}"
    text = str(part)
    if _PLAIN.match(text):
        return text
    return '"' + text[:MAX_VALUE_CHARS].encode("unicode_escape").decode().replace('"', '\\"') + '"'
