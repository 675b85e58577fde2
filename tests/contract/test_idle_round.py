# SPDX-License-Identifier: Apache-2.0
"""A conductor that has nothing to do asks the same after years as on the first day: as many
statements, and none that reads a table whole of which ended rows stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from common.store.engine import Store
from tests.contract import test_plans
from tests.contract.test_plans import whole_reads
from tests.years import KEEPING, Asked, IdleConductor, analyze, fill

ROWS = 3000
ROUNDS = 3  #: before it is looked: the first ones register, and close the audit's period


def asked(store: Store, conductor: IdleConductor) -> list[tuple[str, Any]]:
    for _ in range(ROUNDS):
        conductor.round()
    with Asked(store) as statements:
        conductor.round()
    return statements


def test_a_round_asks_the_same_after_years(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = IdleConductor(store)
    before = Counter(statement for statement, _ in asked(store, conductor))
    fill(store, 0, ROWS)
    analyze(store)
    statements = asked(store, conductor)
    assert Counter(statement for statement, _ in statements) == before
    monkeypatch.setattr(test_plans, "GROWING", KEEPING)
    found: dict[str, list[str]] = {}
    for statement, parameters in statements:
        if statement.startswith("INSERT"):
            continue
        with store.engine.connect() as tx:
            if whole := whole_reads(tx, statement, parameters):
                found[statement] = whole
            tx.rollback()
    assert found == {}
    tables = {one for one in KEEPING for statement, _ in statements if one in statement}
    assert {"servers", "actions", "migrations", "host_actions"} <= tables, "nothing was looked at"


def test_a_look_without_an_index_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 0, ROWS)
    analyze(store)
    monkeypatch.setattr(test_plans, "GROWING", KEEPING)
    with store.engine.connect() as tx:
        assert whole_reads(tx, "SELECT id FROM actions WHERE user_id = 'x'", ()) == ["actions"]
