# SPDX-License-Identifier: Apache-2.0
"""Periods of the usage audit, from the option instance_usage_audit_period.

For example, "month" or "day@18". Free of effects. Periods begin at the full hour, at midnight, or
on the first of the month or year, in UTC. An offset moves the begin by minutes, hours, days or
months.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from common.domain.clock import SECOND
from common.domain.json_types import JsonMapping

MONTH = "month"
#: Pattern of the option. Days end at 28, because every month has them.
FORM = r"hour(@[0-5]?\d)?|day(@(1?\d|2[0-3]))?|month(@(1?\d|2[0-8]))?|year(@(\d|1[0-2]))?"
_STEPS = {"hour": timedelta(hours=1), "day": timedelta(days=1)}


@dataclass(frozen=True, slots=True)
class Periods:
    """Periods of one length.

    ``unit`` is hour, day, month or year. ``offset`` moves their begin.
    """

    unit: str = MONTH
    offset: int = 0

    @classmethod
    def of(cls, text: str) -> Periods:
        """Parse the value of the option, which matches ``FORM``."""
        unit, _, offset = text.partition("@")
        return cls(unit, int(offset or 0))

    def last(self, at: int) -> tuple[int, int]:
        """Return begin and end of the last period that is over at the time ``at``, all in µs."""
        end = self._find_begin(datetime.fromtimestamp(at // SECOND, UTC))
        return _to_micros(self._find_previous(end)), _to_micros(end)

    def current(self, at: int) -> tuple[int, int]:
        """Return the begin of the period that contains ``at``, and ``at``. Both are in µs."""
        return self.last(at)[1], at

    def _find_begin(self, at: datetime) -> datetime:
        begin = at.replace(minute=0, second=0)
        if self.unit == "hour":
            begin = begin.replace(minute=self.offset)
        elif self.unit == "day":
            begin = begin.replace(hour=self.offset)
        elif self.unit == MONTH:
            begin = begin.replace(hour=0, day=self.offset or 1)
        else:
            begin = begin.replace(hour=0, day=1, month=self.offset or 1)
        return begin if begin <= at else self._find_previous(begin)

    def _find_previous(self, begin: datetime) -> datetime:
        if self.unit in _STEPS:
            return begin - _STEPS[self.unit]
        if self.unit == MONTH and begin.month > 1:
            return begin.replace(month=begin.month - 1)
        return begin.replace(year=begin.year - 1, month=12 if self.unit == MONTH else begin.month)


def audit_period(about: JsonMapping, at: int) -> tuple[int, int]:
    """Return begin and end of the period in a notice's ``about``, in µs.

    Without ``about["period"]``, return ``Periods.current(at)`` for ``about["periods"]``, a value of
    the option instance_usage_audit_period, or else for "month". ``at`` is the notice's time in µs.
    """
    begin, end = about.get("period") or Periods.of(about.get("periods", MONTH)).current(at)
    return begin, end


def _to_micros(of: datetime) -> int:
    return int(of.timestamp()) * SECOND
