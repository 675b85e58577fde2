# SPDX-License-Identifier: Apache-2.0
"""The plan of a drain and of an evacuation: who goes, how, to where, or why not and what to do."""

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


def in_state(vm_state: str, **more: str) -> Resident:
    return replace(WEB, vm_state=vm_state, **more)


class Scheduler:
    """Answers the hosts that it was told to, by server."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.asked: list[tuple[list[RequestSpec], bool]] = []

    def __call__(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        self.asked.append((specs, fresh))
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
def test_how_a_server_leaves_a_host_that_runs(vm_state: str, cold: bool, way: Way) -> None:
    assert plan_drain(in_state(vm_state), cold) is way


@pytest.mark.parametrize(
    "vm_state", sorted(set(states.VM_STATES) - {states.DELETED, states.SHELVED_OFFLOADED})
)
def test_every_state_has_a_way_or_a_next_step(vm_state: str) -> None:
    for found in (
        plan_drain(in_state(vm_state), False),
        plan_drain(in_state(vm_state), True),
        plan_evacuation(in_state(vm_state)),
    ):
        if isinstance(found, Stays):
            assert "s1" in found.then and "{" not in found.then + found.why


def test_only_what_the_table_lets_is_asked_for() -> None:
    """The ways and the table of actions agree about the states."""
    for vm_state in states.VM_STATES:
        for found in (
            plan_drain(in_state(vm_state), False),
            plan_drain(in_state(vm_state), True),
            plan_evacuation(in_state(vm_state)),
        ):
            if not isinstance(found, Stays):
                assert vm_state in states.row(found.key).vm


def test_what_another_action_has_is_busy_unless_the_move_ends_that() -> None:
    assert not is_busy(WEB, LIVE)
    hanging = replace(WEB, busy="reboot", task_state=states.REBOOTING)
    assert is_busy(hanging, LIVE) and not is_busy(hanging, EVACUATION)
    assert is_busy(replace(WEB, busy="delete", task_state=states.DELETING), EVACUATION), (
        "delete always wins"
    )
    assert is_busy(replace(WEB, busy="attach_interface"), EVACUATION), (
        "it shows no task_state, and ends by itself"
    )


def test_all_are_asked_for_at_once_with_what_the_conductor_asks() -> None:
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
    [(specs, fresh)] = scheduler.asked
    assert fresh and [spec.excluded for spec in specs] == [["h1"], ["h1", "h4"]]
    assert (
        specs[0].availability_zone,
        specs[0].group,
        specs[0].image_properties,
        specs[0].resources,
    ) == ("az1", "g", {"os_type": "linux"}, {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1})


def test_a_live_migration_goes_where_one_can_go() -> None:
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


def test_who_finds_no_host_stays_with_the_schedulers_reason() -> None:
    lines = plan(
        [WEB, in_state(states.RESCUED, id="s2")],
        plan_evacuation,
        Scheduler({}),
        host="h1",
        owing={},
        live_capable=(),
    )
    assert [line.way for line in lines] == [None, None]
    said = table(lines).splitlines()
    assert said[0] == "s1 (web, active) stays: no valid host: 3 hosts: 3 full"
    assert "kilonova explain s1" in said[1]
    assert said[2].startswith("s2 (web, rescued) stays: it is rescued, and only what is active")


def test_old_guests_that_hosts_still_remove_are_a_reason_to_wait() -> None:
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


def test_a_flavor_that_no_host_makes_is_said_and_not_asked_for() -> None:
    odd = replace(WEB, flavor=replace(FLAVOR, extra_specs={"hw:cpu_policy": "nonsense"}))
    scheduler = Scheduler({})
    [line] = plan([odd], plan_evacuation, scheduler, host="h1", owing={}, live_capable=())
    assert line.stays is not None and "nonsense" in line.stays.why and scheduler.asked == []


def test_the_table_has_a_line_for_each() -> None:
    text = table(
        [
            Planned(WEB, LIVE, "h2"),
            Planned(in_state(states.ERROR, id="s2"), stays=Stays("why", "then")),
        ]
    )
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "server name state how to",
        "s1 web active live h2",
        "s2 (web, error) stays: why",
        "then",
    ]


@pytest.mark.parametrize("vm_state", [states.ACTIVE, states.STOPPED, states.ERROR])
def test_who_has_shares_stays_and_is_told_what_to_do(vm_state: str) -> None:
    server = replace(WEB, vm_state=vm_state, shares=1)
    for found, then in (
        (plan_drain(server, cold=False), "stopped"),
        (plan_evacuation(server), "--state error s1"),
    ):
        assert (
            isinstance(found, Stays)
            and "shares" in found.why
            and then in found.then
            and "s1/shares" in found.then
        )
