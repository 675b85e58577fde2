# SPDX-License-Identifier: Apache-2.0
"""What a cloud leaves that explains a failed test: the actions in hand, and the lines of its logs
that concern them.

For those who are ``Diagnosable`` (failures.py). Times are local, as in the logs.
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

#: Of each log, lines: where something concerns the test, and where nothing does; and of all logs
#: together.
CONCERNING, OTHERS, ALL_LOGS = 15, 3, 120
#: Of a record of several lines, a traceback: its first, and so many of its last.
LAST_OF_RECORD = 6
#: Of each log the end, bytes: a test that writes more than that has its reason there.
LONGEST_NEWS = 1 << 20
#: Of a guest's console, bytes.
TAIL = 4096
MOST_ACTIONS = 25
#: Every log of ours and of our neighbours begins a record with its date.
_RECORD = re.compile(r"\[?\d{4}-\d\d-\d\d")
_ALARM = re.compile(r"warning|error|critical|Traceback", re.IGNORECASE)
_ID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")


# --- actions ---
class Action(NamedTuple):
    """One row of the table, of those that a test may have had to do with."""

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
    """SQL for any database: the newest actions that are in hand, or moved since this moment
    (microseconds)."""
    return (
        f"SELECT id, server_id, request_id, name, state, phase, step, attempt, host, created_at, "
        f"updated_at, message "
        f"FROM actions WHERE state NOT IN {ENDED} OR updated_at >= {since:d} ORDER BY created_at DESC LIMIT 500"
    )


def described(rows: Iterable[Sequence[Any]]) -> list[str]:
    """A line for each that has not ended or ended in error, oldest first."""
    shown = [
        action
        for action in map(Action._make, rows)
        if action.state not in ENDED or action.state == "failed"
    ]
    lines = [_line(action) for action in reversed(shown[:MOST_ACTIONS])] or ["none"]
    return (
        [f"the newest {MOST_ACTIONS} of {len(shown)}:"] if len(shown) > MOST_ACTIONS else []
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
    """What ``described`` says of all actions in a store that was made for one test."""
    return described(store.read(lambda tx: tx.exec_driver_sql(query()).all()))


def ids(rows: Iterable[Sequence[Any]]) -> set[str]:
    """The ids of actions, their servers and requests, by which logs speak of them."""
    return {
        found
        for action in map(Action._make, rows)
        for text in (action.id, action.server, action.request)
        for found in _ID.findall(text)
    }


def worded(findings: Iterable[Finding]) -> list[str]:
    """As ``kilonova doctor`` prints them."""
    return [f"{one.invariant}: {one.subject}: {one.text}" for one in findings] or ["all is well"]


# --- logs ---
def sizes(logs: Iterable[Path]) -> dict[Path, int]:
    """How long they are now, without those that were turned over in this moment."""
    found = {}
    for log in logs:
        with contextlib.suppress(FileNotFoundError):
            found[log] = log.stat().st_size
    return found


def news(
    logs: Iterable[Path], before: Mapping[Path, int], concern: Collection[str] = ()
) -> list[str]:
    """What they say since they had these sizes, under a heading each: the last records with one of
    the ids of concern and alarms, and a few last lines of the others."""
    told = {
        log: records
        for log, size in sizes(logs).items()
        if (records := _records(_between(log, before.get(log, 0), size)))
    }
    weighty = {
        log: [_is_weighty("\n".join(record), concern) for record in records]
        for log, records in told.items()
    }
    few = sum(not any(weights) for weights in weighty.values()) * OTHERS
    share = min(
        CONCERNING, max(OTHERS, (ALL_LOGS - few) // max(1, sum(map(any, weighty.values()))))
    )
    lines: list[str] = []
    for log, records in told.items():
        chosen = list(_chosen(records, weighty[log], share))
        written = sum(map(len, records))
        lines += [
            f"{log.name}: {len(chosen)} of {written} lines",
            *(f"  {line}" for line in chosen),
        ]
    return lines or ["nothing"]


def tail(log: Path) -> list[str]:
    """Its last lines."""
    return _between(log, log.stat().st_size - TAIL, log.stat().st_size)[-CONCERNING:]


def _is_weighty(record: str, concern: Collection[str]) -> bool:
    return _ALARM.search(record) is not None or not set(_ID.findall(record)).isdisjoint(concern)


def _between(log: Path, before: int, size: int) -> list[str]:
    start = before if before <= size else 0  # it was turned over, and begins anew
    with log.open("rb") as file:
        file.seek(max(0, start, size - LONGEST_NEWS))
        return file.read(LONGEST_NEWS).decode(errors="replace").splitlines()


def _records(lines: Iterable[str]) -> list[list[str]]:
    """Each with the lines that belong to it; what a process writes before its first record is one,
    too."""
    records: list[list[str]] = []
    for line in filter(str.strip, lines):
        if records and not _RECORD.match(line):
            records[-1].append(line)
        else:
            records.append([line])
    return records


def _chosen(records: Sequence[list[str]], weighty: Sequence[bool], limit: int) -> Iterator[str]:
    """At most so many lines, in their order: the last of the weighty records before the last of the
    others."""
    taken: dict[int, list[str]] = {}
    for weight, left in (True, limit), (False, OTHERS):
        for place in (place for place in reversed(range(len(records))) if weighty[place] == weight):
            left = min(left, limit)
            if left == 0:
                break
            first, *more = records[place]
            taken[place] = [first, *more[max(0, len(more) - min(LAST_OF_RECORD, left - 1)) :]]
            left -= len(taken[place])
            limit -= len(taken[place])
    for place in sorted(taken):
        yield from taken[place]
