# SPDX-License-Identifier: Apache-2.0
"""The log's lines: their forms, their priorities, and what of a flood is written."""

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

import common.rpc  # noqa: F401  # chooses threads before oslo.messaging is imported
from common.domain import errors
from common.service import log
from common.service.log_repeats import MAX_TROUBLES, PERIOD_SECONDS, Repeats, mendable


class Log:
    """A logger that writes into a text, with a clock of its own."""

    def __init__(self, form: str = log.TEXT) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = log.LogHandler(self.stream, form, Repeats(lambda: self.now))
        self.logger = logging.Logger("conductor.test")
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def kept() -> Iterator[Log]:
    return Log()


def fail(problem: Exception, cause: Exception | None = None) -> None:
    raise problem from cause


def logged_exception(kept: Log, problem: Exception, cause: Exception | None = None) -> None:
    try:
        fail(problem, cause)
    except Exception:
        kept.logger.exception("a round failed")


def test_parts_stand_behind_the_message(kept: Log) -> None:
    log.event(kept.logger, "step", step="boot", host=None, ms=1.25, why='no "room"\nat all')
    [line] = kept.lines
    assert line.endswith('conductor.test: step step=boot ms=1.2 why="no \\"room\\"\\nat all"')


def test_no_value_makes_a_line_of_its_own(kept: Log) -> None:
    log.event(kept.logger, "request", path="/a\r\n<0>forged \x1b[31m\u2028" + "x" * 5000)
    [line] = kept.lines
    assert line.isascii() and len(line) < 800 and "\\n<0>forged" in line


def test_json_is_an_object_a_line() -> None:
    kept = Log(log.JSON)
    log.event(kept.logger, "request", method="GET", status=200, user=None)
    logged_exception(kept, ValueError("why"))
    first, second = map(json.loads, kept.lines)
    assert (first["message"], first["method"], first["status"]) == ("request", "GET", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "user" not in first and first["level"] == "INFO"
    assert second["level"] == "ERROR" and "ValueError: why" in second["exception"]


def test_every_line_of_a_thread_names_its_request(kept: Log) -> None:
    outer = log.request_id.set("req-1")
    kept.logger.info("one")
    log.request_id.reset(outer)
    kept.logger.info("two")
    assert [line.rpartition("conductor.test: ")[2] for line in kept.lines] == [
        "one request=req-1",
        "two",
    ]


def test_the_journal_gets_a_priority_for_each_line(tmp_path: Path) -> None:
    """In a process of its own, whose standard error is a socket that $JOURNAL_STREAM names."""
    code = (
        "import logging, os; from common.service import log\n"
        "found = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}'\n"
        "log.start('DEBUG'); logger = logging.getLogger('conductor.x')\n"
        "logger.debug('a'); logger.info('b'); logger.warning('c'); logger.critical('d')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logger.exception('e')\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True
    ).stderr.splitlines()
    assert [line[:3] for line in said[:4]] == ["<7>", "<6>", "<4>", "<2>"]
    assert len(said) > 6 and all(line.startswith("<3>") for line in said[4:])


def test_another_stream_gets_no_priorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as stream:
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
        assert not log.is_journal_stream(stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert log.is_journal_stream(stream)


def test_the_same_trouble_is_one_line_a_minute(kept: Log) -> None:
    for second in range(200):
        kept.now = second
        kept.logger.warning("due actions wait: %s", errors.NoStore())
        kept.logger.warning("the sweep waits: %s", errors.NoStore())
    assert len(kept.lines) == 4
    assert "more like it" not in kept.lines[0]
    assert all("(119 more like it in the last minute)" in line for line in kept.lines[1:])


def test_counts_are_told_when_a_trouble_is_over(kept: Log) -> None:
    for _ in range(3):
        kept.logger.error("the disk is full")
    kept.now = PERIOD_SECONDS
    kept.logger.info("ready")
    assert [line.rpartition("test: ")[2] for line in kept.lines] == [
        "the disk is full",
        "the disk is full (2 more like it in the last minute)",
        "ready",
    ]


def test_counts_are_told_at_the_end(kept: Log) -> None:
    for _ in range(3):
        kept.logger.error("the disk is full")
    kept.handler.close()
    assert kept.lines[-1].endswith("(2 more like it in the last minute)")


def test_different_troubles_are_all_told(kept: Log) -> None:
    kept.logger.error("action %s is stuck", "0ab72f8e-4c1d-4c6e-9d3b-1b8a2f6a0001")
    kept.logger.error("action %s is stuck", "0ab72f8e-4c1d-4c6e-9d3b-1b8a2f6a0002")
    kept.logger.warning("%s", errors.NoAnswer("host-1 did not answer sync within 4 s."))
    kept.logger.warning("%s", errors.NoAnswer("host-2 did not answer sync within 4 s."))
    kept.logger.warning("%s", errors.NoAnswer("host-2 did not answer sync within 8 s."))
    assert len(kept.lines) == 4


def test_what_is_no_trouble_is_never_held_back(kept: Log) -> None:
    for _ in range(3):
        kept.logger.info("ready")
    assert len(kept.lines) == 3


def test_repeated_error_is_logged_again_once_it_is_forgotten(kept: Log) -> None:
    """Only the newest errors are remembered, so memory is bounded."""
    for number in range(MAX_TROUBLES + 5):
        kept.logger.error("host h%d is gone", number)
    first_lines = len(kept.lines)
    kept.logger.error("host h%d is gone", MAX_TROUBLES + 4)
    assert len(kept.lines) == first_lines
    kept.logger.error("host h%d is gone", 0)
    assert len(kept.lines) == first_lines + 1


def test_what_an_operator_mends_has_no_traceback(kept: Log) -> None:
    logged_exception(kept, errors.NoStore(), ConnectionRefusedError(111, "Connection refused"))
    [line] = kept.lines
    assert line.endswith(
        "a round failed: The database does not answer; try again.: [Errno 111] Connection refused"
    )


def test_a_failure_of_ours_keeps_its_traceback(kept: Log) -> None:
    logged_exception(kept, KeyError("x"))
    logged_exception(kept, KeyError("x"))
    assert kept.lines[1] == "Traceback (most recent call last):"
    assert len([line for line in kept.lines if "a round failed" in line]) == 1


def test_values_of_a_statement_stay_out_of_the_line(kept: Log) -> None:
    cause = Exception("password authentication failed for user kilonova\nDETAIL: more")
    problem = sa.exc.OperationalError("INSERT INTO t VALUES (:a)", {"a": "canary"}, cause)
    logged_exception(kept, problem, cause)
    [line] = kept.lines
    assert "password authentication failed" in line
    assert "canary" not in line and "INSERT" not in line and "DETAIL" not in line


def refused_by_library() -> list[Exception]:
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


@pytest.mark.parametrize("problem", refused_by_library(), ids=lambda one: type(one).__name__)
def test_libraries_name_the_same_causes(problem: Exception) -> None:
    assert mendable(problem) is problem
    try:
        fail(RuntimeError("around it"), problem)
    except RuntimeError as outer:
        assert mendable(outer) is problem
    assert mendable(RuntimeError("alone")) is None
