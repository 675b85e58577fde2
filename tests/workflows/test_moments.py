# SPDX-License-Identifier: Apache-2.0
"""Tests of single events around actions in the simulated cloud.

For example, hosts fall silent or reboot, guests stop by themselves, a delete arrives in the middle
of a create, or a lease expires.
"""

from __future__ import annotations

import pytest

from common.domain import errors, states
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.context import RequestContext
from common.store.placement import host_states
from common.store.servers import actions, immediate_actions
from compute_agent.sync import LEASE_SECONDS, START_MARGIN_SECONDS
from compute_agent.virt.memory.state.script import Fail
from conductor.engine import runner
from conductor.engine.sweep import sweep
from tests.workflows.frozen import register
from tests.workflows.scenarios import trial_of
from tests.workflows.simulator import Cloud

ADMIN = RequestContext(user_id="admin", project_id="admins", roles=("admin",), request_id="req-a")


def test_delete_succeeds_on_silent_host_and_removes_guest_on_its_return(cloud: Cloud) -> None:
    trial = trial_of(cloud, "delete")
    host = cloud.hosts.pop(cloud.show(trial.server).host)
    cloud.idle(70)
    trial.begin()
    cloud.round()
    assert cloud.show(trial.server).deleted == 1
    cloud.hosts[host.name] = host
    cloud.settle()
    trial.check_end(states.DELETED, 0)


def test_create_waits_while_all_hosts_are_silent(cloud: Cloud) -> None:
    register(cloud)
    hosts, cloud.hosts = cloud.hosts, {}
    cloud.idle(100)
    server = cloud.create()[0]
    for _ in range(3):
        cloud.round()
    assert cloud.show(server).vm_state == states.BUILDING
    cloud.hosts = hosts
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE


