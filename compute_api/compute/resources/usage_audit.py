# SPDX-License-Identifier: Apache-2.0
"""Handlers of /os-instance_usage_audit_log, the log of monthly usage audits of hosts.

Hosts of Kilonova write no audits, because the database counts the usage (``resources.usage``). The
responses are those of a Nova with audits off, which is the default there: no host needs to run an
audit, so all hosts are done.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

from common.domain import errors
from common.domain.clock import SECOND
from common.domain.json_types import JsonObject
from common.store.engine import moment
from compute_api.compute.request.request import Request

_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f")


def index(request: Request) -> JsonObject:
    """Return an empty log of the last complete month, for GET /os-instance_usage_audit_log."""
    return {"instance_usage_audit_logs": _build_log(request, None)}


def show(request: Request, before: str) -> JsonObject:
    """Return an empty log of the last month that was complete at the time ``before``.

    Raises:
        BadRequest: The time is not in one of ``_FORMATS``, or is too early.
    """
    text = unquote(before)
    for form in _FORMATS:
        try:
            return {"instance_usage_audit_log": _build_log(request, datetime.strptime(text, form))}
        except (ValueError, OverflowError):  # There is no month before January of the year 1.
            continue
    raise errors.BadRequest(
        f"Invalid timestamp for date {text[:80]}; write the time like 2026-01-31 23:59:59."
    )


def _build_log(request: Request, before: datetime | None) -> JsonObject:
    ended = _find_month_end(
        before or datetime.fromtimestamp(request.read(moment) // SECOND, UTC).replace(tzinfo=None)
    )
    began = _find_month_start(ended - timedelta(days=1))
    return {
        "period_beginning": str(began),
        "period_ending": str(ended),
        "num_hosts": 0,
        "num_hosts_done": 0,
        "num_hosts_running": 0,
        "num_hosts_not_run": 0,
        "hosts_not_run": [],
        "total_instances": 0,
        "total_errors": 0,
        "overall_status": "ALL hosts done. 0 errors.",
        "log": {},
    }


def _find_month_start(of: datetime) -> datetime:
    return datetime(of.year, of.month, 1)


def _find_month_end(before: datetime) -> datetime:
    """Return the end of the last month that was complete at this time.

    The end is midnight of the first day after the month. At this moment itself the month does not
    count as complete yet.
    """
    first = _find_month_start(before)
    return first if first < before else _find_month_start(first - timedelta(days=1))
