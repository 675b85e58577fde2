# SPDX-License-Identifier: Apache-2.0
"""Tests that an unreadable row, report or result delays no other server and no other host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids, states
from common.domain.models import DomainState, Result
from common.store import schema
from common.store.schema.columns import Json
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from conductor.engine import reports, runner
from tests.workflows.frozen import register
from tests.workflows.moves import resize_to_bigger
from tests.workflows.poison import Poison, change, hold_row_lock, poison
from tests.workflows.scenarios import PINNED, ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with registered hosts and without servers."""
    register(cloud)
    return cloud


def insert_newer_action(cloud: Cloud, server: str, host: str) -> Result:
    """Insert an action of a newer release that waits for a host's result. Return the result."""
    action, fence = ids.new(), cloud.show(server).fence + 1

    def insert(tx: Any) -> None:
        tx.execute(
            sa.update(schema.servers)
            .where(schema.servers.c.id == server)
            .values(action=action, fence=fence, task_state="new")
        )
        actions.insert(
            tx,
            [
                {
                    "id": action,
                    "server_id": server,
                    "project_id": "project",
                    "user_id": "user",
                    "request_id": ids.new_request(),
                    "name": "new",
                    "workflow": "new",
                    "version": 2,
                    "fence": fence,
                    "state": "waiting",
                    "step": "do",
                    "host": host,
                    "sent_at": 0,
                }
            ],
        )

    cloud.store.write(insert)
    return Result(f"do/{action}/do/1", server, fence, "done")


# --- actions ---
def test_action_at_unknown_step_does_not_delay_other_servers(cloud: Cloud) -> None:
    [old] = cloud.create(networks=[])
    cloud.settle()
    change(cloud, cloud.ask(old, "os-stop"), step="renamed_since")
    others = cloud.create(5, networks=[])
    for _ in range(3):
        cloud.round()
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    assert cloud.show(old).task_state == states.POWERING_OFF


@pytest.mark.parametrize(
    "values", [{"data": ["no dictionary"]}, {"args": 7}, {"phase": "sideways"}, {"step": "build"}]
)
def test_action_with_invalid_values_does_not_delay_other_servers(
    cloud: Cloud, values: dict[str, Any]
) -> None:
    bad, *others = cloud.create(6)
    [action] = cloud.store.read(lambda tx: actions.list_for(tx, bad))
    change(cloud, action.id, **values)
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}


@pytest.mark.parametrize(
    "values",
    [{"flavor": {}}, {"image": {"unknown": 1}}, {"interfaces": [{}]}, {"scheduler_hints": 3}],
)
def test_server_with_invalid_values_does_not_delay_other_servers(
    cloud: Cloud, values: dict[str, Any]
) -> None:
    bad, *others = cloud.create(4)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == bad).values(values)
        )
    )
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}


@pytest.mark.parametrize(
    ("table", "column"), [("actions", "data"), ("actions", "args"), ("servers", "flavor")]
)
def test_invalid_json_is_kept_and_does_not_delay_other_servers(
    cloud: Cloud, table: str, column: str
) -> None:
    bad, *others = cloud.create(4)
    key_column = "server_id" if table == "actions" else "id"
    cloud.store.write(
        lambda tx: tx.execute(
            sa.text(f"UPDATE {table} SET {column} = '{{broken' WHERE {key_column} = :id"),
            {"id": bad},
        )
    )
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    [action] = cloud.store.read(lambda tx: actions.list_for(tx, bad))
    assert (action.state, action.failures > 0) == ("due", True)
    row = {"actions": action, "servers": cloud.show(bad)}[table]
    assert getattr(row, column) == "{broken", "the damaged text is unchanged"


