# SPDX-License-Identifier: Apache-2.0
"""Reports that piled up and are taken in together: each counts for what it is."""

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


def being_built(cloud: Cloud) -> tuple[str, Sync, Result]:
    """A server, the sync with which its host will report that it is built, and that result."""
    server = cloud.create(networks=[])[0]
    runner.advance(cloud.engine)
    host = cloud.hosts[cloud.show(server).host]
    host.work()
    said = host.agent.request(False, None, None)
    return server, said, said.results[0]


def test_a_report_that_came_twice_counts_once(cloud: Cloud) -> None:
    server, said, result = being_built(cloud)
    answers = reports.handle(cloud.engine, [said, said])
    assert [answer.acknowledged for answer in answers if not isinstance(answer, Exception)] == [
        [result.key]
    ] * 2
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.findings() == []


@pytest.mark.parametrize("late_first", [True, False])
def test_a_late_result_of_another_attempt_does_not_hide_the_one_waited_for(
    cloud: Cloud, late_first: bool
) -> None:
    server, said, result = being_built(cloud)
    old_key = dataclasses.replace(CommandKey.parse(result.key), attempt=0)
    late = dataclasses.replace(result, key=str(old_key), status="failed", error="It broke.")
    other = next(host for host in cloud.hosts.values() if host.name != said.host)
    old = Sync(other.name, other.agent.session, results=[late])
    reports.handle(cloud.engine, [old, said] if late_first else [said, old])
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.findings() == []


def test_reports_of_a_session_that_is_over_are_not_believed(cloud: Cloud) -> None:
    server, said, _ = being_built(cloud)
    answer = reports.handle(cloud.engine, [dataclasses.replace(said, session=said.session + 1)])[0]
    assert not isinstance(answer, Exception)
    assert (answer.session, answer.acknowledged) == (0, [])
    assert cloud.show(server).task_state == states.SPAWNING


def test_what_is_left_due_rings_at_once_and_what_waits_does_not(cloud: Cloud) -> None:
    woken: list[str] = []
    cloud.engine.wake = woken.append
    cloud.create(networks=[])
    runner.advance(cloud.engine)
    assert woken == []
    cloud.engine.messaging.select = lambda specs, fresh: []  # type: ignore[method-assign]  # a scheduler that knows no answer
    cloud.create(networks=[])
    runner.advance(cloud.engine)
    assert woken == ["inside"]
    woken.clear()
    cloud.create()
    del cloud.engine.messaging.select
    runner.advance(cloud.engine)
    assert woken == ["network"]


def test_a_host_that_has_more_now_says_so_in_its_session(cloud: Cloud) -> None:
    host = cloud.hosts["h1"]
    more = dataclasses.replace(host.driver.inventory(), vcpus=40, traits=["CUSTOM_NEW"])
    old = Sync("h1", host.agent.session + 1, inventory=dataclasses.replace(more, vcpus=80))
    reports.handle(cloud.engine, [Sync("h1", host.agent.session, inventory=more), old])
    found = cloud.store.read(lambda tx: hosts.list_all(tx, "h1"))[0]
    assert found["inventory"]["VCPU"]["total"] == 40, "and a session that is over is not believed"
    assert cloud.store.read(lambda tx: hosts.sessions(tx, ["h1"])) == {"h1": host.agent.session}


def test_what_a_host_measures_is_kept_and_schedulers_see_it(cloud: Cloud) -> None:
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
        "schedulers find it by its own time"
    )
    assert cloud.store.read(lambda tx: host_states.metrics(tx, row.metrics_at)) == [
        ("h1", {"cpu.percent": 0.25})
    ]


def test_a_command_that_hangs_says_so_in_its_action_until_it_goes_on(cloud: Cloud) -> None:
    server, said, result = being_built(cloud)
    causes = []
    goes_on = CommandProgress(CommandPhase.STARTING)
    hangs = dataclasses.replace(goes_on, stalled_verb="ensure_guest")
    for phase in (hangs, goes_on, hangs):
        reports.handle(
            cloud.engine,
            [
                dataclasses.replace(
                    said, results=[], working=[result.key], phases={result.key: phase}
                )
            ],
        )
        causes.append(
            cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions.c.cause)).scalar_one())
        )
    assert causes == [
        f"Host {said.host} hangs in ensure_guest (starting)",
        None,
        f"Host {said.host} hangs in ensure_guest (starting)",
    ]
    reports.handle(cloud.engine, [said])
    assert cloud.show(server).vm_state == states.ACTIVE
    assert (
        cloud.store.read(lambda tx: tx.execute(sa.select(schema.actions.c.cause)).scalar_one())
        is None
    )
