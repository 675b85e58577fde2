# SPDX-License-Identifier: Apache-2.0
"""Periods of the usage audit, as [DEFAULT] instance_usage_audit_period names them: month, or
day@18. Pure.

A period begins where the one before it ends: at the full hour, at midnight, on the first of the
month or of the year, all in UTC, or so many minutes, hours, days or months later.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from common.domain.clock import SECOND
from common.domain.json_types import JsonMapping

MONTH = "month"
#: What the option may be. Every month has 28 days.
FORM = r"hour(@[0-5]?\d)?|day(@(1?\d|2[0-3]))?|month(@(1?\d|2[0-8]))?|year(@(\d|1[0-2]))?"
_STEPS = {"hour": timedelta(hours=1), "day": timedelta(days=1)}


@dataclass(frozen=True, slots=True)
class Periods:
    """Periods of one length: ``unit`` is hour, day, month or year; ``offset`` moves their begin."""

    unit: str = MONTH
    offset: int = 0

    @classmethod
    def of(cls, text: str) -> Periods:
        """As the option has it."""
        unit, _, offset = text.partition("@")
        return cls(unit, int(offset or 0))

    def last(self, at: int) -> tuple[int, int]:
        """Begin and end of the last one that is over at this moment."""
        end = self._begun(datetime.fromtimestamp(at // SECOND, UTC))
        return _moment(self._before(end)), _moment(end)

    def current(self, at: int) -> tuple[int, int]:
        """The one that this moment is in, up to the moment."""
        return self.last(at)[1], at

    def _begun(self, at: datetime) -> datetime:
        begin = at.replace(minute=0, second=0)
        if self.unit == "hour":
            begin = begin.replace(minute=self.offset)
        elif self.unit == "day":
            begin = begin.replace(hour=self.offset)
        elif self.unit == MONTH:
            begin = begin.replace(hour=0, day=self.offset or 1)
        else:
            begin = begin.replace(hour=0, day=1, month=self.offset or 1)
        return begin if begin <= at else self._before(begin)

    def _before(self, begin: datetime) -> datetime:
        if self.unit in _STEPS:
            return begin - _STEPS[self.unit]
        if self.unit == MONTH and begin.month > 1:
            return begin.replace(month=begin.month - 1)
        return begin.replace(year=begin.year - 1, month=12 if self.unit == MONTH else begin.month)


def audit_period(about: JsonMapping, at: int) -> tuple[int, int]:
    """The period that a notification is about: its own, or the current one at this moment."""
    begin, end = about.get("period") or Periods.of(about.get("periods", MONTH)).current(at)
    return begin, end


def _moment(of: datetime) -> int:
    return int(of.timestamp()) * SECOND