def test_host_registration_after_boot_succeeds_if_one_reboot_cannot_begin(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other servers run at once. The server without a reboot runs once the reboot can begin."""
    bad, *others = cloud.create(7, networks=[])
    cloud.settle()
    host, begin = cloud.hosts[cloud.show(bad).host], actions.begin
    others_on_host = [server for server in others if cloud.show(server).host == host.name]
    assert others_on_host, "no other server is on the same host"

    def begin_or_fail(tx: Any, rows: Any, server: str, **values: Any) -> str:
        if server == bad:
            raise Poison("begin")
        return begin(tx, rows, server, **values)

    monkeypatch.setattr(actions, "begin", begin_or_fail)
    host.power_cut()
    host.power_on()
    for _ in range(4):
        cloud.round()
    assert host.agent.session
    assert {host.driver.host.guests[server].power_state for server in others_on_host} == {
        states.RUNNING
    }
    monkeypatch.undo()
    cloud.idle(130)
    assert host.driver.host.guests[bad].power_state == cloud.show(bad).power_state == states.RUNNING


def test_deletes_are_not_delayed_when_call_pool_refuses_calls_of_create(cloud: Cloud) -> None:
    """The call pool of a stopping conductor raises this error."""
    old = cloud.create(2)
    cloud.settle()
    for server in old:
        cloud.ask(server, "delete")
    servers = cloud.create(2)
    call_pool = cloud.engine.call_pool

    def call_or_fail(lane: str, call: Any, runs: Any) -> Any:
        if any(run.action.name == "create" for run in runs):
            raise RuntimeError("cannot schedule new futures after shutdown")
        return call_pool(lane, call, runs)

    cloud.engine.call_pool = call_or_fail
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in old} == {states.DELETED}
    cloud.engine.call_pool = call_pool
    cloud.time.pass_by(61)
    cloud.settle()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}


STEP_FUNCTIONS = [
    ("create", "place", "prepare"),
    ("create", "place", "apply"),
    ("create", "networks", "call"),
    ("create", "networks", "apply"),
    ("create", "networks", "condition"),
    ("create", "build", "command"),
    ("create", "build", "on_result"),
    ("create", "plug", "condition"),
    ("create", "place", "undo"),
    ("create", "networks", "undo"),
    ("create", "networks", "undo_call"),
    ("create", None, "failed"),
]
UNDO_PARTS = ("undo", "undo_call", "failed")


@pytest.mark.parametrize(("workflow", "step", "part"), STEP_FUNCTIONS)
def test_raising_step_function_does_not_delay_other_servers(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, workflow: str, step: str | None, part: str
) -> None:
    if part in UNDO_PARTS:
        for host in cloud.hosts.values():
            host.driver.host.script["ensure_guest"] = [Fail("It broke.")] * 6
    bad, *others = cloud.create(6)
    poison(monkeypatch, workflow, step, part, [bad])
    for _ in range(8):
        cloud.round()
    end_state = states.ERROR if part in UNDO_PARTS else states.ACTIVE
    assert {cloud.show(server).vm_state for server in others} == {end_state}
    assert (cloud.show(bad).vm_state, cloud.show(bad).action is None) == (states.BUILDING, False)
    ports = [port["device_id"] for port in cloud.networks.held.values()]
    assert len(set(ports) - {bad}) == len([port for port in ports if port != bad])


def test_create_without_scheduler_answer_delays_other_creates_only_briefly(cloud: Cloud) -> None:
    """The scheduler dies of one request spec, so a select with this spec is never answered."""
    bad, *others = cloud.create(6, networks=[])
    select, sizes = cloud.select, []  # type: ignore[var-annotated]

    def select_or_fail(specs: Any, fresh: bool) -> Any:
        sizes.append(len(specs))
        if any(spec.server == bad for spec in specs):
            raise errors.NoAnswer("kilonova-scheduler did not answer select within 10 s.")
        return select(specs, fresh)

    cloud.select = select_or_fail  # type: ignore[method-assign]
    for _ in range(40):
        cloud.round()
        cloud.time.pass_by(3)
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    assert len(sizes) < 100, "the conductor repeats few selects"
    assert cloud.show(bad).vm_state == states.BUILDING


def test_external_calls_are_not_repeated_when_shared_transaction_fails(cloud: Cloud) -> None:
    """One transaction for three servers fails after their ports exist. Each server has one port."""
    servers = cloud.create(3)
    runner.advance(cloud.engine)
    failures: list[str] = []

    def fail_once(workflow: str, step: str, where: str) -> None:
        if (step, where) == ("networks", "written") and not failures:
            failures.append(where)
            raise Poison

    cloud.engine.fault_point = fail_once
    before = cloud.networks.calls
    runner.advance(cloud.engine, "network")
    assert failures
    create_calls = [method for method, _ in cloud.networks.asked[before:]].count("create")
    cloud.settle()
    ports = [port["device_id"] for port in cloud.networks.held.values()]
    assert sorted(ports) == sorted(servers)
    assert create_calls == 3, "one call for each server, and none again"
    assert cloud.findings() == []


def test_locked_server_row_delays_stops_of_other_servers_only_once(cloud: Cloud) -> None:
    servers = cloud.create(6, networks=[])
    cloud.settle()
    for server in servers:
        cloud.ask(server, "os-stop")
    with hold_row_lock(cloud, servers[2], 3) as waits:
        start = cloud.time.monotonic()
        runner.advance(cloud.engine)
        assert (
            len({command.server for _, command in cloud.sent if command.verb == "ensure_stopped"})
            == 5
        )
        assert cloud.time.monotonic() - start < 4
        before = len(waits)
        for _ in range(30):
            cloud.round()
        assert len(waits) == before, "no transaction waits again for the locked row"
        assert [cloud.show(server).vm_state for server in servers].count(states.STOPPED) == 5
    cloud.time.pass_by(11)
    for _ in range(3):
        cloud.round()
    assert {cloud.show(server).vm_state for server in servers} == {states.STOPPED}


def test_conductor_does_not_query_unreachable_database_for_each_server(cloud: Cloud) -> None:
    cloud.create(20, networks=[])
    statements: list[str] = []

    def raise_no_store(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)
        raise errors.NoStore

    def disconnect_database(workflow: str, step: str, where: str) -> None:
        if where == "proposed":
            sa.event.listen(cloud.store.engine, "before_cursor_execute", raise_no_store)

    cloud.engine.fault_point = disconnect_database
    with pytest.raises(errors.Unavailable):
        runner.advance(cloud.engine)
    assert len(statements) <= 3
    sa.event.remove(cloud.store.engine, "before_cursor_execute", raise_no_store)
    cloud.engine.fault_point = lambda workflow, step, where: None
    cloud.time.pass_by(20)
    cloud.settle()


# --- reports ---
def test_host_keeps_lease_when_lost_command_cannot_be_rebuilt(cloud: Cloud) -> None:
    stuck, other = cloud.create(2, host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.lose = lambda kind: kind == "do"
    bad = cloud.ask(stuck, "os-stop")
    cloud.ask(other, "os-stop")
    cloud.advance()
    cloud.lose = lambda kind: False
    change(cloud, bad, step="renamed_since")
    for _ in range(10):
        cloud.round()
    assert cloud.hosts["h1"].agent.has_lease()
    assert cloud.show(other).vm_state == states.STOPPED


def test_result_for_action_of_newer_release_is_left_to_newer_conductor(cloud: Cloud) -> None:
    new, other = cloud.create(2, host="h1", forced=True, networks=[])
    cloud.settle()
    agent = cloud.hosts["h1"].agent
    result = insert_newer_action(cloud, new, "h1")
    agent._results[result.key] = result
    cloud.ask(other, "os-stop")
    for _ in range(40):
        cloud.round()
    assert agent.has_lease() and not agent.has_news()
    assert cloud.show(other).vm_state == states.STOPPED
    assert cloud.show(new).task_state == "new"


@pytest.mark.parametrize(
    "bad", [{"data": {"power_state": "?"}}, {"data": None}, {"status": ["done"]}, {"key": None}]
)
def test_invalid_result_does_not_delay_other_results(cloud: Cloud, bad: dict[str, Any]) -> None:
    """The conductor acknowledges the other results to the host at once."""
    servers = cloud.create(4, host="h1", forced=True, networks=[])
    cloud.advance()
    host = cloud.hosts["h1"]
    host.work()
    results = host.agent._results
    invalid_key = next(key for key in results if results[key].server == servers[1])
    results[invalid_key] = replace(results[invalid_key], **bad)
    cloud.sync(host, ask=False)
    assert [cloud.show(server).vm_state for server in servers] == [
        states.BUILDING if server == servers[1] else states.ACTIVE for server in servers
    ]
    assert host.agent.has_lease() and not [key for key in results if key != invalid_key]


def test_invalid_domain_state_does_not_delay_other_domains(cloud: Cloud) -> None:
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.settle()
    agent = cloud.hosts["h1"].agent
    reported = [
        DomainState(server, states.SHUTDOWN, cloud.show(server).fence) for server in servers
    ]
    request = replace(
        agent.request(False, None, None),
        domains=[reported[0], replace(reported[1], power_state=[7]), reported[2]],
    )
    [answer] = reports.handle(cloud.engine, [request])
    assert not isinstance(answer, Exception) and answer.session == agent.session
    assert [cloud.show(server).vm_state for server in servers] == [
        states.STOPPED,
        states.ACTIVE,
        states.STOPPED,
    ]


def test_invalid_report_of_one_host_does_not_delay_other_hosts(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Inventory, phases and progress in the report are invalid.

    Later reports of this host are handled in transactions of their own.
    """
    cloud.create(2, host="h2", forced=True, networks=[])
    cloud.advance()
    good, bad = cloud.hosts["h2"], cloud.hosts["h1"]
    good.work()
    inventory = replace(bad.driver.inventory(), traits=7, numa_nodes=[3])
    requests = [
        replace(
            bad.agent.request(True, None, None),
            inventory=inventory,
            phases={"do/k/s/1": 9},
            moved={"x": 3},
        ),
        good.agent.request(True, None, None),
    ]
    answers = reports.handle(cloud.engine, requests)
    assert [getattr(answer, "session", None) for answer in answers] == [
        bad.agent.session,
        good.agent.session,
    ]
    assert len(answers[1].acknowledged) == 2  # type: ignore[union-attr]  # no exception: it has a session
    second_answers = reports.handle(cloud.engine, requests)
    assert [getattr(answer, "session", None) for answer in second_answers] == [
        bad.agent.session,
        good.agent.session,
    ]
    assert caplog.text.count("reports cannot be processed together") == 1


def test_guest_and_its_record_are_removed_although_step_of_delete_raises(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.ask(server, "delete")
    cloud.advance()
    poison(monkeypatch, "delete", "remove", "apply", [server])
    for _ in range(3):
        cloud.round()
    assert cloud.domains(server) == []
    assert cloud.store.read(lambda tx: tx.execute(sa.select(schema.guests)).all()) == []


def test_locked_server_row_delays_reports_of_hosts_only_once(cloud: Cloud) -> None:
    """Only the first report waits for the row. The host repeats the result until then."""
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.advance()
    host, other = cloud.hosts["h1"], cloud.hosts["h2"]
    host.work()
    with hold_row_lock(cloud, servers[0], 3) as waits:
        requests = [host.agent.request(True, None, None), other.agent.request(True, None, None)]
        answers = reports.handle(cloud.engine, requests)
        assert [answer.session for answer in answers] == [host.agent.session, other.agent.session]  # type: ignore
        assert [cloud.show(server).vm_state for server in servers] == [
            states.BUILDING,
            states.ACTIVE,
            states.ACTIVE,
        ]
        before = len(waits)
        assert before == 1
        for _ in range(4):
            reports.handle(cloud.engine, requests)
            cloud.time.pass_by(6)
        assert len(waits) == before
        host.agent.record_answer(requests[0], answers[0])  # type: ignore[arg-type]  # it is an answer
    cloud.time.pass_by(11)
    for _ in range(3):
        cloud.round()
    assert cloud.show(servers[0]).vm_state == states.ACTIVE
    assert cloud.findings() == []


def damage(cloud: Cloud, table: str, column: str, row_id: str, document: str) -> None:
    """Write invalid JSON into a column of a row, as a disk error or an operator may do."""
    statement = sa.text(f"UPDATE {table} SET {column} = :document WHERE id = :id")
    cloud.store.write(lambda tx: tx.execute(statement, {"document": document, "id": row_id}))


JSON_COLUMNS = [column.name for column in schema.servers.c if isinstance(column.type, Json)]


def test_shelve_undoes_completed_steps_when_server_row_lost_its_host(cloud: Cloud) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    images = dict(cloud.images.records)
    ask(cloud, server, "shelve")
    cloud.advance()
    host = cloud.hosts[cloud.show(server).host]
    host.work()
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == server).values(host=None)
        )
    )
    cloud.sync(host, ask=False)
    cloud.advance()
    query = sa.select(schema.events.c.step).where(schema.events.c.event == "failed")
    assert cloud.store.read(lambda tx: tx.scalars(query).all()) == ["upload"]
    assert cloud.images.records == images


