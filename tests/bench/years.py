# SPDX-License-Identifier: Apache-2.0
"""Cost of an idle conductor's round: ``python -m tests.bench.years [ROWS] [DATABASE ...]``.

The benchmark measures a round without ended rows, and with 1,000,000 ended rows in each table that
keeps them. A round runs each loop of the conductor once and reads the metrics, with three hosts
that are up (tests/years.py). The figures are the statements, and the median in milliseconds.
Filling eight tables takes ten minutes a database. The benchmark asserts no limits.
tests/contract/test_idle_round.py checks statements and plans.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.store import upgrades
from common.store.connections import ConnectionLimits
from common.store.engine import Store
from deploy.progress import say
from deploy.testing.servers import Servers
from tests.bench.claims import new_database
from tests.bench.figures import machine
from tests.years import Asked, IdleConductor, analyze, fill

ROWS, ROUNDS, STEP = 1_000_000, 50, 50_000
DATABASES = ("postgresql", "mariadb", "sqlite")


def cost(store: Store, conductor: IdleConductor) -> dict[str, float]:
    """Return statements and median milliseconds of a round, after some rounds to warm up."""
    for _ in range(3):
        conductor.round()
    with Asked(store) as statements:
        conductor.round()
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        conductor.round()
        took.append((time.perf_counter() - start) * 1000)
    return {"statements": len(statements), "ms": round(statistics.median(took), 1)}


def measure(url: str, rows: int) -> dict[str, dict[str, float]]:
    """Return the cost before and after filling the tables with ended rows."""
    store = Store(url, limits=ConnectionLimits(statement=0))
    try:
        upgrades.upgrade(store)
        conductor = IdleConductor(store)
        before = {"0 ended rows": cost(store, conductor)}
        for first in range(0, rows, STEP):
            fill(store, first, min(rows, first + STEP))
        analyze(store)
        return before | {f"{rows} ended rows in each table": cost(store, conductor)}
    finally:
        store.close()


def main(words: Sequence[str]) -> int:
    """Print the figures of the databases in the arguments, by default of all."""
    rows = int(words[0]) if words else ROWS
    say(json.dumps(machine()))
    with (
        tempfile.TemporaryDirectory(prefix="kn-years-", dir="/tmp") as folder,
        Servers(Path(folder) / "servers") as servers,
    ):
        Path(folder).chmod(0o755)
        for kind in words[1:] or DATABASES:
            say(json.dumps({kind: measure(new_database(servers, kind, Path(folder)), rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
