# SPDX-License-Identifier: Apache-2.0
"""The agent's journal, an SQLite file with synchronous=FULL that survives restarts.

The journal contains the highest fence of each server, the results of commands by key, and the
number of times that this host has fenced itself since its boot. The agent does not run a command
with a recorded result again, and repeats the result.

Fences and results are kept for at least a week, because a delayed command may arrive long after the
result was acknowledged. A start of the agent deletes older ones. The answer to each
registration contains the fences of all existing guests.

Invariant: the journal contains no secrets. Arguments of commands and tokens are not written.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

from common.domain import states
from common.domain.models import Result
from common.domain.wire import from_wire, to_wire

KEEP_DAYS = 7
_TABLES = """
CREATE TABLE IF NOT EXISTS fences (server TEXT PRIMARY KEY, fence INTEGER NOT NULL,
                                   at INTEGER NOT NULL DEFAULT (unixepoch())) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, result TEXT,
                                    at INTEGER NOT NULL DEFAULT (unixepoch())) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS results_at ON results (at);
CREATE TABLE IF NOT EXISTS fencings (boot TEXT PRIMARY KEY, times INTEGER NOT NULL, ended INTEGER NOT NULL,
                                     at INTEGER NOT NULL DEFAULT (unixepoch())) WITHOUT ROWID;
"""


class Journal:
    """The journal in one file. Thread-safe.

    All threads share one connection behind a lock, because every write is short.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_TABLES)
        for table in ("results", "fences"):
            self._db.execute(
                f"DELETE FROM {table} WHERE at < unixepoch() - ?",  # noqa: S608 - a constant
                (KEEP_DAYS * 86400,),
            )

    def fences(self) -> dict[str, int]:
        """Return server -> highest fence that ``end`` has recorded.

        A start of the agent deletes fences that are older than ``KEEP_DAYS``.
        """
        with self._lock:
            return dict(self._db.execute("SELECT server, fence FROM fences"))

    def find(self, key: str) -> Result | None:
        """Return the recorded result of a command.

        Returns:
            None if the command has no result, or the result was deleted (``forget_running``, or
            after ``KEEP_DAYS``).
        """
        with self._lock:
            row = self._db.execute(
                "SELECT result FROM results WHERE key = ? AND result IS NOT NULL", (key,)
            ).fetchone()
        return from_wire(Result, json.loads(row[0])) if row else None

    def has_begun(self, key: str) -> bool:
        """Return True if ``begin`` or ``end`` has recorded the command, with or without result.

        False after the record was deleted (``forget_running``, or after ``KEEP_DAYS``).
        """
        with self._lock:
            return (
                self._db.execute("SELECT 1 FROM results WHERE key = ?", (key,)).fetchone()
                is not None
            )

    def begin(self, key: str) -> None:
        """Record that a command begins, before its effect. An existing record stays unchanged.

        ``verbs.run`` calls this only for verbs with ``runs_once``, and for live migrations.
        """
        with self._lock:
            self._db.execute("INSERT OR IGNORE INTO results (key) VALUES (?)", (key,))

    def end(self, result: Result) -> None:
        """Record a result, and the server's fence if higher, in one transaction."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT INTO results (key, result) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET "
                "result = excluded.result",
                (result.key, json.dumps(to_wire(result))),
            )
            self._db.execute(
                "INSERT INTO fences (server, fence) VALUES (?, ?) ON CONFLICT (server) DO "
                "UPDATE SET fence = max(fence, excluded.fence), at = excluded.at",
                (result.server, result.fence),
            )
            self._db.execute("COMMIT")

    def forget_running(self, server: str) -> None:
        """Delete the results that report a server's guest as running or paused.

        This host has stopped the guest, so a repeated command must not be answered with these
        results. The command is carried out again instead.
        """
        with self._lock:
            self._db.execute(
                "DELETE FROM results WHERE json_extract(result, '$.server') = ? AND "
                "json_extract(result, '$.data.power_state') IN (?, ?)",
                (server, states.RUNNING, states.POWER_PAUSED),
            )

    def fencings(self, boot: str) -> tuple[int, bool]:
        """Return the number of fencings of this boot id, and True if the last has not ended.

        Without a recorded fencing the result is (0, False).
        """
        with self._lock:
            row = self._db.execute(
                "SELECT times, ended FROM fencings WHERE boot = ?", (boot,)
            ).fetchone()
        return (row[0], row[1] == 0) if row else (0, False)

    def begin_fencing(self, boot: str) -> None:
        """Record the begin of a fencing, and delete the entries of other boots.

        Called before the first guest is stopped.
        """
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM fencings WHERE boot <> ?", (boot,))
            self._db.execute(
                "INSERT INTO fencings (boot, times, ended) VALUES (?, 1, 0) ON CONFLICT (boot) DO UPDATE "
                "SET times = times + 1, ended = 0",
                (boot,),
            )
            self._db.execute("COMMIT")

    def end_fencing(self, boot: str) -> None:
        """Record the end of the boot's last fencing: all guests are off."""
        with self._lock:
            self._db.execute("UPDATE fencings SET ended = 1 WHERE boot = ?", (boot,))

    def close(self) -> None:
        with self._lock:
            self._db.close()
