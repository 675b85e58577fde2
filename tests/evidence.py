# SPDX-License-Identifier: Apache-2.0
"""Evidence of a cloud for a failed test: its running or failed actions, and lines of its logs.

Used by the classes that implement ``Diagnosable`` (failures.py). Times are local, as in the logs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from common.domain.clock import SECOND
from common.store.engine import Store
from common.store.servers.actions import ENDED
from deploy.operator.doctor import Finding

#: Maximum lines of a log with relevant records, of a log without, and of all logs.
CONCERNING, OTHERS, ALL_LOGS = 15, 3, 120
#: Lines from the end of a record of several lines, for example a traceback, besides the first.
LAST_OF_RECORD = 6
#: Maximum bytes read from the end of each log.
LONGEST_NEWS = 1 << 20
#: Bytes read from the end of a guest's console.
TAIL = 4096
MOST_ACTIONS = 25
#: Each record in the logs of Kilonova and of external services begins with a date.
_RECORD = re.compile(r"\[?\d{4}-\d\d-\d\d")
_ALARM = re.compile(r"warning|error|critical|Traceback", re.IGNORECASE)
_ID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")


# --- actions ---
class Action(NamedTuple):
    """The columns of an action's row that ``query`` selects."""

    id: str
    server: str
    request: str
    name: str
    state: str
    phase: str
    step: str | None
    attempt: int
    host: str | None
    created_at: int
    updated_at: int
    message: str | None


def query(since: int = 0) -> str:
    """Return SQL for any database that selects the newest actions.

    Args:
        since: Time in microseconds. Ended actions are included only if they changed since then.
    """
    ended = ", ".join(f"'{state}'" for state in ENDED)
    return (
        f"SELECT id, server_id, request_id, name, state, phase, step, attempt, host, created_at, "
        f"updated_at, message "
        f"FROM actions WHERE state NOT IN ({ended}) OR updated_at >= {since:d} ORDER BY created_at DESC LIMIT 500"
    )


def describe_actions(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a line for each action that still runs or has failed, oldest first."""
    actions = [
        action
        for action in map(Action._make, rows)
        if action.state not in ENDED or action.state == "failed"
    ]
    lines = [_line(action) for action in reversed(actions[:MOST_ACTIONS])] or ["none"]
    return (
        [f"the newest {MOST_ACTIONS} of {len(actions)}:"] if len(actions) > MOST_ACTIONS else []
    ) + lines


def _line(action: Action) -> str:
    return (
        f"server {action.server} {action.name}: {action.state}, {action.phase} {action.step} on {action.host}, "
        f"attempt {action.attempt}, since {_clock(action.created_at)}, moved {_clock(action.updated_at)}, "
        f"{action.request}, action {action.id}"
        f"{f': {action.message}' if action.message else ''}"
    )


def _clock(moment: int) -> str:
    return datetime.fromtimestamp(moment / SECOND).time().isoformat("milliseconds")


def actions_in(store: Store) -> list[str]:
    """Describe all running and failed actions in the store of one test."""
    return describe_actions(store.read(lambda tx: tx.exec_driver_sql(query()).all()))


def ids(rows: Iterable[Sequence[Any]]) -> set[str]:
    """Return the ids of actions, their servers and requests, as they occur in logs."""
    return {
        match
        for action in map(Action._make, rows)
        for text in (action.id, action.server, action.request)
        for match in _ID.findall(text)
    }


def describe_findings(findings: Iterable[Finding]) -> list[str]:
    """Return the findings as ``kilonova doctor`` prints them."""
    return [f"{finding.invariant}: {finding.subject}: {finding.text}" for finding in findings] or [
        "all is well"
    ]


# --- logs ---
def sizes(logs: Iterable[Path]) -> dict[Path, int]:
    """Return the current size of each log. A log that is just being rotated is left out."""
    lengths = {}
    for log in logs:
        with contextlib.suppress(FileNotFoundError):
            lengths[log] = log.stat().st_size
    return lengths


def news(
    logs: Iterable[Path], before: Mapping[Path, int], concern: Collection[str] = ()
) -> list[str]:
    """Return the most relevant new lines of each log, below a heading.

    Args:
        logs: The log files.
        before: Size of each log at the start of the test. 0 is the default.
        concern: Ids of the test's objects. Records with an id and alarms come first.
    """
    new_records = {
        log: records
        for log, size in sizes(logs).items()
        if (records := _records(_between(log, before.get(log, 0), size)))
    }
    relevance = {
        log: [_is_relevant("\n".join(record), concern) for record in records]
        for log, records in new_records.items()
    }
    few = sum(not any(weights) for weights in relevance.values()) * OTHERS
    share = min(
        CONCERNING, max(OTHERS, (ALL_LOGS - few) // max(1, sum(map(any, relevance.values()))))
    )
    lines: list[str] = []
    for log, records in new_records.items():
        chosen = list(_choose(records, relevance[log], share))
        line_count = sum(map(len, records))
        lines += [
            f"{log.name}: {len(chosen)} of {line_count} lines",
            *(f"  {line}" for line in chosen),
        ]
    return lines or ["nothing"]


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    return _between(log, log.stat().st_size - TAIL, log.stat().st_size)[-CONCERNING:]


def _is_relevant(record: str, concern: Collection[str]) -> bool:
    return _ALARM.search(record) is not None or not set(_ID.findall(record)).isdisjoint(concern)


def _between(log: Path, before: int, size: int) -> list[str]:
    # A rotated log is shorter than before and is read from its beginning.
    start = before if before <= size else 0
    with log.open("rb") as file:
        file.seek(max(0, start, size - LONGEST_NEWS))
        return file.read(LONGEST_NEWS).decode(errors="replace").splitlines()


def _records(lines: Iterable[str]) -> list[list[str]]:
    """Group lines into records. Lines before the first dated line form a record, too."""
    records: list[list[str]] = []
    for line in filter(str.strip, lines):
        if records and not _RECORD.match(line):
            records[-1].append(line)
        else:
            records.append([line])
    return records


def _choose(records: Sequence[list[str]], relevance: Sequence[bool], limit: int) -> Iterator[str]:
    """Yield at most ``limit`` lines in their order, preferring the last relevant records."""
    chosen: dict[int, list[str]] = {}
    for weight, remaining in (True, limit), (False, OTHERS):
        for place in (
            place for place in reversed(range(len(records))) if relevance[place] == weight
        ):
            remaining = min(remaining, limit)
            if remaining == 0:
                break
            first, *rest = records[place]
            chosen[place] = [first, *rest[max(0, len(rest) - min(LAST_OF_RECORD, remaining - 1)) :]]
            remaining -= len(chosen[place])
            limit -= len(chosen[place])
    for place in sorted(chosen):
        yield from chosen[place]
