# SPDX-License-Identifier: Apache-2.0
"""Tests of a delete and of a reset of the server's state during each step of a move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import states
from tests.workflows.moves import (
    CANARY,
    after,
    before,
    boot_server,
    check_rests,
    create_cloud,
    has_shared_storage,
    lead_up,
    read_disk,
    reset_state,
    resize_to_bigger,
)
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


MOVE_STEPS = [
    (key, verb)
    for key, verbs in (
        ("resize", ("offer", "prepare", "ensure_stopped", "receive", "install")),
        ("revertResize", ("ensure_stopped", "install")),
        ("os-migrateLive", ("offer", "prepare_arrival", "live_migrate", "arrived")),
        ("evacuate", ("ensure_guest",)),
    )
    for verb in verbs
]


def combine_with_steps(*choices: object) -> list[Any]:
    """Combine each choice with each step of a move.

    For each step, only one choice is in the default set. The choices take turns.
    """
    return [
        pytest.param(
            choice,
            *step,
            id="-".join((getattr(choice, "__name__", choice or "local"), *step)),
            marks=() if number % len(choices) == place else pytest.mark.slice("moves"),
        )
        for number, step in enumerate(MOVE_STEPS)
        for place, choice in enumerate(choices)
    ]


@pytest.mark.parametrize(("when", "key", "verb"), combine_with_steps(before, after))
def test_delete_ends_move_at_each_step(cloud: Cloud, key: str, verb: str, when: object) -> None:
    server = boot_server(cloud)
    lead_up(cloud, server, key)
    (before if when is before else after)(cloud, verb, lambda host: cloud.ask(server, "delete"))
    ask(cloud, server, key)
    cloud.settle()
    assert cloud.show(server).deleted
    if key == "evacuate":
        cloud.hosts["h1"].power_on()
        cloud.settle()
    assert (cloud.domains(server), cloud.findings()) == ([], [])
    assert all(server not in host.driver.host.files for host in cloud.hosts.values())
    assert cloud.migration(server).status in ("cancelled", "reverted")


def test_delete_and_force_delete_during_resize_leave_no_open_move(cloud: Cloud) -> None:
    server = boot_server(cloud)

    def delete(host: str) -> None:
        cloud.ask(server, "delete")
        cloud.ask(server, "forceDelete")

    before(cloud, "receive", delete)
    ask(cloud, server, "resize")
    cloud.settle()
    assert (cloud.migration(server).status, cloud.findings()) == ("cancelled", [])


def test_delete_in_verify_resize_removes_guests_on_both_hosts(cloud: Cloud) -> None:
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.domains(server), cloud.findings()) == (1, [], [])
    assert cloud.migration(server).status == "cancelled"


@pytest.mark.parametrize(
    ("either", "key", "verb"), combine_with_steps("", "nfs"), indirect=["either"]
)
def test_reset_state_ends_move_at_each_step(either: Cloud, key: str, verb: str) -> None:
    """A guest in transit is removed, and the doctor reports the server without a guest."""
    cloud = either
    if key == "evacuate" and has_shared_storage(cloud):
        verb = "install"
    if verb == "offer" and key == "resize" and has_shared_storage(cloud):
        verb = "receive"
    server = boot_server(cloud)
    lead_up(cloud, server, key)
    before(cloud, verb, lambda host: reset_state(cloud, server))
    ask(cloud, server, key)
    cloud.settle()
    row = cloud.show(server)
    assert (row.vm_state, row.task_state, row.action) == (states.ACTIVE, None, None)
    assert (row.vcpus, row.memory_mb) == (row.flavor["vcpus"], row.flavor["memory_mb"])
    if key == "evacuate":
        cloud.hosts["h1"].power_on()
        cloud.settle()
    cloud.clean_up()
    has_left = key == "os-migrateLive" and verb in ("live_migrate", "arrived")
    assert [(finding.invariant, finding.subject) for finding in cloud.findings()] == [
        ("guest-there", server)
    ] * has_left
    if (key, verb) != ("os-migrateLive", "arrived") and key != "evacuate":
        assert cloud.hosts[row.host].driver.host.storage[server].disk == CANARY


def test_reset_state_in_verify_resize_confirms_resize_at_destination(either: Cloud) -> None:
    cloud = either
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    reset_state(cloud, server)
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert (cloud.migration(server).status, read_disk(cloud, server)) == ("confirmed", CANARY)
