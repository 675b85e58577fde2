# SPDX-License-Identifier: Apache-2.0
"""Workflows that need ports, from where they begin: a network service that is silent, loses its
answers, is slow or cannot bind. Stories of ports are in ``test_networks``."""

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
#: Those of them that bind ports to another host, and how many calls of one with one port there are.
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
def test_a_silent_network_service_makes_it_late(cloud: Cloud, workflow: str, count: int) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.silent = count
    trial.begin()
    cloud.settle()
    trial.has_ended()


@pytest.mark.parametrize("workflow", CALLERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_was_done_although_its_answer_was_lost_is_found(
    cloud: Cloud, workflow: str, count: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.answers_lost = count
    trial.begin()
    cloud.settle()
    trial.has_ended()


@pytest.mark.parametrize(("workflow", "number"), MOVES)
def test_a_move_finds_what_was_done_although_its_answer_was_lost(
    cloud: Cloud, workflow: str, number: int
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.lost_at = cloud.networks.calls + number
    trial.begin()
    cloud.settle()
    assert cloud.networks.calls > cloud.networks.lost_at, "no answer was lost"
    trial.has_ended()
    assert cloud.store.read(doctor.wanderers) == (
        {trial.server} if workflow == "live_migrate" else set()
    )


@pytest.mark.parametrize("workflow", ["resize", "live_migrate", "evacuate"])
def test_a_move_goes_to_a_host_that_can_bind_or_nowhere(cloud: Cloud, workflow: str) -> None:
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
def test_move_goes_to_no_host_with_hybrid_plug(cloud: Cloud, workflow: str) -> None:
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
def test_a_dead_network_service_holds_nobody_up_for_ever(cloud: Cloud, workflow: str) -> None:
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
def test_a_port_that_is_made_when_its_server_is_gone_is_removed_too(
    cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.networks.slow = True
    trial.begin()
    cloud.advance()
    assert cloud.networks.put_off
    ask(cloud, trial.server, "delete")
    for _ in range(3):
        cloud.round()
    assert cloud.show(trial.server).vm_state == states.DELETED
    assert cloud.findings() == []
    cloud.networks.catch_up()
    cloud.settle()
    assert (cloud.networks.held, cloud.findings()) == ({}, [])


def test_an_attach_is_not_ended_by_a_hard_reboot(cloud: Cloud) -> None:
    trial = trial_of(cloud, "attach_interface")
    trial.begin()
    with pytest.raises(errors.Busy):
        ask(cloud, trial.server, "reboot:HARD")
    cloud.settle()
    ask(cloud, trial.server, "reboot:HARD")
    cloud.settle()
    trial.has_ended()


def test_an_attach_that_the_host_refuses_leaves_no_port(cloud: Cloud) -> None:
    trial = trial_of(cloud, "attach_interface")
    for host in cloud.hosts.values():
        host.driver.host.script["attach_interface"] = [Fail("No room for another device.")]
    trial.begin()
    cloud.settle()
    trial.is_right(states.ACTIVE, 1)
    assert len(cloud.networks.held) == len(cloud.show(trial.server).interfaces) == 1


def test_interfaces_follow_a_shelved_server_to_its_next_host(cloud: Cloud) -> None:
    trial = trial_of(cloud, "unshelve")
    before = cloud.show(trial.server).interfaces
    assert [port["binding:host_id"] for port in cloud.networks.held.values()] == [""]
    trial.begin()
    cloud.settle()
    after = cloud.show(trial.server)
    assert [one["addresses"] for one in after.interfaces] == [one["addresses"] for one in before]
    assert [port["binding:host_id"] for port in cloud.networks.held.values()] == [after.host]


def test_floating_addresses_are_shown_again_after_an_unshelve(cloud: Cloud) -> None:
    trial = trial_of(cloud, "unshelve")
    (port,) = cloud.networks.held.values()
    cloud.networks.floating = {port["id"]: {port["fixed_ips"][0]["ip_address"]: ["172.24.4.9"]}}
    trial.begin()
    cloud.settle()
    assert cloud.show(trial.server).interfaces[0]["addresses"][0]["floating"] == ["172.24.4.9"]


def test_a_group_that_was_removed_before_a_crash_counts_as_removed(cloud: Cloud) -> None:
    """The service has done it, and the conductor was killed before it could write that down."""
    trial = trial_of(cloud, "remove_security_group")
    crashed: list[str] = []

    def crash(workflow: str, step: str, where: str) -> None:
        if (step, where) == ("change", "called"):
            crashed.append(where)
            raise Crash(("conductor",))

    trial.begin()
    cloud.engine.fault_point = crash
    trial.run_through_crashes()
    assert crashed
    trial.has_ended()
    assert cloud.store.read(lambda tx: actions.list_for(tx, trial.server))[0].state == "done"
