# SPDX-License-Identifier: Apache-2.0
"""Lists of servers read as many rows in a large table as in a small one, on the three databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.store import schema
from common.store.engine import Store, insert_many
from common.store.servers import servers
from common.store.servers.servers import ServerFilters
from tests.contract.test_plans import AGO
from tests.years import Asked

SMALL, LARGE, WANTED = 500, 2000, 20
RESERVATION = "r-abcd1234"
LISTS = {
    "without filters": ServerFilters(limit=WANTED),
    "of a project": ServerFilters(project_id="p3", limit=WANTED),
    "of a user": ServerFilters(filters={"user_id": "wanted"}),
    "of an image": ServerFilters(filters={"image": "wanted"}),
    "of a flavor": ServerFilters(filters={"flavor": "wanted"}),
    "of a host": ServerFilters(filters={"host": "wanted"}),
    "of a status": ServerFilters(states=[("error", (), ())]),
    "of a reservation": ServerFilters(filters={"reservation_id": RESERVATION}),
    "of recent changes": ServerFilters(deleted=None, changed_since=AGO + 1),
}
#: Lists whose index does not contain the order of the list.
_UNORDERED = ("of a host", "of a reservation")


def fill(store: Store, first: int, last: int) -> None:
    """Insert servers with these numbers, the first ``WANTED`` of which match each filter."""

    def row(number: int) -> dict[str, Any]:
        is_wanted = number < WANTED
        return {
            "id": f"{number:036}", "project_id": f"p{number % 7}", "name": f"n{number}", "hostname": "n",
            "user_id": "wanted" if is_wanted else "u", "image_id": "wanted" if is_wanted else "i",
            "flavor_id": "wanted" if is_wanted else "1", "host": "wanted" if is_wanted else f"h{number}",
            "vm_state": "error" if is_wanted else "active", "flavor": {}, "vcpus": 1, "memory_mb": 1,
            "disk_gb": 1, "meta": {}, "tags": [], "scheduler_hints": {}, "security_groups": [],
            "reservation_id": RESERVATION if is_wanted else f"r-{number:08}", "created_at": AGO + number,
            "updated_at": AGO + is_wanted,
        }  # fmt: skip

    with store.begin() as tx:
        insert_many(tx, schema.servers, [row(number) for number in range(first, last)])
    analyze = {"mysql": "ANALYZE TABLE servers", "postgresql": "VACUUM ANALYZE servers"}
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        tx.exec_driver_sql(analyze.get(store.dialect_name, "SELECT 1"))


def count_steps(store: Store, tx: sa.Connection, work: Callable[[sa.Connection], Any]) -> int:
    """Return the rows that MariaDB or PostgreSQL reads, or the hundreds of steps of SQLite."""
    if tx.dialect.name == "mysql":
        tx.exec_driver_sql("FLUSH STATUS")
        work(tx)
        counters = tx.exec_driver_sql("SHOW SESSION STATUS").all()
        return sum(int(value) for name, value in counters if name.startswith("Handler_read"))
    if tx.dialect.name == "sqlite":
        calls: list[int] = []
        connection: Any = tx.connection.dbapi_connection
        connection.set_progress_handler(lambda: calls.append(1), 100)
        work(tx)
        connection.set_progress_handler(None, 0)
        return len(calls)
    with Asked(store) as statements:
        work(tx)
    return sum(
        _count_rows(
            tx.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", values).scalar_one()
        )
        for text, values in statements
    )


def _count_rows(plan: Any) -> int:
    """Return the rows that the scans of PostgreSQL's plan read."""
    if isinstance(plan, list):
        return sum(map(_count_rows, plan))
    if not isinstance(plan, dict):
        return 0
    removed = sum(int(value) for key, value in plan.items() if key.startswith("Rows Removed by"))
    own = int(plan["Actual Rows"]) + removed if "Scan" in plan.get("Node Type", "") else 0
    return own + sum(map(_count_rows, plan.values()))


def measure(store: Store, filters: ServerFilters) -> tuple[int, int]:
    """Return the number of listed servers, and the steps of the database."""
    lists: list[int] = []
    with store.engine.connect() as tx:
        steps = count_steps(store, tx, lambda tx: lists.append(len(servers.page(tx, filters))))
        tx.rollback()
    return lists[0], steps


def test_list_of_servers_reads_no_more_rows_of_a_larger_table(store: Store) -> None:
    fill(store, 0, SMALL)
    small = {name: measure(store, filters) for name, filters in LISTS.items()}
    fill(store, SMALL, LARGE)
    large = {name: measure(store, filters) for name, filters in LISTS.items()}
    assert {name: number for name, (number, _) in large.items()} == dict.fromkeys(LISTS, WANTED)
    grown = {
        name: (small[name][1], steps)
        for name, (_, steps) in large.items()
        if steps > small[name][1] * 1.2 + 5
    }
    if store.dialect_name == "sqlite":
        # Without statistics SQLite prefers an index in the order of the list.
        grown = {name: steps for name, steps in grown.items() if name not in _UNORDERED}
    assert grown == {}


def test_list_after_marker_reads_only_its_own_page(store: Store) -> None:
    """The marker is in the middle of the table, so a scan of the earlier pages would be long."""
    fill(store, 0, LARGE)
    for project in (None, "p3"):
        marker = next(number for number in range(LARGE // 2, LARGE) if number % 7 == 3)
        first = ServerFilters(project_id=project, soft_deleted=False, limit=WANTED)
        later = replace(first, marker=f"{marker:036}")
        count, steps = measure(store, later)
        assert count == WANTED
        # PostgreSQL may read the servers of all seven projects in order, if that is cheaper.
        assert steps <= measure(store, first)[1] * 8 + 5


@pytest.mark.parametrize(
    ("filters", "unindexed"),
    [
        (ServerFilters(filters={"host": "h", "user_id": "u"}, sort=[("created_at", True)]), []),
        (ServerFilters(filters={"name": "n", "ip": "10"}, sort=[("hostname", True)]), ["name", "ip", "hostname"]),
        (ServerFilters(filters={"unknown": "n"}, tags={"tags-any": ["a"]}), ["tags-any"]),
    ],
)  # fmt: skip
def test_list_unindexed_names_filters_and_sort_keys_without_index(
    filters: ServerFilters, unindexed: list[str]
) -> None:
    assert servers.list_unindexed(filters) == unindexed
