# SPDX-License-Identifier: Apache-2.0
"""Tests of actions that fail repeatedly and become stuck, and of retry, abort and settle."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.domain.statuses import ActionState
from common.domain.verbs import VERBS, Rescue
from common.store import schema
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from conductor.engine import retries, runner
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from deploy.operator import doctor
from deploy.operator.store import stuck_actions
from tests.workflows.frozen import register
from tests.workflows.poison import change, poison
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with registered hosts and without servers."""
    register(cloud)
    return cloud


def read_last_action(cloud: Cloud, server: str) -> Any:
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def run_until_stuck(cloud: Cloud, server: str, rounds: int = 40) -> Any:
    """Run rounds until the last action of the server is stuck, and return the action."""
    for _ in range(rounds):
        cloud.round()
        if read_last_action(cloud, server).state == ActionState.STUCK:
            return read_last_action(cloud, server)
        cloud.time.pass_by(10)
    raise AssertionError(f"not stuck: {read_last_action(cloud, server)}")


def begin_stop_at_unknown_step(cloud: Cloud) -> str:
    """Return a server with a stop at a step that this release does not have."""
    [server] = cloud.create(networks=[])
    cloud.settle()
    change(cloud, cloud.ask(server, "os-stop"), step="renamed_since")
    return server


def test_action_at_unknown_step_becomes_stuck_with_fault_and_finding(cloud: Cloud) -> None:
    server = begin_stop_at_unknown_step(cloud)
    row = run_until_stuck(cloud, server)
    assert (row.failures, row.due_at, row.owner, row.lease_until) == (
        retries.MAX_EXCEPTIONS,
        None,
        None,
        None,
    )
    assert "stop has no step renamed_since in this release" in row.cause
    after = cloud.show(server)
    assert (after.vm_state, after.task_state, after.action) == (
        states.ACTIVE,
        states.POWERING_OFF,
        row.id,
    )
    assert "The stop is stuck at its step renamed_since" in after.fault["message"]
    assert "LookupError" not in after.fault["message"] and "LookupError" in after.fault["details"]
    event = cloud.store.read(lambda tx: actions.events_of(tx, row.id))[-1]
    assert (event.event, event.message) == ("stuck", after.fault["message"])
    [finding] = cloud.findings()
    assert (finding.invariant, finding.subject) == ("stuck", server)
    assert f"kilonova action show {row.id}" in finding.text


def test_stuck_action_costs_conductor_no_statements_beyond_idle_round(cloud: Cloud) -> None:
    server = begin_stop_at_unknown_step(cloud)
    run_until_stuck(cloud, server)
    statements: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sa.event.listen(cloud.store.engine, "before_cursor_execute", record)
    cloud.time.pass_by(3600)
    lanes = [Lane.INSIDE, *WORKFLOWS.lanes]
    assert [runner.advance(cloud.engine, lane) for lane in lanes] == [0] * len(lanes)
    assert len(statements) == 2 * len(lanes), "each lane begins a transaction and reads due actions"


