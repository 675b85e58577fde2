# SPDX-License-Identifier: Apache-2.0
"""Tests of each workflow with ports: the network service is silent, slow, or cannot bind a port.

``test_networks`` has tests of single actions.
"""

from __future__ import annotations

import pytest

from common.domain import errors, states
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from deploy.operator import doctor
from tests.workflows.scenarios import SCENARIOS, ask, trial_of
from tests.workflows.simulator import Cloud, Crash

#: Workflows that call the network service.
CALLERS = (
    "create",
    "attach_interface",
    "detach_interface",
    "add_security_group",
    "remove_security_group",
    "offload",
    "unshelve",
    "delete",
)
#: Workflows that bind a port to another host, with the number of each call for this port.
MOVES = (
    *(("live_migrate", number) for number in range(1, 6)),
    *(
        (workflow, number)
        for workflow in ("resize", "revert_resize", "evacuate")
        for number in (1, 2)
    ),
)


@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_workflow_succeeds_after_network_service_ignores_calls(
    cloud: Cloud, workflow: str, count: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.silent = count
    trial.begin()
    cloud.settle()
    trial.check_expected_end()


@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_workflow_succeeds_when_answers_of_network_service_are_lost(
    cloud: Cloud, workflow: str, count: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.answers_lost = count
    trial.begin()
    cloud.settle()
    trial.check_expected_end()


@pytest.mark.parametrize(("workflow", "number"), MOVES)
def test_move_succeeds_when_one_answer_of_network_service_is_lost(
    cloud: Cloud, workflow: str, number: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.lost_at = cloud.networks.calls + number
    trial.begin()
    cloud.settle()
    assert cloud.networks.calls > cloud.networks.lost_at, "no answer was lost"
    trial.check_expected_end()
    assert cloud.store.read(doctor.wanderers) == (
        {trial.server} if workflow == "live_migrate" else set()
    )


@pytest.mark.parametrize("workflow", ["resize", "live_migrate", "evacuate"])
def test_move_leaves_server_on_its_host_when_no_other_can_bind_its_port(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    before, [port] = cloud.show(trial.server), cloud.networks.ports(trial.server)
    cloud.networks.cannot_bind = set(cloud.hosts) - {before.host}
    trial.begin()
    cloud.settle()
    after = cloud.show(trial.server)
    assert (after.vm_state, after.host) == (before.vm_state, before.host)
    held = cloud.networks.held[port["id"]]
    assert (held["binding:host_id"], held["bindings"]) == (before.host, [])


@pytest.mark.parametrize("workflow", ["resize", "migrate", "live_migrate", "evacuate", "unshelve"])
def test_move_leaves_server_in_place_when_other_hosts_require_hybrid_plug(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    before, [port] = cloud.show(trial.server), cloud.networks.ports(trial.server)
    cloud.networks.hybrid = set(cloud.hosts) - {before.host}
    trial.begin()
    cloud.settle()
    after = cloud.show(trial.server)
    assert (after.vm_state, after.host) == (before.vm_state, before.host)
    if before.host is not None:
        assert cloud.networks.held[port["id"]]["binding:host_id"] == before.host


@pytest.mark.parametrize("workflow", ["delete", "detach_interface", "offload"])
def test_delete_detach_and_offload_succeed_while_network_service_is_silent(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.silent = 100_000
    trial.begin()
    cloud.idle(60)
    server = cloud.show(trial.server)
    assert (server.vm_state, server.task_state) == (SCENARIOS[workflow].ends, None)
    cloud.networks.silent = 0
    if workflow != "delete":
        ask(cloud, trial.server, "delete")
    cloud.clean_up()
    assert (cloud.networks.held, cloud.findings()) == ({}, [])


@pytest.mark.parametrize("workflow", ["create", "attach_interface"])
def test_port_created_after_delete_of_server_is_deleted(cloud: Cloud, workflow: str) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.slow = True
    trial.begin()
    cloud.advance()
    assert cloud.networks.late_creates
    ask(cloud, trial.server, "delete")
    for _ in range(3):
        cloud.round()
    assert cloud.show(trial.server).vm_state == states.DELETED
    assert cloud.findings() == []
    cloud.networks.catch_up()
    cloud.settle()
    assert (cloud.networks.held, cloud.findings()) == ({}, [])


def test_hard_reboot_during_attach_interface_is_refused(cloud: Cloud) -> None:
    trial = trial_of(cloud, "attach_interface")
    trial.begin()
    with pytest.raises(errors.Busy):
        ask(cloud, trial.server, "reboot:HARD")
    cloud.settle()
    ask(cloud, trial.server, "reboot:HARD")
    cloud.settle()
    trial.check_expected_end()


def test_attach_interface_deletes_new_port_when_host_fails(cloud: Cloud) -> None:
    trial = trial_of(cloud, "attach_interface")
    for host in cloud.hosts.values():
        host.driver.host.script["attach_interface"] = [Fail("No room for another device.")]
    trial.begin()
    cloud.settle()
    trial.check_end(states.ACTIVE, 1)
    assert len(cloud.networks.held) == len(cloud.show(trial.server).interfaces) == 1


def test_unshelve_binds_interfaces_to_new_host(cloud: Cloud) -> None:
    trial = trial_of(cloud, "unshelve")
    before = cloud.show(trial.server).interfaces
    assert [port["binding:host_id"] for port in cloud.networks.held.values()] == [""]
    trial.begin()
    cloud.settle()
    after = cloud.show(trial.server)
    addresses = [interface["addresses"] for interface in after.interfaces]
    assert addresses == [interface["addresses"] for interface in before]
    assert [port["binding:host_id"] for port in cloud.networks.held.values()] == [after.host]


def test_unshelve_shows_floating_addresses_again(cloud: Cloud) -> None:
    trial = trial_of(cloud, "unshelve")
    (port,) = cloud.networks.held.values()
    cloud.networks.floating = {port["id"]: {port["fixed_ips"][0]["ip_address"]: ["172.24.4.9"]}}
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).interfaces[0]["addresses"][0]["floating"] == ["172.24.4.9"]


def test_remove_security_group_succeeds_when_conductor_dies_after_call(cloud: Cloud) -> None:
    """The service has removed the group, and the conductor has not recorded this yet."""
    trial = trial_of(cloud, "remove_security_group")
    crashes: list[str] = []

    def crash(workflow: str, step: str, where: str) -> None:
        if (step, where) == ("change", "called"):
            crashes.append(where)
            raise Crash(("conductor",))

    trial.begin()
    cloud.engine.fault_point = crash
    trial.run_through_crashes()
    assert crashes
    trial.check_expected_end()
    assert cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0].state == "done"
