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
from tests.workflows.poison import Poison, change, locked, poison
from tests.workflows.scenarios import PINNED
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """A cloud whose hosts have registered."""
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


# --- due actions ---
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
    which = "server_id" if table == "actions" else "id"
    cloud.store.write(
        lambda tx: tx.execute(
            sa.text(f"UPDATE {table} SET {column} = '{{broken' WHERE {which} = :id"), {"id": bad}
        )
    )
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    [action] = cloud.store.read(lambda tx: actions.list_for(tx, bad))
    assert (action.state, action.failures > 0) == ("due", True)
    row = {"actions": action, "servers": cloud.show(bad)}[table]
    assert getattr(row, column) == "{broken", "and is written back as it was"


def test_register_after_boot_ends_when_one_reboot_cannot_begin(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other servers run again at once. This server runs again when its reboot can begin."""
    bad, *others = cloud.create(7, networks=[])
    cloud.settle()
    host, begin = cloud.hosts[cloud.show(bad).host], actions.begin
    here = [server for server in others if cloud.show(server).host == host.name]
    assert here, "another server runs on the same host"

    def fails(tx: Any, rows: Any, server: str, **values: Any) -> str:
        if server == bad:
            raise Poison("begin")
        return begin(tx, rows, server, **values)

    monkeypatch.setattr(actions, "begin", fails)
    host.power_cut()
    host.power_on()
    for _ in range(4):
        cloud.round()
    assert host.agent.session
    assert {host.driver.host.guests[server].power_state for server in here} == {states.RUNNING}
    monkeypatch.undo()
    cloud.idle(130)
    assert host.driver.host.guests[bad].power_state == cloud.show(bad).power_state == states.RUNNING


def test_call_pool_error_of_create_does_not_delay_deletes(cloud: Cloud) -> None:
    """A conductor that is stopping raises this error."""
    old = cloud.create(2)
    cloud.settle()
    for server in old:
        cloud.ask(server, "delete")
    servers = cloud.create(2)
    call_pool = cloud.engine.call_pool

    def fails(lane: str, call: Any, runs: Any) -> Any:
        if any(run.action.name == "create" for run in runs):
            raise RuntimeError("cannot schedule new futures after shutdown")
        return call_pool(lane, call, runs)

    cloud.engine.call_pool = fails
    for _ in range(4):
        cloud.round()
    assert {cloud.show(server).vm_state for server in old} == {states.DELETED}
    cloud.engine.call_pool = call_pool
    cloud.time.pass_by(61)
    cloud.settle()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}


PARTS = [
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
BACK = ("undo", "undo_call", "failed")


@pytest.mark.parametrize(("workflow", "step", "part"), PARTS)
def test_step_function_that_raises_does_not_delay_other_servers(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, workflow: str, step: str | None, part: str
) -> None:
    if part in BACK:
        for host in cloud.hosts.values():
            host.driver.host.script["ensure_guest"] = [Fail("It broke.")] * 6
    bad, *others = cloud.create(6)
    poison(monkeypatch, workflow, step, part, [bad])
    for _ in range(8):
        cloud.round()
    ends = states.ERROR if part in BACK else states.ACTIVE
    assert {cloud.show(server).vm_state for server in others} == {ends}
    assert (cloud.show(bad).vm_state, cloud.show(bad).action is None) == (states.BUILDING, False)
    ports = [port["device_id"] for port in cloud.networks.held.values()]
    assert len(set(ports) - {bad}) == len([port for port in ports if port != bad])


def test_request_that_kills_scheduler_delays_other_servers_briefly(
    cloud: Cloud,
) -> None:
    bad, *others = cloud.create(6, networks=[])
    select, sizes = cloud.select, []  # type: ignore[var-annotated]

    def dies(specs: Any, fresh: bool) -> Any:
        sizes.append(len(specs))
        if any(spec.server == bad for spec in specs):
            raise errors.NoAnswer("kilonova-scheduler did not answer select within 10 s.")
        return select(specs, fresh)

    cloud.select = dies  # type: ignore[method-assign]
    for _ in range(40):
        cloud.round()
        cloud.time.pass_by(3)
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    assert len(sizes) < 100, "and not one call for each"
    assert cloud.show(bad).vm_state == states.BUILDING


def test_external_calls_are_not_repeated_when_group_transaction_fails(cloud: Cloud) -> None:
    """One transaction for three servers fails after their ports exist. Each server has one port."""
    servers = cloud.create(3)
    runner.advance(cloud.engine)
    hit: list[str] = []

    def once(workflow: str, step: str, where: str) -> None:
        if (step, where) == ("networks", "written") and not hit:
            hit.append(where)
            raise Poison

    cloud.engine.fault_point = once
    before = cloud.networks.calls
    runner.advance(cloud.engine, "network")
    assert hit
    creates = [method for method, _ in cloud.networks.asked[before:]].count("create")
    cloud.settle()
    held = [port["device_id"] for port in cloud.networks.held.values()]
    assert sorted(held) == sorted(servers)
    assert creates == 3, "one call for each server, none of them twice"
    assert cloud.findings() == []


def test_locked_server_row_delays_burst_once(cloud: Cloud) -> None:
    servers = cloud.create(6, networks=[])
    cloud.settle()
    for server in servers:
        cloud.ask(server, "os-stop")
    with locked(cloud, servers[2], 3) as waits:
        begun = cloud.time.monotonic()
        runner.advance(cloud.engine)
        assert (
            len({command.server for _, command in cloud.sent if command.verb == "ensure_stopped"})
            == 5
        )
        assert cloud.time.monotonic() - begun < 4
        before = len(waits)
        for _ in range(30):
            cloud.round()
        assert len(waits) == before, "nobody waits again before it is free"
        assert [cloud.show(server).vm_state for server in servers].count(states.STOPPED) == 5
    cloud.time.pass_by(11)
    for _ in range(3):
        cloud.round()
    assert {cloud.show(server).vm_state for server in servers} == {states.STOPPED}


def test_missing_database_is_queried_once_per_burst(cloud: Cloud) -> None:
    """The conductor does not wait once for each server."""
    cloud.create(20, networks=[])
    statements: list[str] = []

    def raise_no_store(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)
        raise errors.NoStore

    def cut(workflow: str, step: str, where: str) -> None:
        if where == "proposed":
            sa.event.listen(cloud.store.engine, "before_cursor_execute", raise_no_store)

    cloud.engine.fault_point = cut
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


def test_result_of_newer_release_is_left_to_newer_conductor(cloud: Cloud) -> None:
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
    """The host gets the acknowledgement of the other results at once."""
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
    """Its inventory and its measurements are invalid. Its next report is handled alone."""
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
    again = reports.handle(cloud.engine, requests)
    assert [getattr(answer, "session", None) for answer in again] == [
        bad.agent.session,
        good.agent.session,
    ]
    assert caplog.text.count("reports cannot be processed together") == 1


def test_guest_removal_is_recorded_when_its_delete_cannot_continue(
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


def test_locked_server_row_delays_reports_once(cloud: Cloud) -> None:
    """A conductor does not wait for the row again at once. The host repeats the result."""
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.advance()
    host, other = cloud.hosts["h1"], cloud.hosts["h2"]
    host.work()
    with locked(cloud, servers[0], 3) as waits:
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


@pytest.mark.parametrize("document", ["{broken", "7", '"text"', "[7]"])
@pytest.mark.parametrize("column", ["args", "data"])
def test_delete_ends_when_superseded_action_is_unreadable(
    cloud: Cloud, column: str, document: str
) -> None:
    [server] = cloud.create(networks=[])
    cloud.settle()
    cloud.lose = lambda what: what == "do"
    first = cloud.ask(server, "createImage", args={"image_id": ids.new(), "name": "snap"})
    cloud.advance()
    second = cloud.ask(server, "delete")
    for action in (first, second):
        damage(cloud, "actions", column, action, document)
    cloud.lose = lambda what: False
    cloud.ask(server, "delete")
    cloud.settle()
    assert cloud.show(server).vm_state == states.DELETED


@pytest.mark.parametrize("column", JSON_COLUMNS)
def test_delete_ends_when_json_column_of_server_is_unreadable(cloud: Cloud, column: str) -> None:
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
    place = "name" if table == "hosts" else "host"
    statement = sa.text(f"UPDATE {table} SET {column} = '[1,2' WHERE {place} = :host")
    cloud.store.write(lambda tx: tx.execute(statement, {"host": host}))
    servers = cloud.create(3, networks=[])
    for _ in range(6):
        cloud.round()
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}


DOCUMENTS_AROUND = [
    (table.name, column.name)
    for table in schema.metadata.sorted_tables
    if table.name in ("guests", "hosts", "host_images", "migrations", "server_groups", "flavors")
    for column in table.c
    if isinstance(column.type, Json)
]


@pytest.mark.parametrize(("table", "column"), DOCUMENTS_AROUND)
def test_delete_of_resized_server_ends_when_related_json_is_damaged(
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
