# SPDX-License-Identifier: Apache-2.0
"""Logging: one line per event to standard error.

systemd or the supervisor collects the lines.
Under systemd each line begins with its priority, which the journal reads (sd-daemon(3)). A call of
``EventLogger`` has a constant text and fields. As text the fields follow the message as name=value,
as JSON they are members of the object. A repeated problem is logged once a minute
(``common.service.log_repeats``).
Libraries that log every connection are limited to warnings. Values of secret options never reach a
log, because no code here prints the configuration.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, TextIO

import orjson

from common.service.log_repeats import Repeats, fields_of, without_traceback

TEXT, JSON = "text", "json"
_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_JOURNAL_FORMAT = "%(levelname)s %(name)s: %(message)s"  # The journal adds the other fields.
_PLAIN = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,500}\Z")  # Values that need no quotes.
MAX_VALUE_CHARS = 500
#: JSON with larger integers is refused by orjson.
_JSON_INT_LIMIT = 1 << 63
#: Keywords of a log call that are not fields.
_LOGGING = frozenset(("exc_info", "stack_info", "stacklevel", "extra"))
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
#: The id of the request that this thread works for. Each line of the thread includes it.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def start(level: str = "INFO", form: str = TEXT) -> None:
    """Log to standard error. Existing handlers are replaced.

    Args:
        level: Name of the lowest level that is logged. The libraries in ``_QUIET`` never log below
            WARNING.
        form: TEXT or JSON.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(LogHandler(sys.stderr, form))
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs events: a constant text, and each further keyword as a field.

    For example, ``log.warning("commands of a host wait", host=host, problem=problem)``. Fields that
    are None or "" are left out. A field that is an exception is shown as the first line of its
    text.
    """

    def process(
        self,
        msg: Any,  # noqa: ANN401 - passed on unchanged
        kwargs: MutableMapping[str, Any],
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Move the fields of a call into the attribute ``parts`` of its record."""
        options = {name: kwargs[name] for name in kwargs if name in _LOGGING}
        fields = {name: kwargs[name] for name in kwargs if name not in _LOGGING}
        options["extra"] = {**(options.get("extra") or {}), "parts": fields}
        return msg, options


def get_logger(name: str) -> EventLogger:
    """Return the logger of a module for events with fields."""
    return EventLogger(logging.getLogger(name))


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records to a stream. A repeated problem is written once a minute with a count."""

    def __init__(self, stream: TextIO, form: str = TEXT, repeats: Repeats | None = None) -> None:
        super().__init__(stream)
        is_journal = is_journal_stream(stream)
        line_form = _JOURNAL_FORMAT if is_journal else _FORMAT
        formatter = JsonFormatter() if form == JSON else TextFormatter(line_form)
        self.setFormatter(JournalFormatter(formatter) if is_journal else formatter)
        self._repeats = repeats or Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or only count it as a repetition. Write counts that are due.

        logging calls this with a lock held.
        """
        for line in self._repeats.news(without_traceback(record)):
            super().emit(line)

    def close(self) -> None:
        """Write the counts of suppressed records, and close. logging calls this at exit."""
        self.acquire()
        try:
            for line in self._repeats.rest():
                super().emit(line)
        finally:
            self.release()
        super().close()


def is_journal_stream(stream: TextIO) -> bool:
    """Return True if systemd's $JOURNAL_STREAM names this stream, which leads to the journal."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class TextFormatter(logging.Formatter):
    """Formats a record as text with its fields as name=value."""

    def __init__(self, form: str = _FORMAT) -> None:
        super().__init__(form)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the formatted line with the record's fields appended as NAME=VALUE."""
        message = super().formatMessage(record)
        parts = _parts(record)
        return " ".join((message, *(f"{name}={_value(part)}" for name, part in parts.items())))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    The members are time, level, process, logger, message, the fields, and a traceback as exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        milliseconds = int(record.created * 1000)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
        members = {
            "time": f"{moment}.{milliseconds % 1000:03}Z",
            "level": record.levelname,
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: _member(part) for name, part in _parts(record).items()},
        }
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(members, default=str).decode()


class JournalFormatter(logging.Formatter):
    """Puts the record's priority for the journal before each line of another formatter."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record with a priority before each line."""
        mark = f"<{priority(record.levelno)}>"
        return mark + self._inner.format(record).replace("\n", "\n" + mark)


def priority(level: int) -> int:
    """Return syslog's number of a level: 2 critical, 3 error, 4 warning, 6 info, 7 debug.

    A level between two of these gets the number of the lower level.
    """
    levels = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for least, number in levels if level >= least), 7)


def _parts(record: logging.LogRecord) -> dict[str, object]:
    """Return the record's fields that are neither None nor "".

    Without a field ``request``, add the id of this thread's request, if any.
    """
    fields = fields_of(record).items()
    parts = {name: part for name, part in fields if part is not None and part != ""}
    if "request" not in parts and (request := request_id.get()):
        parts["request"] = request
    return parts


def _value(part: object) -> str:
    """Return the text of a field. A float has one decimal.

    Values with a space, a control character, a quote, a backslash or a character outside of ASCII
    are quoted, and so are empty values and values longer than ``MAX_VALUE_CHARS``. A quoted value
    is cut to this length, and then gets escapes for such characters except spaces.
    """
    if isinstance(part, float):
        return f"{part:.1f}"
    text = str(part)
    if _PLAIN.match(text):
        return text
    return '"' + text[:MAX_VALUE_CHARS].encode("unicode_escape").decode().replace('"', '\\"') + '"'


def _member(part: object) -> object:
    """Return a field as a member of a JSON object.

    Numbers stay numbers. Every other field is its text, cut to ``MAX_VALUE_CHARS``.
    """
    if isinstance(part, float) or (isinstance(part, int) and abs(part) < _JSON_INT_LIMIT):
        return part
    return str(part)[:MAX_VALUE_CHARS].encode(errors="backslashreplace").decode()


if logging.lastResort is not None:
    # Commands do not call ``start``. Their warnings have fields, too.
    logging.lastResort.setFormatter(TextFormatter("%(message)s"))
