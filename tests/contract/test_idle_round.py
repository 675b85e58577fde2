# SPDX-License-Identifier: Apache-2.0
"""The SQL of an idle conductor, on the three databases.

A round runs as many statements after years of use as on the first day, and reads no growing table
completely.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from common.store.engine import Store
from tests.contract import test_plans
from tests.contract.test_plans import whole_reads
from tests.years import KEEPING, Asked, IdleConductor, analyze, fill

ROWS = 3000
ROUNDS = 3  #: rounds before the measurement: they register, and close the period of the audit


def run_round(store: Store, conductor: IdleConductor) -> list[tuple[str, Any]]:
    for _ in range(ROUNDS):
        conductor.round()
    with Asked(store) as statements:
        conductor.round()
    return statements


def test_idle_conductor_round_on_full_tables_adds_no_statement_or_scan(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    conductor = IdleConductor(store)
    before = Counter(statement for statement, _ in run_round(store, conductor))
    fill(store, 0, ROWS)
    analyze(store)
    statements = run_round(store, conductor)
    assert Counter(statement for statement, _ in statements) == before
    monkeypatch.setattr(test_plans, "GROWING", KEEPING)
    whole_reads_by_statement: dict[str, list[str]] = {}
    for statement, parameters in statements:
        if statement.startswith("INSERT"):
            continue
        with store.engine.connect() as tx:
            if whole := whole_reads(tx, statement, parameters):
                whole_reads_by_statement[statement] = whole
            tx.rollback()
    assert whole_reads_by_statement == {}
    tables = {table for table in KEEPING for statement, _ in statements if table in statement}
    assert {"servers", "actions", "migrations", "host_actions"} <= tables, "nothing was looked at"


def test_whole_reads_detects_query_without_index(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 0, ROWS)
    analyze(store)
    monkeypatch.setattr(test_plans, "GROWING", KEEPING)
    with store.engine.connect() as tx:
        assert whole_reads(tx, "SELECT id FROM actions WHERE user_id = 'x'", ()) == ["actions"]
