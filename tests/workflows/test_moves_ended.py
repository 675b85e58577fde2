# SPDX-License-Identifier: Apache-2.0
"""Moves that somebody ends on their way, by deleting the server or by an admin's word about its
state, at each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.domain import states
from tests.workflows.moves import (
    CANARY,
    after,
    before,
    clouds,
    disk,
    lead_up,
    reset_state,
    resized,
    server_on,
    shares,
    stands,
)
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


ENDINGS = [
    (key, verb)
    for key, verbs in (
        ("resize", ("offer", "prepare", "ensure_stopped", "receive", "install")),
        ("revertResize", ("ensure_stopped", "install")),
        ("os-migrateLive", ("offer", "prepare_arrival", "live_migrate", "arrived")),
        ("evacuate", ("ensure_guest",)),
    )
    for verb in verbs
]


def by_turns(*choices: object) -> list[Any]:
    """Return each choice with each ending. Of each ending one choice is in the default set."""
    return [
        pytest.param(
            choice,
            *ending,
            id="-".join((getattr(choice, "__name__", choice or "local"), *ending)),
            marks=() if number % len(choices) == place else pytest.mark.slice("moves"),
        )
        for number, ending in enumerate(ENDINGS)
        for place, choice in enumerate(choices)
    ]


@pytest.mark.parametrize(("when", "key", "verb"), by_turns(before, after))
def test_a_server_can_be_deleted_at_each_step(
    cloud: Cloud, key: str, verb: str, when: object
) -> None:
    server = server_on(cloud)
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


def test_a_server_that_is_deleted_twice_on_its_way_leaves_no_open_move(cloud: Cloud) -> None:
    server = server_on(cloud)

    def delete(host: str) -> None:
        cloud.ask(server, "delete")
        cloud.ask(server, "forceDelete")

    before(cloud, "receive", delete)
    ask(cloud, server, "resize")
    cloud.settle()
    assert (cloud.migration(server).status, cloud.findings()) == ("cancelled", [])


def test_a_server_that_waits_to_be_confirmed_is_deleted_everywhere(cloud: Cloud) -> None:
    server = server_on(cloud)
    resized(cloud, server)
    cloud.ask(server, "delete")
    cloud.settle()
    assert (cloud.show(server).deleted, cloud.domains(server), cloud.findings()) == (1, [], [])
    assert cloud.migration(server).status == "cancelled"


@pytest.mark.parametrize(("either", "key", "verb"), by_turns("", "nfs"), indirect=["either"])
def test_an_admins_word_ends_a_move_at_each_step(either: Cloud, key: str, verb: str) -> None:
    """A guest that was on its way, or had arrived, when its live migration was ended is where its
    server is not, and
    goes: the doctor misses it."""
    cloud = either
    if key == "evacuate" and shares(cloud):
        verb = "install"
    if verb == "offer" and key == "resize" and shares(cloud):
        verb = "receive"
    server = server_on(cloud)
    lead_up(cloud, server, key)
    before(cloud, verb, lambda host: reset_state(cloud, server))
    ask(cloud, server, key)
    cloud.settle()
    found = cloud.show(server)
    assert (found.vm_state, found.task_state, found.action) == (states.ACTIVE, None, None)
    assert (found.vcpus, found.memory_mb) == (found.flavor["vcpus"], found.flavor["memory_mb"])
    if key == "evacuate":
        cloud.hosts["h1"].power_on()
        cloud.settle()
    cloud.clean_up()
    has_left = key == "os-migrateLive" and verb in ("live_migrate", "arrived")
    assert [(one.invariant, one.subject) for one in cloud.findings()] == [
        ("guest-there", server)
    ] * has_left
    if (key, verb) != ("os-migrateLive", "arrived") and key != "evacuate":
        assert cloud.hosts[found.host].driver.host.storage[server].disk == CANARY


def test_an_admins_word_lets_a_server_stay_where_it_was_moved(either: Cloud) -> None:
    cloud = either
    server = server_on(cloud)
    resized(cloud, server)
    reset_state(cloud, server)
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert (cloud.migration(server).status, disk(cloud, server)) == ("confirmed", CANARY)
