# SPDX-License-Identifier: Apache-2.0
"""Each action in each vm_state and task_state, with and without a lock, by each persona.

The tests call the functions below the API on a database in memory. Statuses and effects are
compared with ``tests.allowed``, which is independent of the table of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.domain.context import RequestContext
from common.store import schema
from common.store.engine import Store
from common.store.servers import actions, immediate_actions
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.http.policy import Policy
from tests import allowed
from tests.schemas import upgrade
from tests.server_rows import server_row

PROJECT, SERVER = "p" * 32, "5" * 8
CALLERS = {
    "user": RequestContext("u1", PROJECT, ("member", "reader"), "req-1"),
    "reader": RequestContext("u2", PROJECT, ("reader",), "req-2"),
    "stranger": RequestContext("u3", "q" * 32, ("member", "reader"), "req-3"),
    "admin": RequestContext("a1", "admins", ("admin",), "req-4"),
    "manager": RequestContext("u4", PROJECT, ("manager",), "req-5"),
}
WORDS = {value for name, value in vars(states).items() if name.isupper() and isinstance(value, str)}
TASKS: list[str | None] = [None, *sorted(WORDS - set(states.VM_STATES))]
NAMES = pytest.mark.parametrize("name", sorted(allowed.ALL))


def rows_of(name: str) -> list[states.Action]:
    key, _, value = name.partition(" ")
    return [
        row
        for row in states.ACTIONS
        if row.key == key and (row.when is None or row.when[1] == value)
    ]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(COMPUTE_RULES)


def test_allowed_rules_cover_the_actions_and_states_of_the_table() -> None:
    rule_keys = {name.partition(" ")[0] for name in allowed.ALL}
    assert {row.key for row in states.ACTIONS if row.query is None} - rule_keys == {
        "create",
        "softDelete",
        "attach_interface",
        "detach_interface",
        "attach_share",
        "detach_share",
        "attach_volume",
        "detach_volume",
        "extend_volume",
        "swap_volume",
        "volume_snapshot_create",
        "volume_snapshot_delete",
    }
    assert set(allowed.EVERY_STATE) == set(states.VM_STATES)


@NAMES
def test_action_is_allowed_exactly_by_roles_and_states_of_allowed_rules(
    policy: Policy, name: str
) -> None:
    rows, wrong = rows_of(name), []
    target = {"project_id": PROJECT, "user_id": "u1"}
    for token, caller in CALLERS.items():
        permitted = policy.allows(rows[0].policy, caller, target)
        sees = caller.is_admin or caller.project_id == PROJECT
        for vm_state in states.VM_STATES:
            for task_state in TASKS:
                for locked in (False, True):
                    server = SimpleNamespace(
                        vm_state=vm_state,
                        task_state=task_state,
                        locked=locked,
                        action="a" if task_state else None,
                        shares=0,
                        host="host1",
                    )
                    actual = (
                        check_status(states.matching_row(rows, vm_state), server, caller)
                        if permitted
                        else 403
                    )
                    persona = allowed.PERSONAS[token]
                    expected = allowed.status(name, persona, vm_state, task_state, locked)
                    if (actual if sees else 404) != expected:
                        wrong.append((token, vm_state, task_state, locked, actual, expected))
    assert wrong == []


def check_status(row: states.Action, server: Any, caller: RequestContext) -> int:
    try:
        actions.check(row, SERVER, server, caller)
    except errors.Problem as problem:
        return problem.status
    return row.success


# --- the effect, on rows ---
@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    new_store = upgrade(Store("sqlite://"))
    with new_store.begin() as tx:
        tx.execute(
            sa.insert(schema.servers).values(
                **server_row(SERVER, project_id=PROJECT, user_id="u1", name="vm", hostname="vm")
            )
        )
    yield new_store
    new_store.close()


def server_of(store: Store) -> Any:
    return store.read(lambda tx: tx.execute(sa.select(schema.servers)).one())


def begin_action(store: Store, name: str, caller: RequestContext) -> int:
    """Begin the action in a transaction and return the status of the outcome."""
    rows = rows_of(name)
    args = {"state": "active"} if name == "os-resetState" else {}
    scope = None if caller.is_admin else caller.project_id

    def work(tx: Any) -> None:
        if rows[0].immediate:
            immediate_actions.do(tx, rows[0], SERVER, context=caller, args=args, project_id=scope)
        else:
            actions.begin(tx, rows, SERVER, context=caller, args=args, project_id=scope)

    try:
        store.write(work)
    except errors.Problem as problem:
        return problem.status
    return rows[0].success


@NAMES
@pytest.mark.parametrize("task_state", [None, "rebooting"])
def test_accepted_action_is_recorded_and_refused_action_changes_no_row(
    store: Store, name: str, task_state: str | None
) -> None:
    holder = "running action" if task_state else None
    for vm_state in states.VM_STATES:
        with store.begin() as tx:
            tx.execute(sa.delete(schema.actions))
            tx.execute(
                sa.update(schema.servers).values(
                    vm_state=vm_state,
                    task_state=task_state,
                    action=holder,
                    locked=False,
                    locked_by=None,
                    host="host1",
                )
            )
        before, row = server_of(store), rows_of(name)[0]
        status = begin_action(store, name, CALLERS["admin"])
        after, journal = (
            server_of(store),
            store.read(lambda tx: list(tx.execute(sa.select(schema.actions)))),
        )
        assert status == allowed.status(name, "admin", vm_state, task_state, False), (
            vm_state,
            status,
        )
        if status == 409:
            assert (after, journal) == (before, [])
            continue
        assert after.task_state == allowed.task_after(name, task_state)
        [action] = journal
        assert (action.name, action.server_id, action.user_id) == (row.name, SERVER, "a1")
        if row.immediate is None:
            assert (after.fence, after.action, action.state) == (before.fence + 1, action.id, "due")
            assert (action.fence, action.args) == (after.fence, {"was": vm_state})
            assert after.vm_state == vm_state
        else:
            assert action.state == "done"


@NAMES
def test_action_on_server_of_another_project_returns_404(store: Store, name: str) -> None:
    before = server_of(store)
    assert begin_action(store, name, CALLERS["stranger"]) == 404
    assert server_of(store) == before


def test_action_without_task_state_blocks_other_actions_except_delete(store: Store) -> None:
    with store.begin() as tx:
        tx.execute(
            sa.update(schema.servers).values(
                vm_state="active", task_state=None, action=None, locked=False, host="host1"
            )
        )
    assert begin_action(store, "trigger_crash_dump", CALLERS["user"]) == 202
    assert server_of(store).task_state is None
    for name in ("trigger_crash_dump", "os-stop", "pause", "rebuild"):
        assert begin_action(store, name, CALLERS["user"]) == 409
    assert begin_action(store, "delete", CALLERS["user"]) == 204
