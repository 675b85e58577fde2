# SPDX-License-Identifier: Apache-2.0
"""Handling of reports, also of several reports at once, in a simulated cloud."""

from __future__ import annotations

import dataclasses

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.clock import SECOND
from common.domain.command_key import CommandKey
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Result, Sync
from common.store import schema
from common.store.hosts import hosts
from common.store.placement import host_states
from conductor.engine import reports, runner
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time


@pytest.fixture
def cloud() -> Cloud:
    time = Time()
    cloud = Cloud(memory_store(time), time)
    for host in cloud.hosts.values():
        cloud.sync(host)
    return cloud


def build_server(cloud: Cloud) -> tuple[str, Sync, Result]:
    """Return a server, the sync that reports its build, and the result in this sync."""
    server = cloud.create(networks=[])[0]
    runner.advance(cloud.engine)
    host = cloud.hosts[cloud.show(server).host]
    host.work()
    report = host.agent.request(False, None, None)
    return server, report, report.results[0]


def test_report_received_twice_is_acknowledged_and_applied_once(cloud: Cloud) -> None:
    server, report, result = build_server(cloud)
    answers = reports.handle(cloud.engine, [report, report])
    assert [answer.acknowledged for answer in answers if not isinstance(answer, Exception)] == [
        [result.key]
    ] * 2
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.findings() == []


@pytest.mark.parametrize("late_first", [True, False])
def test_late_result_of_another_attempt_does_not_hide_the_awaited_result(
    cloud: Cloud, late_first: bool
) -> None:
    server, report, result = build_server(cloud)
    old_key = dataclasses.replace(CommandKey.parse(result.key), attempt=0)
    late = dataclasses.replace(result, key=str(old_key), status="failed", error="It broke.")
    other = next(host for host in cloud.hosts.values() if host.name != report.host)
    old = Sync(other.name, other.agent.session, results=[late])
    reports.handle(cloud.engine, [old, report] if late_first else [report, old])
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.findings() == []


def test_report_of_other_session_is_refused_with_session_0(cloud: Cloud) -> None:
    server, report, _ = build_server(cloud)
    answer = reports.handle(
        cloud.engine, [dataclasses.replace(report, session=report.session + 1)]
    )[0]
    assert not isinstance(answer, Exception)
    assert (answer.session, answer.acknowledged) == (0, [])
    assert cloud.show(server).task_state == states.SPAWNING


def test_runner_advance_wakes_only_threads_with_due_actions(cloud: Cloud) -> None:
    woken: list[str] = []
    cloud.engine.wake = woken.append
    cloud.create(networks=[])
    runner.advance(cloud.engine)
    assert woken == []
    cloud.engine.messaging.select = lambda specs, fresh: []  # type: ignore[method-assign]  # The scheduler selects no host.
    cloud.create(networks=[])
    runner.advance(cloud.engine)
    assert woken == ["inside"]
    woken.clear()
    cloud.create()
    del cloud.engine.messaging.select
    runner.advance(cloud.engine)
    assert woken == ["network"]


def test_inventory_report_is_stored_only_from_the_current_session(cloud: Cloud) -> None:
    host = cloud.hosts["h1"]
    more = dataclasses.replace(host.driver.inventory(), vcpus=40, traits=["CUSTOM_NEW"])
    old = Sync("h1", host.agent.session + 1, inventory=dataclasses.replace(more, vcpus=80))
    reports.handle(cloud.engine, [Sync("h1", host.agent.session, inventory=more), old])
    host_row = cloud.store.read(lambda tx: hosts.list_all(tx, "h1"))[0]
    assert host_row["inventory"]["VCPU"]["total"] == 40, (
        "the inventory of an ended session is ignored"
    )
    assert cloud.store.read(lambda tx: hosts.sessions(tx, ["h1"])) == {"h1": host.agent.session}


def test_metrics_report_is_stored_and_read_by_schedulers(cloud: Cloud) -> None:
    session, query = (
        cloud.hosts["h1"].agent.session,
        sa.select(schema.providers.c.changed_at).where(schema.providers.c.host == "h1"),
    )
    before = cloud.store.read(lambda tx: tx.scalar(query))
    cloud.time.pass_by(60)
    reports.handle(cloud.engine, [Sync("h1", session, metrics={"cpu.percent": 0.25})])
    row = cloud.store.read(
        lambda tx: tx.execute(sa.select(schema.hosts).where(schema.hosts.c.name == "h1")).one()
    )
    assert row.metrics == {"cpu.percent": 0.25}
    assert row.metrics_at - before >= 60 * SECOND
    assert cloud.store.read(lambda tx: tx.scalar(query)) == before, (
        "schedulers find metrics by metrics_at"
    )
    assert cloud.store.read(lambda tx: host_states.metrics(tx, row.metrics_at)) == [
        ("h1", {"cpu.percent": 0.25})
    ]


def test_stalled_command_is_the_cause_of_its_action_until_it_continues(cloud: Cloud) -> None:
    server, report, result = build_server(cloud)
    causes = []
    running = CommandProgress(CommandPhase.STARTING)
    stalled = dataclasses.replace(running, stalled_verb="ensure_guest")
    for phase in (stalled, running, stalled):
        reports.handle(
            cloud.engine,
            [
                dataclasses.replace(
                    report, results=[], working=[result.key], phases={result.key: phase}
                )
            ],
        )
        causes.append(
            cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions.c.cause)).scalar_one())
        )
    assert causes == [
        f"Host {report.host} hangs in ensure_guest (starting)",
        None,
        f"Host {report.host} hangs in ensure_guest (starting)",
    ]
    reports.handle(cloud.engine, [report])
    assert cloud.show(server).vm_state == states.ACTIVE
    assert (
        cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions.c.cause)).scalar_one())
        is None
    )
