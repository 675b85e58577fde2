# SPDX-License-Identifier: Apache-2.0
"""Log lines: formats, priorities, repeated errors and tracebacks."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import common.rpc  # noqa: F401  # It selects threads before the import of oslo.messaging.
from common.domain import errors
from common.service import log
from common.service.log_repeats import MAX_TROUBLES, PERIOD_SECONDS, Repeats, mendable


class Log:
    """A logger that writes to a string and has its own clock."""

    def __init__(self, form: str = log.TEXT) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = log.LogHandler(self.stream, form, Repeats(lambda: self.now))
        library_logger = logging.Logger("conductor.test")
        library_logger.addHandler(self.handler)
        self.logger = log.EventLogger(library_logger)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def captured_log() -> Iterator[Log]:
    return Log()


def fail(problem: Exception, cause: Exception | None = None) -> None:
    raise problem from cause


def log_exception(captured_log: Log, problem: Exception, cause: Exception | None = None) -> None:
    try:
        fail(problem, cause)
    except Exception:
        captured_log.logger.exception("a round failed")


def test_log_event_appends_quoted_fields_to_the_message(captured_log: Log) -> None:
    captured_log.logger.info("step", step="boot", host=None, ms=1.25, why='no "room"\nat all')
    [line] = captured_log.lines
    assert line.endswith('conductor.test: step step=boot ms=1.2 why="no \\"room\\"\\nat all"')


def test_log_event_escapes_line_breaks_and_cuts_long_values(captured_log: Log) -> None:
    captured_log.logger.info("request", path="/a\r\n<0>forged \x1b[31m\u2028" + "x" * 5000)
    [line] = captured_log.lines
    assert line.isascii() and len(line) < 800 and "\\n<0>forged" in line


def test_json_log_cuts_long_values_and_escapes_line_breaks() -> None:
    captured_log = Log(log.JSON)
    captured_log.logger.info("request", path="/a\r\n<0>forged" + "x" * 5000, name=["é" * 5000])
    [line] = captured_log.lines
    members = json.loads(line)
    assert members["path"].startswith("/a\r\n<0>forged") and "\\r\\n<0>forged" in line
    assert (len(members["path"]), len(members["name"])) == (log.MAX_VALUE_CHARS,) * 2


def test_json_log_writes_values_outside_of_json() -> None:
    captured_log = Log(log.JSON)
    captured_log.logger.info(
        "file", path=Path("/a\udcff"), size=10**30, ms=1.5, count=3, whole=True
    )
    members = json.loads(captured_log.lines[0])
    assert (members["path"], members["size"]) == ("/a\\udcff", str(10**30))
    assert (members["ms"], members["count"], members["whole"]) == (1.5, 3, True)


@pytest.mark.parametrize("form", [log.TEXT, log.JSON])
def test_log_field_with_exception_shows_only_its_first_line(form: str) -> None:
    captured_log = Log(form)
    captured_log.logger.info("a", problem=ValueError("first\n[parameters: canary]"), host="h1")
    captured_log.logger.warning("b", problem=ValueError("first\n[parameters: canary]"))
    captured_log.logger.warning("c", problem=KeyError(), host="")
    assert "canary" not in captured_log.stream.getvalue()
    for line in captured_log.lines[:2]:
        assert "problem=first" in line or json.loads(line)["problem"] == "first"
    assert "KeyError" in captured_log.lines[2] and "host" not in captured_log.lines[2]


def test_event_logger_passes_options_of_logging_on(captured_log: Log) -> None:
    try:
        fail(KeyError("x"))
    except KeyError as problem:
        captured_log.logger.error("a", host="h1", exc_info=problem)
    first, *traceback = captured_log.lines
    assert first.endswith("conductor.test: a host=h1") and traceback[-1] == "KeyError: 'x'"


def test_json_log_writes_one_object_a_line() -> None:
    captured_log = Log(log.JSON)
    captured_log.logger.info("request", method="GET", status=200, user=None)
    log_exception(captured_log, ValueError("why"))
    first, second = map(json.loads, captured_log.lines)
    assert (first["message"], first["method"], first["status"]) == ("request", "GET", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "user" not in first and first["level"] == "INFO"
    assert second["level"] == "ERROR" and "ValueError: why" in second["exception"]


def test_log_line_names_the_request_id_only_while_it_is_set(captured_log: Log) -> None:
    outer = log.request_id.set("req-1")
    captured_log.logger.info("one")
    log.request_id.reset(outer)
    captured_log.logger.info("two")
    assert [line.rpartition("conductor.test: ")[2] for line in captured_log.lines] == [
        "one request=req-1",
        "two",
    ]


def test_log_to_the_systemd_journal_has_a_priority_on_each_line(tmp_path: Path) -> None:
    """Runs in a separate process whose standard error is named by $JOURNAL_STREAM."""
    code = (
        "import logging, os; from common.service import log\n"
        "found = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}'\n"
        "log.start('DEBUG'); logger = logging.getLogger('conductor.x')\n"
        "logger.debug('a'); logger.info('b'); logger.warning('c'); logger.critical('d')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logger.exception('e')\n"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True
    ).stderr.splitlines()
    assert [line[:3] for line in lines[:4]] == ["<7>", "<6>", "<4>", "<2>"]
    assert len(lines) > 6 and all(line.startswith("<3>") for line in lines[4:])


def test_is_journal_stream_compares_stream_with_journal_stream_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "log", "w") as stream:
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
        assert not log.is_journal_stream(stream)
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert log.is_journal_stream(stream)


def test_repeated_warning_is_logged_once_a_minute_with_a_count(captured_log: Log) -> None:
    for second in range(200):
        captured_log.now = second
        captured_log.logger.warning("due actions wait", problem=errors.NoStore())
        captured_log.logger.warning("the sweep waits", problem=errors.NoStore())
    assert len(captured_log.lines) == 4
    assert "more like it" not in captured_log.lines[0]
    assert all("(119 more like it in the last minute)" in line for line in captured_log.lines[1:])


def test_count_of_repeated_error_is_logged_with_next_line_after_a_minute(captured_log: Log) -> None:
    for _ in range(3):
        captured_log.logger.error("the disk is full")
    captured_log.now = PERIOD_SECONDS
    captured_log.logger.info("ready")
    assert [line.rpartition("test: ")[2] for line in captured_log.lines] == [
        "the disk is full",
        "the disk is full (2 more like it in the last minute)",
        "ready",
    ]


def test_count_of_repeated_error_is_logged_when_the_handler_closes(captured_log: Log) -> None:
    for _ in range(3):
        captured_log.logger.error("the disk is full")
    captured_log.handler.close()
    assert captured_log.lines[-1].endswith("(2 more like it in the last minute)")


def test_errors_with_different_ids_hosts_or_seconds_are_all_logged(captured_log: Log) -> None:
    captured_log.logger.error("stuck", action="0ab72f8e-4c1d-4c6e-9d3b-1b8a2f6a0001")
    captured_log.logger.error("stuck", action="0ab72f8e-4c1d-4c6e-9d3b-1b8a2f6a0002")
    for text in (
        "host-1 did not answer sync within 4 s.",
        "host-2 did not answer sync within 4 s.",
        "host-2 did not answer sync within 8 s.",
    ):
        captured_log.logger.warning("no answer", problem=errors.NoAnswer(text))
    assert len(captured_log.lines) == 4


def test_events_with_different_numbers_only_are_repetitions(captured_log: Log) -> None:
    captured_log.logger.warning("reports of hosts wait", count=3, problem="busy for 4 s")
    captured_log.logger.warning("reports of hosts wait", count=5, problem="busy for 9 s")
    captured_log.logger.warning("reports of hosts wait", count=5, problem="no room")
    assert len(captured_log.lines) == 2
    captured_log.handler.close()
    assert captured_log.lines[-1].endswith(
        'reports of hosts wait (1 more like it in the last minute) count=5 problem="busy for 9 s"'
    )


def test_repeated_info_lines_are_all_logged(captured_log: Log) -> None:
    for _ in range(3):
        captured_log.logger.info("ready")
    assert len(captured_log.lines) == 3


def test_repeated_error_is_logged_again_after_many_newer_errors(captured_log: Log) -> None:
    """Only the newest errors are remembered, so memory is bounded."""
    for number in range(MAX_TROUBLES + 5):
        captured_log.logger.error("a host is gone", host=f"h{number}")
    first_lines = len(captured_log.lines)
    captured_log.logger.error("a host is gone", host=f"h{MAX_TROUBLES + 4}")
    assert len(captured_log.lines) == first_lines
    captured_log.logger.error("a host is gone", host="h0")
    assert len(captured_log.lines) == first_lines + 1


def test_unavailable_database_is_logged_with_cause_but_without_traceback(captured_log: Log) -> None:
    log_exception(captured_log, errors.NoStore(), ConnectionRefusedError(111, "Connection refused"))
    [line] = captured_log.lines
    assert line.endswith(
        'a round failed cause="The database does not answer; try again.: [Errno 111] Connection '
        'refused"'
    )


def test_mendable_problem_in_a_field_is_followed_by_its_cause(captured_log: Log) -> None:
    problem = errors.NoStore()
    problem.__cause__ = ConnectionRefusedError(111, "Connection refused")
    captured_log.logger.warning("due actions wait", problem=problem, count=3)
    [line] = captured_log.lines
    assert line.endswith(
        'due actions wait problem="The database does not answer; try again." count=3 '
        'cause="[Errno 111] Connection refused"'
    )


def test_mendable_problem_in_the_text_of_a_library_is_recognized(captured_log: Log) -> None:
    for number in range(3):
        captured_log.logger.logger.warning("attempt %d: %s", number, ConnectionError("refused"))
    [line] = captured_log.lines
    assert line.endswith("attempt 0: refused")


def test_unexpected_exception_is_logged_once_with_its_traceback(captured_log: Log) -> None:
    log_exception(captured_log, KeyError("x"))
    log_exception(captured_log, KeyError("x"))
    assert captured_log.lines[1] == "Traceback (most recent call last):"
    assert len([line for line in captured_log.lines if "a round failed" in line]) == 1


def test_database_error_is_logged_without_statement_and_values(captured_log: Log) -> None:
    cause = Exception("password authentication failed for user kilonova\nDETAIL: more")
    problem = sa.exc.OperationalError("INSERT INTO t VALUES (:a)", {"a": "canary"}, cause)
    log_exception(captured_log, problem, cause)
    [line] = captured_log.lines
    assert "password authentication failed" in line
    assert "canary" not in line and "INSERT" not in line and "DETAIL" not in line


def library_errors() -> list[Exception]:
    from amqp.exceptions import AccessRefused
    from keystoneauth1 import exceptions as identity
    from keystonemiddleware.auth_token import _exceptions as middleware
    from oslo_messaging import MessageDeliveryFailure

    return [
        AccessRefused(403, "ACCESS_REFUSED"),
        identity.ConnectFailure("no route"),
        identity.DiscoveryFailure("no version"),
        identity.Unauthorized("wrong password"),
        middleware.ServiceError("no answer"),
        MessageDeliveryFailure("no broker"),
        sa.exc.OperationalError("", {}, Exception("refused")),
    ]


@pytest.mark.parametrize("problem", library_errors(), ids=lambda error: type(error).__name__)
def test_mendable_returns_library_error_also_as_cause_of_an_exception(problem: Exception) -> None:
    assert mendable(problem) is problem
    try:
        fail(RuntimeError("around it"), problem)
    except RuntimeError as outer:
        assert mendable(outer) is problem
    assert mendable(RuntimeError("alone")) is None
