# SPDX-License-Identifier: Apache-2.0
"""Usage of projects, calculated by SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import Connection

from common.domain import errors, ids, states
from common.domain.clock import SECOND
from common.domain.models import Flavor
from common.domain.wire import to_wire
from common.store.engine import Store
from common.store.servers import servers
from common.store.tenants import usage
from common.store.tenants.usage import Period

AT = 1_700_000_000 * SECOND
PERIOD = Period(AT, AT + 100 * SECOND)
FLAVORS = (Flavor("1", "m1.nano", 1, 128, 1), Flavor("2", "m1.öre", 2, 256, 2))


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    """Yield a store with servers of two projects, before, across, within and after the period.

    Some still run.
    """
    store = Store(upgraded_url)
    rows = [
        {
            "id": ids.new(),
            "project_id": project,
            "user_id": "u",
            "name": "s",
            "hostname": "s",
            "flavor_id": "1",
            "vm_state": states.ACTIVE,
            "flavor": to_wire(flavor),
            "vcpus": 1,
            "disk_gb": 1,
            "memory_mb": 128,
            "meta": {},
            "tags": [],
            "scheduler_hints": {},
            "security_groups": [],
            "reservation_id": "r",
            "launched_at": None if launched is None else AT + launched * SECOND,
            "terminated_at": None if ended is None else AT + ended * SECOND,
        }
        for project in ("p", "q")
        for flavor in FLAVORS
        for launched, ended in (
            (-50, None),
            (-50, -10),
            (-50, 0),
            (-50, 50),
            (10, 20),
            (10, 200),
            (100, None),
            (150, 160),
            (None, None),
        )
    ]
    with store.begin() as tx:
        servers.insert(tx, rows)
    yield store
    store.close()


@pytest.mark.parametrize("project", [None, "q", "nobody"])
def test_usage_sums_equal_totals_of_servers(store: Store, project: str | None) -> None:
    server_usages = store.read(lambda tx: list(usage.of_servers(tx, PERIOD, project)))
    sums = store.read(lambda tx: list(usage.sums(tx, PERIOD, project)))
    counted: Counter[tuple[str, str]] = Counter()
    for usage_row in server_usages:
        counted[usage_row.project_id, usage_row.flavor.name] += usage_row.micros
    assert {
        (usage_row.project_id, usage_row.flavor.name): usage_row.micros for usage_row in sums
    } == dict(counted)
    seconds = 100 + 50 + 10 + 90
    assert set(counted.values()) == ({seconds * SECOND} if project != "nobody" else set())


def test_usage_pages_hold_each_server_once(store: Store) -> None:
    all_ids = [server.id for server in store.read(lambda tx: list(usage.of_servers(tx, PERIOD)))]
    paged_ids: list[str] = []

    def page(tx: Connection) -> list[str]:
        return [
            server.id
            for server in usage.of_servers(
                tx, PERIOD, marker=paged_ids[-1] if paged_ids else None, limit=3
            )
        ]

    while next_page := store.read(page):
        paged_ids += next_page
    assert paged_ids == all_ids and len(set(all_ids)) == 16
    with pytest.raises(errors.BadRequest, match="marker"):
        store.read(lambda tx: list(usage.of_servers(tx, PERIOD, marker=ids.new())))
