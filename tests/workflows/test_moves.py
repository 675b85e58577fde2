# SPDX-License-Identifier: Apache-2.0
"""Moves of servers between three hosts, and what can happen on their way: hosts that fail, are
silent, die or return at one of the steps. After every round the oracle finds nothing, and no server
runs on two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.domain import states
from common.store.hosts import services
from compute_agent.virt.memory.state.script import Fail
from tests.workflows.moves import (
    CANARY,
    after,
    before,
    clouds,
    disk,
    failures,
    last,
    lead_up,
    resized,
    server_on,
    shares,
    stands,
)
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud

BROKEN = Fail("Disk full.", retryable=True)
TO, FROM = ("prepare", "receive", "install"), ("ensure_stopped", "offer")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


# --- the destination cannot ---
@pytest.mark.parametrize(
    ("key", "verb"),
    [
        *(("resize", verb) for verb in TO),
        ("os-migrateLive", "prepare_arrival"),
        ("os-migrateLive", "live_migrate"),
        ("evacuate", "ensure_guest"),
    ],
)
def test_another_destination_is_tried(cloud: Cloud, key: str, verb: str) -> None:
    server, tried = server_on(cloud), []

    def breaks(host: str) -> None:
        tried.append(cloud.migration(server).dest_host)
        cloud.hosts[host].driver.host.script[verb] = [BROKEN]

    lead_up(cloud, server, key)
    before(cloud, verb, breaks)
    ask(cloud, server, key)
    cloud.settle()
    other = ({"h2", "h3"} - {*tried}).pop()
    stands(cloud, server, states.RESIZED if key == "resize" else states.ACTIVE, other)
    assert (cloud.migration(server).dest_host, last(cloud, server).attempt) == (other, 2)
    assert failures(cloud) == {"h1": 0, "h2": 0, "h3": 0} | (
        {} if key == "os-migrateLive" else {tried[0]: 1}
    )
    assert disk(cloud, server) == ({} if key == "evacuate" else CANARY)


@pytest.mark.parametrize("verb", TO)
def test_when_no_destination_can_the_server_is_as_before_and_none_is_blamed(
    cloud: Cloud, verb: str
) -> None:
    server = server_on(cloud)
    was = cloud.show(server)
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script[verb] = [BROKEN]
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert cloud.show(server).flavor == was.flavor
    assert last(cloud, server).message.endswith("the last host tried said: Disk full.")
    assert cloud.migration(server).status == "error"
    assert set(failures(cloud).values()) == {0}
    assert disk(cloud, server) == CANARY


def test_no_more_than_max_attempts_are_made(cloud: Cloud) -> None:
    cloud.engine.max_attempts = 1
    server = server_on(cloud)
    before(
        cloud, "receive", lambda host: cloud.hosts[host].driver.host.script.update(receive=[BROKEN])
    )
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert (last(cloud, server).message, last(cloud, server).attempt) == ("Disk full.", 1)


@pytest.mark.parametrize(
    ("key", "verb"), [*(("resize", verb) for verb in FROM), ("os-migrateLive", "offer")]
)
def test_what_the_source_cannot_no_other_destination_helps(
    cloud: Cloud, key: str, verb: str
) -> None:
    server = server_on(cloud)
    cloud.hosts["h1"].driver.host.script[verb] = [BROKEN]
    ask(cloud, server, key)
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert (last(cloud, server).message, last(cloud, server).attempt) == ("Disk full.", 1)
    assert set(failures(cloud).values()) == {0}


def test_a_server_that_could_not_be_started_again_is_not_moved_once_more(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.hosts["h1"].driver.host.script["ensure_running"] = [Fail("No memory.")]
    before(
        cloud, "receive", lambda host: cloud.hosts[host].driver.host.script.update(receive=[BROKEN])
    )
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.ERROR, "h1")
    assert (
        "Disk full.; and it could not be undone: stop: No memory."
        in cloud.show(server).fault["message"]
    )


# --- silence ---
@pytest.mark.parametrize(
    ("key", "verb"),
    [("resize", "prepare"), ("resize", "receive"), ("os-migrateLive", "prepare_arrival")],
)
def test_a_destination_that_falls_silent_before_anything_runs_there_is_given_up(
    cloud: Cloud, key: str, verb: str
) -> None:
    server = server_on(cloud)
    before(cloud, verb, cloud.cut.add)
    ask(cloud, server, key)
    cloud.settle()
    [silent] = cloud.cut
    other = ({"h2", "h3"} - cloud.cut).pop()
    assert (cloud.show(server).host, cloud.show(server).action) == (other, None)
    cloud.cut.clear()
    cloud.settle()
    stands(cloud, server, states.RESIZED if key == "resize" else states.ACTIVE, other)
    assert server not in cloud.hosts[silent].driver.host.files


def test_a_destination_that_may_have_started_it_is_waited_for(cloud: Cloud) -> None:
    server = server_on(cloud)
    after(cloud, "install", cloud.cut.add)
    ask(cloud, server, "resize")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).task_state == states.RESIZE_FINISH
    [dest] = cloud.cut
    cloud.cut.clear()
    cloud.settle()
    stands(cloud, server, states.RESIZED, dest)


def test_a_destination_that_dies_when_it_may_have_started_it_leads_back(cloud: Cloud) -> None:
    cloud.engine.max_attempts = 1
    server, dead = server_on(cloud), []
    after(cloud, "install", lambda host: (dead.append(host), cloud.hosts[host].power_cut()))
    ask(cloud, server, "resize")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).task_state == states.RESIZE_FINISH
    cloud.force_down(dead[0])
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    cloud.hosts[dead[0]].power_on()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert disk(cloud, server) == CANARY


@pytest.mark.parametrize("verb", ["receive", "prepare_arrival"])
def test_a_source_that_cannot_be_reached_is_waited_for(cloud: Cloud, verb: str) -> None:
    server = server_on(cloud)
    before(cloud, verb, lambda host: cloud.cut.add("h1"))
    ask(cloud, server, "resize" if verb == "receive" else "os-migrateLive")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).host == "h1"
    assert cloud.show(server).action
    cloud.cut.clear()
    cloud.settle()
    stands(
        cloud,
        server,
        states.RESIZED if verb == "receive" else states.ACTIVE,
        cloud.migration(server).dest_host,
    )
    assert disk(cloud, server) == CANARY


# --- the source dies ---
@pytest.mark.parametrize(
    ("key", "verb"),
    [
        ("resize", "prepare"),
        ("resize", "ensure_stopped"),
        ("resize", "offer"),
        ("resize", "receive"),
        ("os-migrateLive", "offer"),
        ("os-migrateLive", "prepare_arrival"),
        ("os-migrateLive", "live_migrate"),
    ],
)
def test_a_server_whose_source_dies_stays_there_and_can_be_evacuated(
    cloud: Cloud, key: str, verb: str
) -> None:
    server = server_on(cloud)
    before(cloud, verb, lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, key)
    cloud.until_down("h1")
    assert cloud.show(server).action
    cloud.force_down("h1")
    cloud.settle()
    found = cloud.show(server)
    assert (found.vm_state, found.task_state, found.host) == (states.ACTIVE, None, "h1")
    assert (last(cloud, server).state, cloud.migration(server).status) == ("failed", "error")
    assert (failures(cloud)["h2"], failures(cloud)["h3"]) == (0, 0)
    cloud.move(server, "evacuate")
    cloud.settle()
    cloud.hosts["h1"].power_on()
    cloud.settle()
    assert cloud.show(server).host != "h1"
    stands(cloud, server, states.ACTIVE, cloud.show(server).host)


def test_a_server_whose_files_have_come_goes_on_without_its_source(cloud: Cloud) -> None:
    server = server_on(cloud)
    before(cloud, "install", lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.RESIZED, cloud.migration(server).dest_host)
    cloud.until_down("h1")
    cloud.close(server, "confirmResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.migration(server).status) == (
        states.ACTIVE,
        "confirmed",
    )
    assert cloud.domains(server) == sorted(["h1", cloud.show(server).host])
    cloud.hosts["h1"].power_on()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.show(server).host)
    assert cloud.domains(server) == [cloud.show(server).host]


def test_a_guest_that_has_arrived_stays_when_its_source_dies(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.hosts["h1"].driver.host.write_memory(server, "n", "7")
    after(cloud, "live_migrate", lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, "os-migrateLive")
    cloud.until_down("h1")
    cloud.force_down("h1")
    cloud.settle()
    dest = cloud.migration(server).dest_host
    cloud.hosts["h1"].power_on()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, dest)
    assert cloud.hosts[dest].driver.host.guests[server].memory == {"n": "7"}


def test_a_guest_that_neither_host_has_starts_from_its_disk(either: Cloud) -> None:
    """On shared storage; a disk that went to the destination went with it."""
    cloud = either
    server = server_on(cloud)
    after(
        cloud,
        "live_migrate",
        lambda host: [one.driver.host.guests.pop(server, None) for one in cloud.hosts.values()],
    )
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert cloud.migration(server).status == "error"
    assert last(cloud, server).message == "The server did not arrive on this host."
    if shares(cloud):
        stands(cloud, server, states.ACTIVE, "h1")
        assert disk(cloud, server) == CANARY
    else:
        assert cloud.show(server).vm_state == states.ERROR
        assert "could not be undone: return" in cloud.show(server).fault["message"]
    assert cloud.findings() == []


def test_a_destination_that_cannot_say_whether_it_has_the_guest_loses_it_before_it_is_started_elsewhere(
    either: Cloud,
) -> None:
    """Whatever ``arrived`` was told by: nothing runs twice (the watcher looks)."""
    cloud = either
    server = server_on(cloud)
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script["arrived"] = [Fail("Confused.")]
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert cloud.show(server).host == "h1"
    assert cloud.findings() == []


# --- back, and for good ---
def test_a_server_is_reverted_though_its_destination_is_dead(either: Cloud) -> None:
    cloud = either
    server = server_on(cloud)
    resized(cloud, server)
    dead = cloud.show(server).host
    cloud.kill(dead)
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    cloud.hosts[dead].power_on()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert (disk(cloud, server), cloud.domains(server)) == (CANARY, ["h1"])


def test_a_server_whose_source_dies_on_the_way_back_stays_where_it_was_resized(
    either: Cloud,
) -> None:
    """What its user wrote there since is not lost."""
    cloud = either
    server = server_on(cloud)
    resized(cloud, server)
    dest = cloud.show(server).host
    cloud.hosts[dest].driver.host.write_file(server, "since", "then")
    before(cloud, "install", lambda host: cloud.hosts["h1"].power_cut())
    cloud.close(server, "revertResize")
    cloud.until_down("h1")
    cloud.force_down("h1")
    cloud.settle()
    assert last(cloud, server).message == "Host h1 was forced down before it had answered."
    cloud.hosts["h1"].power_on()
    cloud.settle()
    stands(cloud, server, states.RESIZED, dest)
    assert disk(cloud, server) == {**CANARY, "since": "then"}
    cloud.force_down("h1", False)
    cloud.close(server, "revertResize")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")


@pytest.mark.parametrize("verb", ["ensure_stopped", "install"])
def test_a_server_that_can_neither_be_reverted_nor_started_again_is_to_be_confirmed(
    cloud: Cloud, verb: str
) -> None:
    server = server_on(cloud)
    resized(cloud, server)
    dest = cloud.hosts[cloud.show(server).host].driver
    for host in cloud.hosts.values():
        host.driver.host.script[verb] = [Fail("It broke.")]
    dest.host.script["ensure_running"] = [Fail("No memory.")]
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, last(cloud, server).message) == (
        states.RESIZED,
        "It broke.",
    )
    dest.host.power_off(server)
    cloud.settle()
    assert cloud.findings() == []
    cloud.close(server, "confirmResize")
    cloud.settle()
    assert cloud.show(server).host == dest.host.name
    assert cloud.findings() == []


def test_a_host_that_was_booted_starts_what_waits_there_to_be_confirmed(cloud: Cloud) -> None:
    server = server_on(cloud)
    resized(cloud, server)
    dest = cloud.show(server).host
    cloud.hosts[dest].power_cut()
    for _ in range(3):
        cloud.round()
    cloud.hosts[dest].power_on()
    cloud.settle()
    stands(cloud, server, states.RESIZED, dest)
    cloud.close(server, "confirmResize")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, dest)


def test_what_nobody_confirms_is_confirmed_when_its_time_is_over(cloud: Cloud) -> None:
    cloud.engine.resize_confirm_window = 20
    server = server_on(cloud)
    resized(cloud, server)
    cloud.round()
    assert cloud.show(server).vm_state == states.RESIZED
    cloud.time.pass_by(21)
    cloud.round()
    cloud.settle()
    stands(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "confirmed"


def test_a_server_that_stopped_by_itself_is_stopped_when_it_is_confirmed(cloud: Cloud) -> None:
    server = server_on(cloud)
    resized(cloud, server)
    host = cloud.hosts[cloud.show(server).host]
    host.driver.host.power_off(server)
    cloud.idle(65)
    cloud.close(server, "confirmResize")
    cloud.settle()
    stands(cloud, server, states.STOPPED, host.name)
    host.power_cut()
    host.power_on()
    cloud.settle()
    stands(cloud, server, states.STOPPED, host.name)


# --- the API's part of the quota ---
@pytest.mark.parametrize(("end", "counts"), [("confirmResize", 2), ("revertResize", 1)])
def test_the_quota_counts_the_larger_flavor_until_the_move_is_over(
    cloud: Cloud, end: str, counts: int
) -> None:
    server = server_on(cloud)
    ask(cloud, server, "resize")
    while cloud.show(server).vm_state != states.RESIZED:
        assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (2, 256)
        cloud.round()
    assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (2, 256)
    cloud.close(server, end)
    cloud.settle()
    assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (counts, 128 * counts)


def test_a_host_that_is_down_is_no_destination(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.kill("h2")
    ask(cloud, server, "resize")
    cloud.settle()
    stands(cloud, server, states.RESIZED, "h3")
    assert cloud.store.read(lambda tx: services.are_dead(tx, "h2"))