@pytest.mark.parametrize("document", ["{broken", "7", '"text"', "[7]"])
@pytest.mark.parametrize("column", ["args", "data"])
def test_delete_succeeds_when_json_of_superseded_actions_is_unreadable(
    cloud: Cloud, column: str, document: str
) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    cloud.lose = lambda kind: kind == "do"
    first = cloud.ask(server, "createImage", args={"image_id": ids.new(), "name": "snap"})
    cloud.advance()
    second = cloud.ask(server, "delete")
    for action in (first, second):
        damage(cloud, "actions", column, action, document)
    cloud.lose = lambda kind: False
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).vm_state == states.DELETED


@pytest.mark.parametrize("column", JSON_COLUMNS)
def test_delete_succeeds_when_json_column_of_server_is_unreadable(
    cloud: Cloud, column: str
) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    damage(cloud, "servers", column, server, "{broken")
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).vm_state == states.DELETED


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("hosts", column.name) for column in schema.hosts.c if isinstance(column.type, Json)),
        ("guests", "assignment"),
    ],
)
def test_create_succeeds_when_json_column_of_host_is_damaged(
    cloud: Cloud, table: str, column: str
) -> None:
    [first] = cloud.create(networks=[])
    cloud.settle()
    host = cloud.show(first).host
    key_column = "name" if table == "hosts" else "host"
    statement = sa.text(f"UPDATE {table} SET {column} = '[1,2' WHERE {key_column} = :host")
    cloud.store.write(lambda tx: tx.execute(statement, {"host": host}))
    servers = cloud.create(3, networks=[])
    for _ in range(6):
        cloud.round()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}


RELATED_JSON_COLUMNS = [
    (table.name, column.name)
    for table in schema.metadata.sorted_tables
    if table.name in ("guests", "hosts", "host_images", "migrations", "server_groups", "flavors")
    for column in table.c
    if isinstance(column.type, Json)
]


@pytest.mark.parametrize(("table", "column"), RELATED_JSON_COLUMNS)
def test_delete_in_verify_resize_succeeds_when_related_json_is_damaged(
    cloud: Cloud, table: str, column: str
) -> None:
    [server] = cloud.create(networks=[], group=cloud.group("anti-affinity"), flavor=PINNED)
    cloud.settle()
    resize_to_bigger(cloud, server)
    assert cloud.show(server).vm_state == states.RESIZED
    statement = sa.text(f"UPDATE {table} SET {column} = '{{broken' WHERE {column} IS NOT NULL")
    cloud.store.write(lambda tx: tx.execute(statement))
    cloud.ask(server, "delete")
    for _ in range(20):
        cloud.round()
    assert cloud.show(server).vm_state == states.DELETED
