# SPDX-License-Identifier: Apache-2.0
"""Plans of a drain and of an evacuation: each server's way and destination, or why it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.domain import states
from common.domain.models import Flavor, ImageRef, RequestSpec, Selection
from common.store.views.host_contents import Resident
from conductor.hosts.host_plan import (
    COLD,
    EVACUATION,
    LIVE,
    Planned,
    Stays,
    Way,
    is_busy,
    plan,
    plan_drain,
    plan_evacuation,
)
from deploy.operator.hosts.actions import table

FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)
WEB = Resident(
    "s1",
    "web",
    "p",
    states.ACTIVE,
    FLAVOR,
    ImageRef("i", properties={"os_type": "linux"}),
    {"group": "g"},
    "az1",
)


def server_in_state(vm_state: str, **more: str) -> Resident:
    return replace(WEB, vm_state=vm_state, **more)


class Scheduler:
    """A stand-in for the scheduler that returns the hosts in ``answers`` for each server."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.requests: list[tuple[list[RequestSpec], bool]] = []

    def __call__(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        self.requests.append((specs, fresh))
        return [
            Selection(spec.server, self.answers.get(spec.server, []), "3 hosts: 3 full")
            for spec in specs
        ]


@pytest.mark.parametrize(
    ("vm_state", "cold", "way"),
    [
        (states.ACTIVE, False, LIVE),
        (states.PAUSED, False, LIVE),
        (states.STOPPED, False, COLD),
        (states.ACTIVE, True, COLD),
        (states.STOPPED, True, COLD),
    ],
)
def test_plan_drain_moves_server_live_or_cold_by_state_and_option(
    vm_state: str, cold: bool, way: Way
) -> None:
    assert plan_drain(server_in_state(vm_state), cold) is way


@pytest.mark.parametrize(
    "vm_state", sorted(set(states.VM_STATES) - {states.DELETED, states.SHELVED_OFFLOADED})
)
def test_drain_and_evacuation_plan_names_next_step_when_server_stays(vm_state: str) -> None:
    for result in (
        plan_drain(server_in_state(vm_state), False),
        plan_drain(server_in_state(vm_state), True),
        plan_evacuation(server_in_state(vm_state)),
    ):
        if isinstance(result, Stays):
            assert "s1" in result.then and "{" not in result.then + result.why


def test_drain_and_evacuation_plan_uses_only_actions_allowed_in_the_state() -> None:
    """The table of actions must allow the action in this state."""
    for vm_state in states.VM_STATES:
        for result in (
            plan_drain(server_in_state(vm_state), False),
            plan_drain(server_in_state(vm_state), True),
            plan_evacuation(server_in_state(vm_state)),
        ):
            if not isinstance(result, Stays):
                assert vm_state in states.row(result.key).vm


def test_server_with_action_is_busy_unless_evacuation_supersedes_it() -> None:
    assert not is_busy(WEB, LIVE)
    hanging = replace(WEB, busy="reboot", task_state=states.REBOOTING)
    assert is_busy(hanging, LIVE) and not is_busy(hanging, EVACUATION)
    assert is_busy(replace(WEB, busy="delete", task_state=states.DELETING), EVACUATION), (
        "delete always wins"
    )
    assert is_busy(replace(WEB, busy="attach_interface"), EVACUATION), (
        "attach_interface shows no task_state and ends by itself"
    )


def test_host_plan_asks_the_scheduler_once_with_complete_request_specs() -> None:
    db = replace(WEB, id="s2", vm_state=states.STOPPED)
    scheduler = Scheduler({"s1": ["h2", "h3"], "s2": ["h3"]})
    lines = plan(
        [WEB, db],
        lambda server: plan_drain(server, False),
        scheduler,
        host="h1",
        owing={"s2": ["h4"]},
        live_capable={"h2", "h3"},
    )
    assert [(line.server.id, line.way, line.to) for line in lines] == [
        ("s1", LIVE, "h2"),
        ("s2", COLD, "h3"),
    ]
    [(specs, fresh)] = scheduler.requests
    assert fresh and [spec.excluded for spec in specs] == [["h1"], ["h1", "h4"]]
    assert (
        specs[0].availability_zone,
        specs[0].group,
        specs[0].image_properties,
        specs[0].resources,
    ) == ("az1", "g", {"os_type": "linux"}, {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1})


def test_host_plan_migrates_live_only_to_live_capable_hosts() -> None:
    scheduler = Scheduler({"s1": ["h2", "h3"], "s2": ["h2"]})
    lines = plan(
        [WEB, replace(WEB, id="s2")],
        lambda server: plan_drain(server, False),
        scheduler,
        host="h1",
        owing={},
        live_capable={"h3"},
    )
    assert lines[0].to == "h3"
    assert (
        lines[1].way is None
        and lines[1].stays is not None
        and "drain with --cold" in lines[1].stays.then
    )


def test_host_plan_without_valid_host_shows_the_reason_of_the_scheduler() -> None:
    lines = plan(
        [WEB, server_in_state(states.RESCUED, id="s2")],
        plan_evacuation,
        Scheduler({}),
        host="h1",
        owing={},
        live_capable=(),
    )
    assert [line.way for line in lines] == [None, None]
    rows = table(lines).splitlines()
    assert rows[0] == "s1 (web, active) stays: no valid host: 3 hosts: 3 full"
    assert "kilonova explain s1" in rows[1]
    assert rows[2].startswith("s2 (web, rescued) stays: it is rescued, and only active, stopped")


def test_host_plan_without_other_host_waits_for_pending_cleanup_of_server() -> None:
    [line] = plan(
        [WEB], plan_evacuation, Scheduler({}), host="h1", owing={"s1": ["h2"]}, live_capable=()
    )
    assert line.soon
    [line] = plan(
        [WEB],
        plan_evacuation,
        Scheduler({"s1": ["h3"]}),
        host="h1",
        owing={"s1": ["h2"]},
        live_capable=(),
    )
    assert not line.soon and line.to == "h3"


def test_host_plan_with_invalid_flavor_does_not_ask_the_scheduler() -> None:
    odd = replace(WEB, flavor=replace(FLAVOR, extra_specs={"hw:cpu_policy": "nonsense"}))
    scheduler = Scheduler({})
    [line] = plan([odd], plan_evacuation, scheduler, host="h1", owing={}, live_capable=())
    assert line.stays is not None and "nonsense" in line.stays.why and scheduler.requests == []


def test_host_plan_table_has_a_line_for_each_server() -> None:
    text = table(
        [
            Planned(WEB, LIVE, "h2"),
            Planned(server_in_state(states.ERROR, id="s2"), stays=Stays("why", "then")),
        ]
    )
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "server name state how to",
        "s1 web active live h2",
        "s2 (web, error) stays: why",
        "then",
    ]


@pytest.mark.parametrize("vm_state", [states.ACTIVE, states.STOPPED, states.ERROR])
def test_host_plan_of_server_with_shares_names_the_next_step(vm_state: str) -> None:
    server = replace(WEB, vm_state=vm_state, shares=1)
    for result, then in (
        (plan_drain(server, cold=False), "stop it"),
        (plan_evacuation(server), "--state error s1"),
    ):
        assert (
            isinstance(result, Stays)
            and "shares" in result.why
            and then in result.then
            and "s1/shares" in result.then
        )