def test_action_continues_after_fewer_than_max_exceptions(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = cloud.create()
    with monkeypatch.context() as patch:
        poison(patch, "create", "place", "apply", [server])
        for _ in range(4):
            cloud.round()
            cloud.time.pass_by(2)
        assert 1 < read_last_action(cloud, server).failures < retries.MAX_EXCEPTIONS
    cloud.time.pass_by(60)
    cloud.settle()
    row = read_last_action(cloud, server)
    assert (row.state, row.failures, row.cause) == ("done", 0, None)
    assert cloud.findings() == []


STEP_FUNCTIONS = [
    ("place", "prepare"),
    ("place", "apply"),
    ("networks", "call"),
    ("networks", "apply"),
    ("build", "command"),
    ("build", "on_result"),
    (None, "failed"),
    ("networks", "undo_call"),
    ("place", "undo"),
]


CASES = [
    (*step_function, operation)
    for step_function in STEP_FUNCTIONS
    for operation in ("retry", "abort", "settle", "delete")
    if (step_function[1], operation) != ("undo_call", "abort")
]


@pytest.mark.parametrize(
    ("step", "part", "operation"),
    [
        # Every third case is in the default set, which so has each function and each operation.
        pytest.param(*case, marks=() if number % 3 == 0 else pytest.mark.slice("operations"))
        for number, case in enumerate(CASES)
    ],
)
def test_stuck_create_ends_cleanly_by_action_retry_abort_fail_or_delete(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, step: str | None, part: str, operation: str
) -> None:
    """The cause is removed before retry and abort. `fail` and delete work while it persists."""
    is_undo = part in ("failed", "undo", "undo_call")
    if is_undo:
        for host in cloud.hosts.values():
            host.driver.host.script["ensure_guest"] = [Fail("It broke.")]
    [server] = cloud.create()
    with monkeypatch.context() as patch:
        poison(patch, "create", step, part, [server])
        row = run_until_stuck(cloud, server)
        if operation == "settle":
            cloud.store.write(lambda tx: stuck_actions.fail(tx, row.id, "It was given up."))
            assert cloud.show(server).fault["message"] == "It was given up."
        if operation in ("settle", "delete"):
            cloud.ask(server, "delete")
            cloud.settle()
    if operation == "retry":
        cloud.store.write(lambda tx: stuck_actions.retry(tx, row.id))
        assert "stuck" not in str(cloud.show(server).fault)
    if operation == "abort":
        cloud.store.write(
            lambda tx: stuck_actions.abort(
                tx, row.id, "An operator has ended it.", lambda row: None
            )
        )
    cloud.time.pass_by(15)
    cloud.settle()
    end_state = {"retry": states.ERROR if is_undo else states.ACTIVE, "abort": states.ERROR}.get(
        operation, states.DELETED
    )
    after = cloud.show(server)
    assert (after.vm_state, after.task_state, after.action) == (end_state, None, None)
    if operation == "abort":
        message = str(after.fault["message"])
        assert "An operator has ended it." in message or (is_undo and message == "It broke.")
        assert (after.host, cloud.domains(server), list(cloud.networks.held)) == (None, [], [])
    assert cloud.findings() == []


def test_abort_of_stuck_undo_skips_stuck_step_and_undoes_other_steps(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail("It broke.")]
    [server] = cloud.create()
    poison(monkeypatch, "create", "networks", "undo_call", [server])
    row = run_until_stuck(cloud, server)
    cloud.store.write(
        lambda tx: stuck_actions.abort(tx, row.id, "An operator has ended it.", lambda row: None)
    )
    cloud.settle()
    after = cloud.show(server)
    assert (after.vm_state, after.host, cloud.domains(server)) == (states.ERROR, None, [])
    assert after.fault["message"] == "It broke.", (
        "removals at the network service are pending cleanups"
    )
    cloud.clean_up()
    cloud.ask(server, "delete")
    cloud.settle()
    assert (list(cloud.networks.held), cloud.findings()) == ([], [])


def test_retry_of_stuck_create_uses_result_and_repeats_no_command(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = cloud.create(host="h1", forced=True, networks=[])
    with monkeypatch.context() as patch:
        poison(patch, "create", "build", "on_result", [server])
        row = run_until_stuck(cloud, server)
    assert (row.host, row.sent_at is None) == ("h1", False)
    cloud.store.write(lambda tx: stuck_actions.retry(tx, row.id))
    cloud.time.pass_by(5)
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE
    assert [call[0] for call in cloud.hosts["h1"].driver.host.calls].count("ensure_guest") == 1
    assert cloud.findings() == []


@pytest.mark.parametrize(
    "operation",
    [
        stuck_actions.retry,
        lambda tx, key: stuck_actions.fail(tx, key, "why"),
        lambda tx, key: stuck_actions.abort(tx, key, "why", lambda row: None),
    ],
)
def test_action_retry_abort_and_fail_conflict_unless_action_is_stuck(
    cloud: Cloud, operation: Any
) -> None:
    with pytest.raises(errors.NotFound):
        cloud.store.write(lambda tx: operation(tx, "none"))
    server = begin_stop_at_unknown_step(cloud)
    with pytest.raises(errors.Conflict, match="is due, not stuck"):
        cloud.store.write(lambda tx: operation(tx, read_last_action(cloud, server).id))
    row = run_until_stuck(cloud, server)
    cloud.ask(server, "delete")
    with pytest.raises(errors.Conflict, match="is superseded, not stuck"):
        cloud.store.write(lambda tx: operation(tx, row.id))
    cloud.settle()
    assert cloud.show(server).vm_state == states.DELETED


def test_action_of_newer_release_becomes_overdue_and_action_fail_ends_it(cloud: Cloud) -> None:
    """A downgrade can leave such an action."""
    [server] = cloud.create(networks=[])
    cloud.settle()
    action = cloud.ask(server, "os-stop")
    change(cloud, action, version=2)
    cloud.round()
    assert cloud.findings() == []
    cloud.time.pass_by(700)
    [finding] = cloud.store.read(doctor.check)
    assert finding.invariant == "overdue" and f"kilonova action fail {action}" in finding.text
    assert [
        row.id for row in cloud.store.read(lambda tx: stuck_actions.listed(tx, only_stuck=True))
    ] == [action]
    cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "It was given up."))
    assert (cloud.show(server).vm_state, cloud.findings()) == (states.ERROR, [])
    cloud.ask(server, "os-stop")
    cloud.settle()
    assert cloud.show(server).vm_state == states.STOPPED


