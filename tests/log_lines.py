# SPDX-License-Identifier: Apache-2.0
"""The log of a test: its lines as they are written, and its events with their fields."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from common.service.log import TextFormatter
from common.service.log_repeats import fields_of

_FORMATTER = TextFormatter()


def render_records(records: Iterable[logging.LogRecord]) -> list[str]:
    """Return each record as it is written: time, level, event, fields and traceback."""
    return [_FORMATTER.format(record) for record in records]


def rendered_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return each record of this test as it is written: time, level, event, fields and traceback.

    ``caplog.text`` and ``getMessage`` contain no fields.
    """
    return render_records(caplog.records)


def logged_fields(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    """Return the fields of each record with this event text, without empty fields."""
    return [
        {name: part for name, part in fields_of(record).items() if part not in (None, "")}
        for record in caplog.records
        if record.getMessage() == event
    ]
