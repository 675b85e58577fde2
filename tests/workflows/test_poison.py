# SPDX-License-Identifier: Apache-2.0
"""What cannot be understood, or fails as nobody foresaw, holds up nothing else: no other server, no
other host."""

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
from tests.workflows.moves import resized
from tests.workflows.poison import Poison, change, locked, poison
from tests.workflows.scenarios import PINNED
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Its hosts have registered."""
    register(cloud)
    return cloud


def foreign(cloud: Cloud, server: str, host: str) -> Result:
    """An action of a newer release waits at a host for this result."""
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
def test_a_step_that_nobody_knows_holds_up_no_other_server(cloud: Cloud) -> None:
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
def test_an_action_of_another_shape_holds_up_no_other_server(
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
def test_a_server_of_another_shape_holds_up_no_other(cloud: Cloud, values: dict[str, Any]) -> None:
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
def test_a_document_that_is_none_holds_up_no_other_server(
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
    kept = {"actions": action, "servers": cloud.show(bad)}[table]
    assert getattr(kept, column) == "{broken", "and is written back as it was"


def test_a_server_that_cannot_be_restarted_holds_up_no_registration(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was booted; the others run again at once, and it when it can be."""
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


def test_calls_that_cannot_even_be_begun_hold_up_no_other_workflow(cloud: Cloud) -> None:
    """As in a conductor that is stopping."""
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
def test_a_function_that_raises_holds_up_no_other(
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


def test_a_request_that_no_scheduler_survives_holds_others_up_for_a_while_only(
    cloud: Cloud,
) -> None:
    bad, *others = cloud.create(6, networks=[])
    select, asked = cloud.select, []  # type: ignore[var-annotated]  # numbers of requests

    def dies(specs: Any, fresh: bool) -> Any:
        asked.append(len(specs))
        if any(spec.server == bad for spec in specs):
            raise errors.NoAnswer("kilonova-scheduler did not answer select within 10 s.")
        return select(specs, fresh)

    cloud.select = dies  # type: ignore[method-assign]  # a scheduler that dies of one
    for _ in range(40):
        cloud.round()
        cloud.time.pass_by(3)
    assert {cloud.show(server).vm_state for server in others} == {states.ACTIVE}
    assert len(asked) < 100, "and not one call for each"
    assert cloud.show(bad).vm_state == states.BUILDING


def test_what_was_called_outside_is_not_called_again_when_the_group_fails(cloud: Cloud) -> None:
    """One transaction for three servers fails once their ports are made: each has one port, as if
    nothing was."""
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


def test_a_lock_on_one_server_holds_the_others_up_for_a_moment(cloud: Cloud) -> None:
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


def test_a_database_that_is_gone_is_asked_for_each_burst_only(cloud: Cloud) -> None:
    """Nobody waits for it once for each server."""
    cloud.create(20, networks=[])
    asked: list[str] = []

    def gone(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)
        raise errors.NoStore

    def cut(workflow: str, step: str, where: str) -> None:
        if where == "proposed":
            sa.event.listen(cloud.store.engine, "before_cursor_execute", gone)

    cloud.engine.fault_point = cut
    with pytest.raises(errors.Unavailable):
        runner.advance(cloud.engine)
    assert len(asked) <= 3
    sa.event.remove(cloud.store.engine, "before_cursor_execute", gone)
    cloud.engine.fault_point = lambda workflow, step, where: None
    cloud.time.pass_by(20)
    cloud.settle()


# --- reports ---
def test_a_command_that_cannot_be_made_again_cuts_no_host_off(cloud: Cloud) -> None:
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


def test_a_result_of_a_newer_release_is_left_to_a_conductor_that_knows_it(cloud: Cloud) -> None:
    new, other = cloud.create(2, host="h1", forced=True, networks=[])
    cloud.settle()
    agent = cloud.hosts["h1"].agent
    result = foreign(cloud, new, "h1")
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
def test_a_result_of_another_shape_costs_no_other(cloud: Cloud, bad: dict[str, Any]) -> None:
    """Its host hears at once of the others that they were taken in."""
    servers = cloud.create(4, host="h1", forced=True, networks=[])
    cloud.advance()
    host = cloud.hosts["h1"]
    host.work()
    results = host.agent._results
    spoilt = next(key for key in results if results[key].server == servers[1])
    results[spoilt] = replace(results[spoilt], **bad)
    cloud.sync(host, ask=False)
    assert [cloud.show(server).vm_state for server in servers] == [
        states.BUILDING if server == servers[1] else states.ACTIVE for server in servers
    ]
    assert host.agent.has_lease() and not [key for key in results if key != spoilt]


def test_a_domain_of_another_shape_costs_no_other(cloud: Cloud) -> None:
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.settle()
    agent = cloud.hosts["h1"].agent
    told = [DomainState(server, states.SHUTDOWN, cloud.show(server).fence) for server in servers]
    request = replace(
        agent.request(False, None, None),
        domains=[told[0], replace(told[1], power_state=[7]), told[2]],
    )
    [answer] = reports.handle(cloud.engine, [request])
    assert not isinstance(answer, Exception) and answer.session == agent.session
    assert [cloud.show(server).vm_state for server in servers] == [
        states.STOPPED,
        states.ACTIVE,
        states.STOPPED,
    ]


def test_one_host_that_makes_no_sense_costs_no_other(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its inventory nor what it measures is understood; the next time it is heard by
    itself."""
    cloud.create(2, host="h2", forced=True, networks=[])
    cloud.advance()
    good, bad = cloud.hosts["h2"], cloud.hosts["h1"]
    good.work()
    inventory = replace(bad.driver.inventory(), traits=7, numa_nodes=[3])
    said = [
        replace(
            bad.agent.request(True, None, None),
            inventory=inventory,
            phases={"do/k/s/1": 9},
            moved={"x": 3},
        ),
        good.agent.request(True, None, None),
    ]
    answers = reports.handle(cloud.engine, said)
    assert [getattr(answer, "session", None) for answer in answers] == [
        bad.agent.session,
        good.agent.session,
    ]
    assert len(answers[1].acknowledged) == 2  # type: ignore[union-attr]  # no exception: it has a session
    again = reports.handle(cloud.engine, said)
    assert [getattr(answer, "session", None) for answer in again] == [
        bad.agent.session,
        good.agent.session,
    ]
    assert caplog.text.count("reports cannot be taken in together") == 1


def test_a_paid_debt_does_not_hang_on_the_action_that_waits_for_it(
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


def test_a_lock_on_one_server_delays_no_report_of_others_twice(cloud: Cloud) -> None:
    """Who waited once for its row does not wait again in the next seconds; its result comes
    again."""
    servers = cloud.create(3, host="h1", forced=True, networks=[])
    cloud.advance()
    host, other = cloud.hosts["h1"], cloud.hosts["h2"]
    host.work()
    with locked(cloud, servers[0], 3) as waits:
        said = [host.agent.request(True, None, None), other.agent.request(True, None, None)]
        answers = reports.handle(cloud.engine, said)
        assert [answer.session for answer in answers] == [host.agent.session, other.agent.session]  # type: ignore
        assert [cloud.show(server).vm_state for server in servers] == [
            states.BUILDING,
            states.ACTIVE,
            states.ACTIVE,
        ]
        before = len(waits)
        assert before == 1
        for _ in range(4):
            reports.handle(cloud.engine, said)
            cloud.time.pass_by(6)
        assert len(waits) == before
        host.agent.record_answer(said[0], answers[0])  # type: ignore[arg-type]  # it is an answer
    cloud.time.pass_by(11)
    for _ in range(3):
        cloud.round()
    assert cloud.show(servers[0]).vm_state == states.ACTIVE
    assert cloud.findings() == []


def damage(cloud: Cloud, table: str, column: str, row_id: str, document: str) -> None:
    """Write a document that is none into a row, as a disk or a hand may."""
    statement = sa.text(f"UPDATE {table} SET {column} = :document WHERE id = :id")
    cloud.store.write(lambda tx: tx.execute(statement, {"document": document, "id": row_id}))


JSON_COLUMNS = [column.name for column in schema.servers.c if isinstance(column.type, Json)]


@pytest.mark.parametrize("document", ["{broken", "7", '"text"', "[7]"])
@pytest.mark.parametrize("column", ["args", "data"])
def test_delete_ends_when_a_superseded_action_cannot_be_read(
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
def test_delete_ends_when_a_document_of_its_server_cannot_be_read(
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
def test_damaged_document_of_a_host_stops_no_placement(
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
def test_delete_of_resized_server_ends_when_a_document_around_it_is_damaged(
    cloud: Cloud, table: str, column: str
) -> None:
    [server] = cloud.create(networks=[], group=cloud.group("anti-affinity"), flavor=PINNED)
    cloud.settle()
    resized(cloud, server)
    assert cloud.show(server).vm_state == states.RESIZED
    statement = sa.text(f"UPDATE {table} SET {column} = '{{broken' WHERE {column} IS NOT NULL")
    cloud.store.write(lambda tx: tx.execute(statement))
    cloud.ask(server, "delete")
    for _ in range(20):
        cloud.round()
    assert cloud.show(server).vm_state == states.DELETED
