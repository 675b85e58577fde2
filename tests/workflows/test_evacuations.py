# SPDX-License-Identifier: Apache-2.0
"""Tests of evacuation: proof that a host is dead, failed destinations, and hosts that return.

The simulated cloud has two hosts, with local disks or with shared storage.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.domain import errors, states
from compute_agent.virt.memory.state.script import Fail
from tests.workflows.moves import (
    CANARY,
    after,
    before,
    boot_server,
    check_rests,
    create_cloud,
    has_shared_storage,
    last,
    read_disk,
)
from tests.workflows.simulator import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud(2)
    yield cloud
    cloud.store.close()


@pytest.fixture(params=["", "nfs"], ids=["local", "shared"])
def either(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Yield a cloud of two hosts, once with local disks and once with shared storage."""
    cloud = create_cloud(2, request.param)
    yield cloud
    cloud.store.close()


def power_on(cloud: Cloud, host: str = "h1") -> None:
    """Restore the power of the host, and run rounds until no work is left."""
    cloud.hosts[host].power_on()
    cloud.settle()


def test_evacuate_of_silent_host_fails_without_fencing(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    assert "does not prove that its guests are dead" in last(cloud, server).message
    assert cloud.migration(server).status == "failed"
    cloud.cut.clear()
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_evacuate_of_reachable_host_fails(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.engine.fence_host = lambda host: pytest.fail("it was fenced")
    cloud.move(server, "evacuate")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert last(cloud, server).message == "Compute service of h1 is still in use."


def test_evacuate_of_silent_host_succeeds_after_fencing_hook(either: Cloud) -> None:
    cloud = either
    server, fenced_hosts = boot_server(cloud), []

    def fence(host: str) -> None:
        fenced_hosts.append(host)
        cloud.hosts[host].power_cut()

    cloud.engine.fence_host = fence
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert fenced_hosts == ["h1"]
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    assert cloud.migration(server).status == "done"
    cloud.cut.clear()
    power_on(cloud)
    check_rests(cloud, server, states.ACTIVE, "h2")
    assert (cloud.domains(server), cloud.migration(server).status) == (["h2"], "completed")
    assert read_disk(cloud, server) == (CANARY if has_shared_storage(cloud) else {})
    assert cloud.create(host="h1")
    cloud.settle()


def test_evacuate_fails_when_fencing_hook_fails(cloud: Cloud) -> None:
    server = boot_server(cloud)

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
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_evacuate_fails_when_host_registers_during_fencing(cloud: Cloud) -> None:
    server = boot_server(cloud)

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
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_evacuate_fails_when_host_registers_after_fencing(cloud: Cloud) -> None:
    server, select = boot_server(cloud), cloud.select

    def register_and_select(specs: list, fresh: bool) -> list:  # type: ignore[type-arg]
        if not cloud.hosts["h1"].is_on:
            cloud.cut.clear()
            cloud.hosts["h1"].power_on()
            cloud.sync(cloud.hosts["h1"])
        return select(specs, fresh)

    cloud.engine.fence_host = lambda host: cloud.hosts[host].power_cut()
    cloud.select = register_and_select  # type: ignore[method-assign]
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert cloud.show(server).host == "h1"
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert read_disk(cloud, server) == CANARY


def test_evacuate_retries_on_other_host_when_destination_fails() -> None:
    cloud = create_cloud(3)
    server, failed_hosts = boot_server(cloud), []

    def fail_destination(host: str) -> None:
        failed_hosts.append(host)
        cloud.hosts[host].driver.host.script["ensure_guest"] = [Fail("Disk full.", retryable=True)]

    before(cloud, "ensure_guest", fail_destination)
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    power_on(cloud)
    check_rests(cloud, server, states.ACTIVE, ({"h2", "h3"} - {*failed_hosts}).pop())


@pytest.mark.parametrize("when", ["during evacuation", "afterwards"])
def test_evacuate_failed_at_only_destination_keeps_guest_on_returned_host(
    either: Cloud, when: str
) -> None:
    cloud = either
    verb = "install" if has_shared_storage(cloud) else "ensure_guest"
    server = boot_server(cloud)
    cloud.hosts["h2"].driver.host.script[verb] = [Fail("Disk full.", retryable=True)]
    if when != "afterwards":
        before(cloud, verb, lambda host: cloud.hosts["h1"].power_on())
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    assert (cloud.show(server).task_state, cloud.show(server).host) == (None, "h1")
    assert cloud.migration(server).status == "failed"
    if when == "afterwards":
        power_on(cloud)
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert read_disk(cloud, server) == CANARY


@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize("off", [True, False], ids=["dead", "cut"])
def test_evacuate_removes_old_guest_when_host_returns_meanwhile(
    either: Cloud, when: object, off: bool
) -> None:
    """The returned host stops the old guest at once, and then removes the guest.

    In the case ``cut`` the host kept running, without a connection to conductors.
    """
    cloud = either
    verb = "install" if has_shared_storage(cloud) else "ensure_guest"
    server, watcher = boot_server(cloud), cloud.watcher
    cloud.watcher = lambda: None

    def bring_back(host: str) -> None:
        cloud.cut.clear()
        if off:
            cloud.hosts["h1"].power_on()
        cloud.sync(cloud.hosts["h1"])
        cloud.hosts["h1"].work()
        cloud.watcher = watcher
        assert [guest.power_state for guest in cloud.hosts["h1"].driver.host.guests.values()] == [
            states.SHUTDOWN
        ]

    (before if when is before else after)(cloud, verb, bring_back)
    if off:
        cloud.hosts["h1"].power_cut()
    cloud.cut.add("h1")
    cloud.until_down("h1")
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h2")
    assert cloud.domains(server) == ["h2"]


def test_evacuate_keeps_stopped_server_stopped(
    cloud: Cloud,
) -> None:
    server = boot_server(cloud)
    cloud.ask(server, "os-stop")
    cloud.settle()
    cloud.kill("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    power_on(cloud)
    check_rests(cloud, server, states.STOPPED, "h2")


@pytest.mark.parametrize("is_shared", [True, False])
def test_evacuate_moves_server_only_if_shared_storage_flag_matches_hosts(
    either: Cloud, is_shared: bool
) -> None:
    cloud = either
    server = boot_server(cloud)
    cloud.kill("h1")
    cloud.move(server, "evacuate", shared=is_shared)
    cloud.settle()
    power_on(cloud)
    assert cloud.show(server).host == ("h2" if is_shared == has_shared_storage(cloud) else "h1")
    check_rests(cloud, server, states.ACTIVE, cloud.show(server).host)


def test_evacuate_supersedes_stop_pending_on_host_forced_down(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.hosts["h1"].power_cut()
    cloud.ask(server, "os-stop")
    cloud.until_down("h1")
    assert cloud.show(server).task_state == states.POWERING_OFF
    cloud.force_down("h1")
    cloud.move(server, "evacuate")
    cloud.settle()
    power_on(cloud)
    check_rests(cloud, server, states.ACTIVE, "h2")
