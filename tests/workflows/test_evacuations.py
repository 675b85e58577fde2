# SPDX-License-Identifier: Apache-2.0
"""Evacuation: what proves that a host's guests are dead, what becomes of them when there is no room
elsewhere, and of a host that returns: before, in the middle, at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.domain import errors, states
from compute_agent.virt.memory.state.script import Fail
from tests.workflows.moves import (
    CANARY,
    after,
    before,
    clouds,
    disk,
    last,
    server_on,
    shares,
    stands,
)
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds(2)
    yield cloud
    cloud.store.close()


@pytest.fixture(params=["", "nfs"], ids=["local", "shared"])
def either(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    cloud = clouds(2, request.param)
    yield cloud
    cloud.store.close()


def is_there_again(cloud: Cloud, host: str = "h1") -> None:
    """The host has its power back."""
    cloud.hosts[host].power_on()
    cloud.settle()


def test_silence_proves_nothing(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert "does not prove that its guests are dead" in last(cloud, server).message
    assert cloud.migration(server).status == "failed"
    cloud.cut.clear()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")


def test_a_host_that_answers_is_not_evacuated(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.engine.fence_host = lambda host: pytest.fail("it was fenced")
    cloud.move(server, "evacuate")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert last(cloud, server).message == "Compute service of h1 is still in use."


def test_the_fencing_hook_is_proof(either: Cloud) -> None:
    cloud = either
    server, fenced = server_on(cloud), []

    def fence(host: str) -> None:
        fenced.append(host)
        cloud.hosts[host].power_cut()

    cloud.engine.fence_host = fence
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert fenced == ["h1"]
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert cloud.migration(server).status == "done"
    cloud.cut.clear()
    is_there_again(cloud)
    stands(cloud, server, states.ACTIVE, "h2")
    assert (cloud.domains(server), cloud.migration(server).status) == (["h2"], "completed")
    assert disk(cloud, server) == (CANARY if shares(cloud) else {})
    assert cloud.create(host="h1")
    cloud.settle()


def test_a_hook_that_fails_is_no_proof(cloud: Cloud) -> None:
    server = server_on(cloud)

    def fence(host: str) -> None:
        raise errors.Conflict("The fencing hook ended with 1.")

    cloud.engine.fence_host = fence
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).host, last(cloud, server).message) == (
        "h1",
        "The fencing hook ended with 1.",
    )
    cloud.cut.clear()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")


def test_a_host_that_registers_while_it_is_fenced_keeps_its_servers(cloud: Cloud) -> None:
    server = server_on(cloud)

    def fence(host: str) -> None:
        cloud.hosts[host].power_cut()
        cloud.cut.clear()
        cloud.hosts[host].power_on()
        cloud.sync(cloud.hosts[host])

    cloud.engine.fence_host = fence
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host == "h1"
    assert (
        last(cloud, server).name == "reboot"
        or "has come back meanwhile" in last(cloud, server).message
    )
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")


def test_a_host_that_registers_when_it_was_just_fenced_keeps_its_servers(cloud: Cloud) -> None:
    server, select = server_on(cloud), cloud.select

    def registration(specs: list, fresh: bool) -> list:  # type: ignore[type-arg]
        if not cloud.hosts["h1"].is_on:
            cloud.cut.clear()
            cloud.hosts["h1"].power_on()
            cloud.sync(cloud.hosts["h1"])
        return select(specs, fresh)

    cloud.engine.fence_host = lambda host: cloud.hosts[host].power_cut()
    cloud.select = registration  # type: ignore[method-assign]  # the post is the simulator's to bend
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host == "h1"
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert disk(cloud, server) == CANARY


def test_another_host_takes_it_when_one_cannot() -> None:
    cloud = clouds(3)
    server, tried = server_on(cloud), []

    def breaks(host: str) -> None:
        tried.append(host)
        cloud.hosts[host].driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)]

    before(cloud, "ensure_guest", breaks)
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    is_there_again(cloud)
    stands(cloud, server, states.ACTIVE, ({"h2", "h3"} - {*tried}).pop())


@pytest.mark.parametrize("when", ["while nobody takes it", "afterwards"])
def test_what_nobody_takes_is_not_lost(either: Cloud, when: str) -> None:
    """The old guest is kept; when its host is there again it runs there."""
    cloud = either
    verb = "install" if shares(cloud) else "ensure_guest"
    server = server_on(cloud)
    cloud.hosts["h2"].driver.host.script[verb] = [Fail("Disk full.", retryable=True)]
    if when != "afterwards":
        before(cloud, verb, lambda host: cloud.hosts["h1"].power_on())
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).task_state, cloud.show(server).host) == (None, "h1")
    assert cloud.migration(server).status == "failed"
    if when == "afterwards":
        is_there_again(cloud)
    stands(cloud, server, states.ACTIVE, "h1")
    assert disk(cloud, server) == CANARY


@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize("off", [True, False], ids=["dead", "cut"])
def test_a_host_that_returns_in_the_middle_runs_nothing_of_it(
    either: Cloud, when: object, off: bool
) -> None:
    """Whatever it was that fenced it: what it still runs is made off, and then removed."""
    cloud = either
    verb = "install" if shares(cloud) else "ensure_guest"
    server, look = server_on(cloud), cloud.watcher
    cloud.watcher = lambda: None

    def returns(host: str) -> None:
        cloud.cut.clear()
        if off:
            cloud.hosts["h1"].power_on()
        cloud.sync(cloud.hosts["h1"])
        cloud.hosts["h1"].work()
        cloud.watcher = look
        assert [one.power_state for one in cloud.hosts["h1"].driver.host.guests.values()] == [
            states.SHUTDOWN
        ]

    (before if when is before else after)(cloud, verb, returns)
    if off:
        cloud.hosts["h1"].power_cut()
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h2")
    assert cloud.domains(server) == ["h2"]


def test_a_stopped_server_is_evacuated_and_stays_off_unless_it_is_to_be_started(
    cloud: Cloud,
) -> None:
    server = server_on(cloud)
    cloud.ask(server, "os-stop")
    cloud.settle()
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    is_there_again(cloud)
    stands(cloud, server, states.STOPPED, "h2")


@pytest.mark.parametrize("told", [True, False])
def test_who_says_where_the_files_are_must_be_right(either: Cloud, told: bool) -> None:
    cloud = either
    server = server_on(cloud)
    cloud.kill("h1")
    cloud.move(server, "evacuate", shared=told)
    cloud.settle()
    is_there_again(cloud)
    assert cloud.show(server).host == ("h2" if told == shares(cloud) else "h1")
    stands(cloud, server, states.ACTIVE, cloud.show(server).host)


def test_an_action_that_hangs_on_the_dead_host_gives_way(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.hosts["h1"].power_cut()
    cloud.ask(server, "os-stop")
    cloud.until_down("h1")
    assert cloud.show(server).task_state == states.POWERING_OFF
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    is_there_again(cloud)
    stands(cloud, server, states.ACTIVE, "h2")
