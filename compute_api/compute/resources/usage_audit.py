# SPDX-License-Identifier: Apache-2.0
"""The log of usage audits, which hosts may write once for each month.

Kilonova's hosts write none, because what was used is counted by the database (``resources.usage``).
So this answers as a Nova with cells does whose audits are off, which is its default: no host has to
run one, so that all have.
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
    """GET /os-instance_usage_audit_log: of the last month that is over"""
    return {"instance_usage_audit_logs": _log(request, None)}


def show(request: Request, before: str) -> JsonObject:
    """GET /os-instance_usage_audit_log/{moment}: of the last month that was over then"""
    text = unquote(before)
    for form in _FORMATS:
        try:
            return {"instance_usage_audit_log": _log(request, datetime.strptime(text, form))}
        except ValueError:
            continue
    raise errors.BadRequest(
        f"Invalid timestamp for date {text[:80]}; write it like 2026-01-31 23:59:59."
    )


def _log(request: Request, before: datetime | None) -> JsonObject:
    ended = _ended_month(
        before or datetime.fromtimestamp(request.read(moment) // SECOND, UTC).replace(tzinfo=None)
    )
    began = _first(ended - timedelta(days=1))
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


def _first(of: datetime) -> datetime:
    return datetime(of.year, of.month, 1)


def _ended_month(before: datetime) -> datetime:
    """The end of the last month that was over before this moment."""
    first = _first(before)
    return first if first < before else _first(first - timedelta(days=1))
