# SPDX-License-Identifier: Apache-2.0
"""Tests of conductors with outdated data, after another transaction changed the same records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import Sync, SyncAnswer
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.hosts import services
from common.store.servers import actions, guests
from conductor.engine import reports, runner
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud(cloud: Cloud) -> Cloud:
    """Return a cloud with registered hosts and without servers."""
    register(cloud)
    return cloud


def read_only_action(cloud: Cloud, server: str) -> Any:
    [row] = cloud.store.read(lambda tx: actions.list_for(tx, server))
    return row


def test_show_progress_of_ended_action_does_not_change_server(cloud: Cloud) -> None:
    """Otherwise an idle server would have a task_state, and a stop would be refused."""
    [server] = cloud.create()
    cloud.advance()
    action = read_only_action(cloud, server)
    assert action.state == "waiting"
    cloud.store.write(lambda tx: actions.show_progress(tx, action, states.BLOCK_DEVICE_MAPPING, 5))
    assert (cloud.show(server).task_state, cloud.show(server).progress) == (
        states.BLOCK_DEVICE_MAPPING,
        5,
    )
    cloud.settle()
    before = cloud.show(server)
    cloud.store.write(lambda tx: actions.show_progress(tx, action, states.SPAWNING, 50))
    assert cloud.show(server) == before and before.task_state is None
    cloud.ask(server, "os-stop")
    cloud.settle()
    assert cloud.findings() == []


def test_host_boot_reboots_all_guests_except_of_server_with_new_action(cloud: Cloud) -> None:
    """During the registration a user stops the second server, and this guest stays off."""
    servers = sorted(cloud.create(3, host="h1", forced=True))
    cloud.settle()
    stopped_servers: list[str] = []

    def begin_stop(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO actions") and not stopped_servers:
            stopped_servers.append(servers[1])
            connection.connection.dbapi_connection.execute(
                "UPDATE servers SET task_state = 'powering-off', action = 'a-stop' WHERE id = ?",
                (servers[1],),
            )

    host = cloud.hosts["h1"]
    host.power_cut()
    host.power_on()
    sa.event.listen(cloud.store.engine, "after_cursor_execute", begin_stop)
    cloud.sync(host)
    assert stopped_servers and not host.agent.needs_registration()
    assert [cloud.show(server).task_state for server in servers] == [
        states.REBOOTING_HARD,
        "powering-off",
        states.REBOOTING_HARD,
    ]


def test_create_claims_no_second_host_when_conductor_sleeps_past_lease(cloud: Cloud) -> None:
    """A conductor sleeps past its lease after a proposal, and another conductor places the server.

    Then another lane of the first conductor takes a lease of the action.
    """
    [server] = cloud.create(networks=[{"network": "n1"}])
    other = cloud.conductor("c2/1")
    leased_rows: list[Any] = []
    chosen: list[str] = []
    select = cloud.select

    def choose(specs: Any, fresh: bool) -> Any:
        selections = select(specs, fresh)
        chosen.append(selections[0].hosts[0])
        return selections

    def sleep(workflow: str, step: str, where: str) -> None:
        if (step, where) != ("place", "proposed") or leased_rows:
            return
        cloud.time.pass_by(16)
        [row] = cloud.store.read(lambda tx: services.list_all(tx, chosen[0], Binary.COMPUTE))
        cloud.store.write(lambda tx: services.set_state(tx, row.uuid, disabled=True))
        runner.advance(other)
        leased_rows.extend(
            cloud.store.write(
                lambda tx: actions.take(
                    tx,
                    cloud.engine.owner,
                    WORKFLOWS.versions,
                    64,
                    only=WORKFLOWS.lanes["network"],
                    lease=actions.LONG_LEASE,
                )
            )
        )

    cloud.select = choose  # type: ignore[method-assign]
    cloud.engine.fault_point = sleep
    runner.advance(cloud.engine)
    assert [row.server_id for row in leased_rows] == [server]
    guest_rows = cloud.store.read(lambda tx: guests.places(tx, server))
    assert [row.host for row in guest_rows] == [cloud.show(server).host] != chosen[:1]
    assert read_only_action(cloud, server).owner == cloud.engine.owner, (
        "the lease belongs to the other lane"
    )
    cloud.time.pass_by(61)
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.findings()) == (states.ACTIVE, [])


def test_create_repeats_port_check_at_once_after_event_during_check(cloud: Cloud) -> None:
    cloud.networks.wires_after = 1000
    [server] = cloud.create()
    for _ in range(8):
        cloud.round()
    assert read_only_action(cloud, server).step == "plug"

    def send_event(workflow: str, step: str, where: str) -> None:
        if (step, where) == ("plug", "called"):
            cloud.engine.fault_point = lambda *_: None
            cloud.store.write(lambda tx: actions.wake(tx, [server], "plug"))
            for port in cloud.networks.held.values():
                port["looks"] = 1000

    cloud.time.pass_by(5)
    cloud.engine.fault_point = send_event
    before = cloud.time.micros
    cloud.advance()
    assert cloud.time.micros - before < 1_000_000
    cloud.round()
    assert cloud.show(server).vm_state == states.ACTIVE


def test_evacuate_calls_slow_fencing_hook_once(cloud: Cloud) -> None:
    """If the lease were shorter than the hook, two conductors would repeat the hook in turn."""
    [server] = cloud.create(host="h1", forced=True)
    cloud.settle()
    cloud.hosts["h1"].power_cut()
    cloud.until_down("h1")
    other, calls = cloud.conductor("c2/1"), []

    def fence(host: str) -> None:
        calls.append(host)
        cloud.time.pass_by(100)
        runner.advance(other, Lane.FENCING)

    for engine in (cloud.engine, other):
        engine.fence_host, engine.lease_micros = fence, {Lane.FENCING: 180_000_000}
    cloud.move(server, "evacuate", host=None, forced=False, stopped=False, shared=None)
    cloud.settle()
    assert (calls, cloud.show(server).host, cloud.show(server).vm_state) == (
        ["h1"],
        "h2",
        states.ACTIVE,
    )


def make_report(cloud: Cloud, name: str, extra_memory_mb: int = 0) -> Sync:
    """Return a full report of the host that is not delivered yet."""
    host = cloud.hosts[name]
    inventory = host.driver.inventory()
    host.agent.record_host(
        replace(inventory, memory_mb=inventory.memory_mb + extra_memory_mb),
        {"cpu.percent": float(extra_memory_mb)},
    )
    return host.agent.request(True, host.driver.domains(), None)


def test_host_report_older_than_last_report_is_ignored(cloud: Cloud) -> None:
    """One conductor delays the report, and another conductor handles the next report first."""
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    late = make_report(cloud, "h1")
    cloud.hosts["h1"].driver.host.power_off(server)
    cloud.time.pass_by(1)
    newer = make_report(cloud, "h1", extra_memory_mb=512)
    for request in (newer, late):
        [answer] = reports.handle(cloud.engine, [request])
        assert isinstance(answer, SyncAnswer) and answer.session == newer.session
    row = cloud.show(server)
    assert (row.vm_state, row.power_state) == (states.STOPPED, states.SHUTDOWN)
    [host] = cloud.store.read(
        lambda tx: tx.execute(sa.select(schema.hosts).where(schema.hosts.c.name == "h1")).all()
    )
    assert (host.newest_exchange, host.metrics) == (newer.number, {"cpu.percent": 512.0})


def test_results_in_older_host_report_are_recorded(cloud: Cloud) -> None:
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.advance()
    host = cloud.hosts["h1"]
    host.work()
    late = host.agent.request(True, [], None)
    assert late.results
    newer = replace(late, number=late.number + 1, results=[], domains=[])
    for request in (newer, late):
        reports.handle(cloud.engine, [request])
    assert cloud.show(server).vm_state == states.ACTIVE


def test_host_report_of_new_session_is_accepted_despite_lower_number(cloud: Cloud) -> None:
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.hosts["h1"].restart()
    cloud.round()
    cloud.hosts["h1"].driver.host.power_off(server)
    cloud.idle(65)
    assert cloud.show(server).vm_state == states.STOPPED


def test_host_report_without_number_is_accepted(cloud: Cloud) -> None:
    [server] = cloud.create(host="h1", forced=True, networks=[])
    cloud.settle()
    cloud.hosts["h1"].driver.host.power_off(server)
    reports.handle(cloud.engine, [replace(make_report(cloud, "h1"), number=0)])
    assert cloud.show(server).vm_state == states.STOPPED
