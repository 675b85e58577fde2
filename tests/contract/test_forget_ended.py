# SPDX-License-Identifier: Apache-2.0
"""``kilonova database upgrade`` takes out of ended actions what goes with an action's end now, on
the three databases."""

from __future__ import annotations

import sqlalchemy as sa

from common.store import schema, user_data
from common.store.engine import Store, insert_many
from tests.years import ended

FILES = [{"path": "/etc/key", "contents": "c2VjcmV0"}]
ARGS = {
    "of a create": {"was": "active", "files": FILES},
    "of a rebuild": {"before": {"name": "old", "user_data": "c2VjcmV0"}},
    "with metadata": {"before": {"meta": {"user_data": "a tenant's own word"}}},
    "in hand": {"was": "active", "files": FILES},
    "without": {"was": "active"},
}


def test_ended_actions_hold_no_files(store: Store) -> None:
    """Of one that is in hand they stay: its guest is to be made with them."""
    rows = [
        ended("actions", f"{number:036}")
        | {"args": args, "workflow": "rebuild" if "before" in args else "create", "name": name}
        | ({"state": "due", "finished_at": None} if name == "in hand" else {})
        for number, (name, args) in enumerate(ARGS.items())
    ]
    with store.begin() as tx:
        insert_many(tx, schema.actions, rows)
    assert user_data.forget_ended(store) == 2
    asked = sa.select(schema.actions.c.name, schema.actions.c.args, schema.actions.c.updated_at)
    found = {row.name: row for row in store.read(lambda tx: tx.execute(asked).all())}
    assert {name: row.args for name, row in found.items()} == {
        **ARGS,
        "of a create": {"was": "active"},
        "of a rebuild": {"before": {"name": "old"}},
    }
    assert {row.updated_at for row in found.values()} == {rows[0]["updated_at"]}
    assert user_data.forget_ended(store) == 0