def test_retry_of_stuck_reboot_restores_previous_fault(cloud: Cloud) -> None:
    """Two reboots of a server in ERROR become stuck, one after the other. The second is retried."""
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    previous_fault = {"code": 500, "message": "It broke.", "details": "", "created": 1}
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers)
            .where(schema.servers.c.id == server)
            .values(vm_state=states.ERROR, fault=previous_fault)
        )
    )
    for _ in range(2):
        change(cloud, cloud.ask(server, "reboot", "HARD"), step="renamed_since")
        row = run_until_stuck(cloud, server)
        assert cloud.show(server).fault["before"] == previous_fault
    cloud.store.write(lambda tx: stuck_actions.retry(tx, row.id))
    assert cloud.show(server).fault == previous_fault


def test_action_fail_of_stuck_action_succeeds_without_server_row(cloud: Cloud) -> None:
    server = begin_stop_at_unknown_step(cloud)
    row = run_until_stuck(cloud, server)
    cloud.store.write(
        lambda tx: tx.execute(sa.delete(schema.servers).where(schema.servers.c.id == server))
    )
    cloud.store.write(lambda tx: stuck_actions.fail(tx, row.id, "It was given up."))
    assert cloud.store.read(lambda tx: actions.show_by_id(tx, row.id)).state == "failed"


# --- refusals of hosts ---
def rescue_on_old_agent(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> str:
    """Begin a rescue on an agent that does not know this verb, and return the server."""
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    monkeypatch.delitem(VERBS, Rescue.name)
    ask(cloud, server, "rescue")
    return server


def test_verb_unknown_to_agent_waits_for_upgrade(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = rescue_on_old_agent(cloud, monkeypatch)
    for _ in range(3):
        cloud.round()
        cloud.time.pass_by(5)
    row = read_last_action(cloud, server)
    assert (row.state, cloud.show(server).task_state, cloud.show(server).fault) == (
        "waiting",
        states.RESCUING,
        None,
    )
    assert (
        row.cause
        == "Host h1 refuses the command rescue: its agent does not know rescue and must be upgraded."
    )
    monkeypatch.setitem(VERBS, Rescue.name, Rescue)
    cloud.time.pass_by(5)
    cloud.settle()
    assert (cloud.show(server).vm_state, read_last_action(cloud, server).cause) == (
        states.RESCUED,
        None,
    )


def test_action_with_verb_unknown_to_agent_is_stuck_after_max_refusals(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = rescue_on_old_agent(cloud, monkeypatch)
    # The default limit takes ten minutes of refusals.
    monkeypatch.setattr(retries, "MAX_REFUSALS", 12)
    row = run_until_stuck(cloud, server)
    assert row.failures == 12
    assert (
        "Host h1 refuses the command rescue: its agent does not know rescue"
        in cloud.show(server).fault["message"]
    )
    monkeypatch.setitem(VERBS, Rescue.name, Rescue)
    cloud.store.write(lambda tx: stuck_actions.retry(tx, row.id))
    cloud.time.pass_by(5)
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.findings()) == (states.RESCUED, [])