def test_full_host_report_of_stopped_guest_sets_vm_state_stopped(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    cloud.hosts[cloud.show(trial.server).host].driver.host.power_off(trial.server)
    cloud.idle(65)
    trial.check_end(states.STOPPED, 1)


def test_host_registration_after_boot_reboots_guest_of_active_server(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    host = cloud.hosts[cloud.show(trial.server).host]
    host.driver.host.power_off(trial.server)
    host.restart()
    host.agent.boot_id = "another"
    cloud.settle()
    trial.check_end(states.ACTIVE, 1)
    assert cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0].name == "reboot"


@pytest.mark.parametrize("fails", [False, True])
def test_host_boot_reboots_rescued_guest_and_sets_error_if_reboot_fails(
    cloud: Cloud, fails: bool
) -> None:
    """Kilonova reboots the guest, although a user cannot request this in the state RESCUED."""
    trial = trial_of(cloud, "unrescue")
    host = cloud.hosts[cloud.show(trial.server).host]
    host.power_cut()
    host.driver.host.script["reboot"] = [Fail("No memory.")] if fails else []
    host.power_on()
    cloud.settle()
    assert cloud.show(trial.server).vm_state == (states.ERROR if fails else states.RESCUED)
    assert cloud.findings() == []
    assert host.agent.session


def test_host_boot_during_image_create_reboots_paused_server(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    cloud.ask(trial.server, "pause")
    cloud.settle()
    trial.begin()
    cloud.advance()
    host = cloud.hosts[cloud.show(trial.server).host]
    host.power_cut()
    for _ in range(3):
        cloud.round()
    host.power_on()
    cloud.idle(130)
    row = cloud.show(trial.server)
    assert (row.vm_state, row.power_state) == (states.ACTIVE, states.RUNNING)
    assert cloud.findings() == []


@pytest.mark.parametrize("key", ["snapshot", "pause", "attach_interface"])
def test_host_boot_during_action_leaves_guest_running_after_action(cloud: Cloud, key: str) -> None:
    """The host boots during the action."""
    trial = trial_of(cloud, key)
    host = cloud.hosts[cloud.show(trial.server).host]
    trial.begin()
    cloud.advance()
    host.power_cut()
    for _ in range(3):
        cloud.round()
    host.power_on()
    cloud.idle(130)
    assert host.driver.host.guests[trial.server].power_state == states.RUNNING
    row = cloud.show(trial.server)
    assert (row.vm_state, row.power_state, row.action) == (states.ACTIVE, states.RUNNING, None)
    assert cloud.findings() == []


def test_stop_of_stopping_or_stopped_server_is_refused_with_its_state(cloud: Cloud) -> None:
    trial = trial_of(cloud, "stop")
    trial.begin()
    with pytest.raises(
        errors.WrongState, match=f"Cannot 'stop' instance {trial.server} while it is in task_state"
    ):
        trial.begin()
    cloud.settle()
    with pytest.raises(errors.WrongState, match="while it is in vm_state stopped"):
        trial.begin()


def test_twenty_creates_make_one_scheduler_call_and_one_message_per_host(cloud: Cloud) -> None:
    register(cloud)
    sizes: list[int] = []
    select = cloud.select
    messages: list[str] = []
    deliver = cloud.do
    cloud.select = lambda specs, fresh: sizes.append(len(specs)) or select(specs, fresh)  # type: ignore
    cloud.do = lambda host, commands: messages.append(host) or deliver(host, commands)  # type: ignore
    servers = cloud.create(20)
    cloud.settle()
    assert sizes == [20]
    assert sorted(messages) == ["h1", "h2"]
    assert {cloud.show(server).vm_state for server in servers} == {states.ACTIVE}
    assert cloud.findings() == []


@pytest.mark.parametrize("where", ["taken", "proposed", "committed"])
def test_delete_during_create_waits_while_conductor_holds_lease_of_create(
    cloud: Cloud, where: str
) -> None:
    trial = trial_of(cloud, "create")
    trial.begin()

    def delete(workflow: str, step: str, at: str) -> None:
        if at == where:
            cloud.engine.fault_point = lambda workflow, step, where: None
            cloud.ask(trial.server, "delete")
            runner.advance(cloud.conductor("c2/1"))
            assert where == "committed" or cloud.show(trial.server).deleted == 0

    cloud.engine.fault_point = delete
    cloud.settle()
    trial.check_end(states.DELETED, 0)


def test_full_host_report_of_stopped_guest_is_accepted_after_failed_stop(cloud: Cloud) -> None:
    """The failed stop raised the fence of the server, and the domain still has the old fence."""
    trial = trial_of(cloud, "stop")
    host = cloud.hosts[cloud.show(trial.server).host]
    host.driver.host.script["ensure_stopped"] = [Fail("no")]
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).vm_state == states.ACTIVE
    host.driver.host.power_off(trial.server)
    cloud.idle(65)
    trial.check_end(states.STOPPED, 1)


def test_start_ends_in_stopped_when_guest_stops_before_its_result_arrives(
    cloud: Cloud,
) -> None:
    trial = trial_of(cloud, "start")
    trial.begin()
    cloud.advance()
    host = cloud.hosts[cloud.show(trial.server).host]
    host.work()
    host.driver.host.power_off(trial.server)
    host.agent.record_changes(host.driver.domains())
    for _ in range(2):
        assert host.agent.has_news()
        cloud.sync(host, ask=False)
    trial.check_end(states.STOPPED, 1)


def test_create_waits_while_scheduler_is_silent(cloud: Cloud) -> None:
    trial = trial_of(cloud, "create")
    cloud.lose = lambda kind: kind == "select"
    trial.begin()
    cloud.idle(100)
    assert cloud.show(trial.server).vm_state == states.BUILDING
    cloud.lose = lambda kind: False
    for _ in range(6):
        cloud.round()
    trial.check_end(states.ACTIVE, 1)


def test_host_report_of_stopped_guest_is_accepted_after_reset_state(cloud: Cloud) -> None:
    """The reset raises the fence. The host receives the new fence and reports again."""
    trial = trial_of(cloud, "stop")
    cloud.lose = lambda kind: kind == "do"
    trial.begin()
    cloud.advance()
    cloud.store.write(
        lambda tx: immediate_actions.do(
            tx, states.row("os-resetState"), trial.server, context=ADMIN, args={"state": "active"}
        )
    )
    cloud.lose = lambda kind: False
    cloud.hosts[cloud.show(trial.server).host].driver.host.power_off(trial.server)
    cloud.idle(65)
    trial.check_end(states.STOPPED, 1)


@pytest.mark.parametrize(
    ("power_state", "after"),
    [(states.POWER_PAUSED, states.PAUSED), (states.CRASHED, states.STOPPED)],
)
def test_full_host_report_sets_paused_for_paused_guest_stopped_for_crashed(
    cloud: Cloud, power_state: int, after: str
) -> None:
    trial = trial_of(cloud, "stop")
    cloud.hosts[cloud.show(trial.server).host].driver.host.guests[
        trial.server
    ].power_state = power_state
    cloud.idle(65)
    server = cloud.show(trial.server)
    assert (server.vm_state, server.power_state) == (after, power_state)
    assert cloud.findings() == []


def test_snapshot_progress_report_sets_task_state_and_progress(cloud: Cloud) -> None:
    trial = trial_of(cloud, "snapshot")
    trial.begin()
    cloud.advance()
    host = cloud.hosts[cloud.show(trial.server).host]
    work = host.agent.take()
    assert work is not None
    before = cloud.show(trial.server).updated_at
    work.progress = CommandProgress(CommandPhase.UPLOADING, 70)
    cloud.sync(host)
    server = cloud.show(trial.server)
    assert (server.task_state, server.progress, server.updated_at) == (
        states.IMAGE_UPLOADING,
        70,
        before,
    )


def test_rebuild_keeps_stopped_server_stopped(cloud: Cloud) -> None:
    trial = trial_of(cloud, "rebuild")
    cloud.ask(trial.server, "os-stop")
    cloud.settle()
    trial.begin()
    cloud.settle()
    trial.check_end(states.STOPPED, 1)
    assert cloud.show(trial.server).power_state == states.SHUTDOWN


def run_without_host(cloud: Cloud, name: str, seconds: int) -> None:
    """Run rounds for these seconds while the host cannot reach conductors. Work there waits."""
    cloud.cut.add(name)
    for _ in range(seconds // 5):
        cloud.advance()
        for host in cloud.hosts.values():
            if host.name != name:
                host.work()
                cloud.sync(host)
        sweep(cloud.engine, cloud.watch, [host for host in cloud.hosts if host != name], True)
        cloud.time.pass_by(5)


def read_running_hosts(cloud: Cloud, server: str) -> list[str]:
    return [
        host.name
        for host in cloud.hosts.values()
        if server in host.driver.host.guests
        and host.driver.host.guests[server].power_state == states.RUNNING
    ]


@pytest.mark.parametrize("reconnects", [False, True])
def test_create_on_host_isolated_past_its_lease_starts_no_second_guest(
    cloud: Cloud, reconnects: bool
) -> None:
    """While the host downloads for five minutes, the server is built on another host."""
    register(cloud)
    [server] = cloud.create(networks=[])
    cloud.advance()
    [host] = [host for host in cloud.hosts.values() if host.agent._work]
    work = host.agent.take()
    assert work is not None and work.command.verb == "ensure_guest"
    run_without_host(cloud, host.name, 300)
    cloud.force_down(host.name)
    run_without_host(cloud, host.name, 100)
    [new_host] = read_running_hosts(cloud, server)
    assert new_host != host.name and cloud.show(server).host == new_host
    if reconnects:
        cloud.cut.discard(host.name)
        cloud.sync(host)
        assert host.agent.has_lease() and not host.agent.may_start(work)
    host.carry_out(work)
    assert read_running_hosts(cloud, server) == [new_host]
    cloud.cut.discard(host.name)
    cloud.force_down(host.name, False)
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.domains(server), cloud.findings()) == (
        states.ACTIVE,
        [new_host],
        [],
    )


def test_start_is_refused_by_host_when_lease_of_host_expires_meanwhile(cloud: Cloud) -> None:
    register(cloud)
    [server] = cloud.create(networks=[])
    cloud.settle()
    cloud.ask(server, "os-stop")
    cloud.settle()
    host = cloud.hosts[cloud.show(server).host]
    cloud.ask(server, "os-start")
    cloud.advance()
    work = host.agent.take()
    assert work is not None and work.command.verb == "ensure_running"
    cloud.time.pass_by(LEASE_SECONDS - START_MARGIN_SECONDS)
    host.carry_out(work)
    assert read_running_hosts(cloud, server) == []
    cloud.settle()
    assert read_running_hosts(cloud, server) == [host.name], "once a conductor is heard it is"


@pytest.mark.parametrize(("workflow", "number"), [("rescue", 1), ("snapshot", 1), ("stop", 0)])
def test_host_states_count_running_rescue_and_snapshot_but_not_stop(
    cloud: Cloud, workflow: str, number: int
) -> None:
    trial = trial_of(cloud, workflow)
    trial.begin()
    cloud.advance()
    host = cloud.show(trial.server).host
    assert cloud.store.read(host_states.working) == ({host: number} if number else {})
    cloud.settle()
    assert cloud.store.read(host_states.working) == {}
