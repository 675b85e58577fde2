# SPDX-License-Identifier: Apache-2.0
"""Tests of moves between three hosts. At a step a host fails, falls silent, dies or returns.

After every round the watcher checks that the doctor reports no finding and no guest runs twice.
"""

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
    boot_server,
    check_rests,
    create_cloud,
    failures,
    has_shared_storage,
    last,
    lead_up,
    read_disk,
    resize_to_bigger,
)
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud

BROKEN = Fail("Disk full.", retryable=True)
DESTINATION_VERBS, SOURCE_VERBS = ("prepare", "receive", "install"), ("ensure_stopped", "offer")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


# --- the destination fails ---
@pytest.mark.parametrize(
    ("key", "verb"),
    [
        *(("resize", verb) for verb in DESTINATION_VERBS),
        ("os-migrateLive", "prepare_arrival"),
        ("os-migrateLive", "live_migrate"),
        ("evacuate", "ensure_guest"),
    ],
)
def test_move_retries_on_other_host_when_destination_fails(
    cloud: Cloud, key: str, verb: str
) -> None:
    server, failed_hosts = boot_server(cloud), []

    def fail_destination(host: str) -> None:
        failed_hosts.append(cloud.migration(server).dest_host)
        cloud.hosts[host].driver.host.script[verb] = [BROKEN]

    lead_up(cloud, server, key)
    before(cloud, verb, fail_destination)
    ask(cloud, server, key)
    cloud.settle()
    other = ({"h2", "h3"} - {*failed_hosts}).pop()
    check_rests(cloud, server, states.RESIZED if key == "resize" else states.ACTIVE, other)
    assert (cloud.migration(server).dest_host, last(cloud, server).attempt) == (other, 2)
    assert failures(cloud) == {"h1": 0, "h2": 0, "h3": 0} | (
        {} if key == "os-migrateLive" else {failed_hosts[0]: 1}
    )
    assert read_disk(cloud, server) == ({} if key == "evacuate" else CANARY)


@pytest.mark.parametrize("verb", DESTINATION_VERBS)
def test_resize_restores_server_when_every_destination_fails(cloud: Cloud, verb: str) -> None:
    server = boot_server(cloud)
    original = cloud.show(server)
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script[verb] = [BROKEN]
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert cloud.show(server).flavor == original.flavor
    assert last(cloud, server).message.endswith("the last host tried reported: Disk full.")
    assert cloud.migration(server).status == "error"
    assert set(failures(cloud).values()) == {0}
    assert read_disk(cloud, server) == CANARY


def test_resize_fails_after_max_attempts(cloud: Cloud) -> None:
    cloud.engine.max_attempts = 1
    server = boot_server(cloud)
    before(
        cloud, "receive", lambda host: cloud.hosts[host].driver.host.script.update(receive=[BROKEN])
    )
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (last(cloud, server).message, last(cloud, server).attempt) == ("Disk full.", 1)


@pytest.mark.parametrize(
    ("key", "verb"), [*(("resize", verb) for verb in SOURCE_VERBS), ("os-migrateLive", "offer")]
)
def test_move_does_not_retry_when_source_fails(cloud: Cloud, key: str, verb: str) -> None:
    server = boot_server(cloud)
    cloud.hosts["h1"].driver.host.script[verb] = [BROKEN]
    ask(cloud, server, key)
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (last(cloud, server).message, last(cloud, server).attempt) == ("Disk full.", 1)
    assert set(failures(cloud).values()) == {0}


def test_resize_sets_error_when_undo_cannot_restart_guest(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.hosts["h1"].driver.host.script["ensure_running"] = [Fail("No memory.")]
    before(
        cloud, "receive", lambda host: cloud.hosts[host].driver.host.script.update(receive=[BROKEN])
    )
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.ERROR, "h1")
    assert (
        "Disk full. Completed steps could not be undone: stop: No memory."
        in cloud.show(server).fault["message"]
    )


# --- silence ---
@pytest.mark.parametrize(
    ("key", "verb"),
    [("resize", "prepare"), ("resize", "receive"), ("os-migrateLive", "prepare_arrival")],
)
def test_move_retries_on_other_host_when_destination_falls_silent(
    cloud: Cloud, key: str, verb: str
) -> None:
    server = boot_server(cloud)
    before(cloud, verb, cloud.cut.add)
    ask(cloud, server, key)
    cloud.settle()
    [silent] = cloud.cut
    other = ({"h2", "h3"} - cloud.cut).pop()
    assert (cloud.show(server).host, cloud.show(server).action) == (other, None)
    cloud.cut.clear()
    cloud.settle()
    check_rests(cloud, server, states.RESIZED if key == "resize" else states.ACTIVE, other)
    assert server not in cloud.hosts[silent].driver.host.files


def test_resize_waits_for_silent_destination_after_install(cloud: Cloud) -> None:
    server = boot_server(cloud)
    after(cloud, "install", cloud.cut.add)
    ask(cloud, server, "resize")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).task_state == states.RESIZE_FINISH
    [dest] = cloud.cut
    cloud.cut.clear()
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, dest)


def test_resize_returns_to_source_if_destination_forced_down_after_install(cloud: Cloud) -> None:
    cloud.engine.max_attempts = 1
    server, dead_hosts = boot_server(cloud), []
    after(cloud, "install", lambda host: (dead_hosts.append(host), cloud.hosts[host].power_cut()))
    ask(cloud, server, "resize")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).task_state == states.RESIZE_FINISH
    cloud.force_down(dead_hosts[0])
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    cloud.hosts[dead_hosts[0]].power_on()
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert read_disk(cloud, server) == CANARY


@pytest.mark.parametrize("verb", ["receive", "prepare_arrival"])
def test_move_waits_for_silent_source(cloud: Cloud, verb: str) -> None:
    server = boot_server(cloud)
    before(cloud, verb, lambda host: cloud.cut.add("h1"))
    ask(cloud, server, "resize" if verb == "receive" else "os-migrateLive")
    for _ in range(50):
        cloud.round()
    assert cloud.show(server).host == "h1"
    assert cloud.show(server).action
    cloud.cut.clear()
    cloud.settle()
    check_rests(
        cloud,
        server,
        states.RESIZED if verb == "receive" else states.ACTIVE,
        cloud.migration(server).dest_host,
    )
    assert read_disk(cloud, server) == CANARY


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
def test_move_fails_and_server_can_be_evacuated_when_source_is_forced_down(
    cloud: Cloud, key: str, verb: str
) -> None:
    server = boot_server(cloud)
    before(cloud, verb, lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, key)
    cloud.until_down("h1")
    assert cloud.show(server).action
    cloud.force_down("h1")
    cloud.settle()
    row = cloud.show(server)
    assert (row.vm_state, row.task_state, row.host) == (states.ACTIVE, None, "h1")
    assert (last(cloud, server).state, cloud.migration(server).status) == ("failed", "error")
    assert (failures(cloud)["h2"], failures(cloud)["h3"]) == (0, 0)
    cloud.move(server, "evacuate")
    cloud.settle()
    cloud.hosts["h1"].power_on()
    cloud.settle()
    assert cloud.show(server).host != "h1"
    check_rests(cloud, server, states.ACTIVE, cloud.show(server).host)


def test_resize_and_confirm_complete_when_source_loses_power_after_copy(cloud: Cloud) -> None:
    server = boot_server(cloud)
    before(cloud, "install", lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, cloud.migration(server).dest_host)
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
    check_rests(cloud, server, states.ACTIVE, cloud.show(server).host)
    assert cloud.domains(server) == [cloud.show(server).host]


def test_live_migrate_completes_when_source_is_forced_down_after_switch(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.hosts["h1"].driver.host.write_memory(server, "n", "7")
    after(cloud, "live_migrate", lambda host: cloud.hosts["h1"].power_cut())
    ask(cloud, server, "os-migrateLive")
    cloud.until_down("h1")
    cloud.force_down("h1")
    cloud.settle()
    dest = cloud.migration(server).dest_host
    cloud.hosts["h1"].power_on()
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, dest)
    assert cloud.hosts[dest].driver.host.guests[server].memory == {"n": "7"}


def test_live_migrate_with_lost_guest_restarts_only_from_shared_disk(either: Cloud) -> None:
    """Without shared storage the disk is lost too, and the server is in ERROR."""
    cloud = either
    server = boot_server(cloud)
    after(
        cloud,
        "live_migrate",
        lambda _: [host.driver.host.guests.pop(server, None) for host in cloud.hosts.values()],
    )
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert cloud.migration(server).status == "error"
    assert last(cloud, server).message == "The server did not arrive on this host."
    if has_shared_storage(cloud):
        check_rests(cloud, server, states.ACTIVE, "h1")
        assert read_disk(cloud, server) == CANARY
    else:
        assert cloud.show(server).vm_state == states.ERROR
        assert "could not be undone: return" in cloud.show(server).fault["message"]
    assert cloud.findings() == []


def test_live_migrate_keeps_recorded_host_when_check_of_arrival_fails(
    either: Cloud,
) -> None:
    """Afterwards the doctor finds no guest on another host."""
    cloud = either
    server = boot_server(cloud)
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script["arrived"] = [Fail("Confused.")]
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    assert cloud.show(server).host == "h1"
    assert cloud.findings() == []


# --- revert and confirm ---
def test_revert_resize_succeeds_when_destination_is_forced_down(either: Cloud) -> None:
    cloud = either
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    dead_host = cloud.show(server).host
    cloud.kill(dead_host)
    cloud.close(server, "revertResize")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h1")
    cloud.hosts[dead_host].power_on()
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (read_disk(cloud, server), cloud.domains(server)) == (CANARY, ["h1"])


def test_revert_resize_fails_and_keeps_disk_when_source_is_forced_down(
    either: Cloud,
) -> None:
    """The disk keeps the file written after the resize."""
    cloud = either
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
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
    check_rests(cloud, server, states.RESIZED, dest)
    assert read_disk(cloud, server) == {**CANARY, "since": "then"}
    cloud.force_down("h1", False)
    cloud.close(server, "revertResize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")


@pytest.mark.parametrize("verb", ["ensure_stopped", "install"])
def test_confirm_resize_succeeds_after_revert_and_its_undo_failed(cloud: Cloud, verb: str) -> None:
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
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


def test_server_in_verify_resize_is_started_again_after_boot_of_its_host(cloud: Cloud) -> None:
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    dest = cloud.show(server).host
    cloud.hosts[dest].power_cut()
    for _ in range(3):
        cloud.round()
    cloud.hosts[dest].power_on()
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, dest)
    cloud.close(server, "confirmResize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, dest)


def test_resize_is_confirmed_after_confirm_window(cloud: Cloud) -> None:
    cloud.engine.resize_confirm_window = 20
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    cloud.round()
    assert cloud.show(server).vm_state == states.RESIZED
    cloud.time.pass_by(21)
    cloud.round()
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, cloud.migration(server).dest_host)
    assert cloud.migration(server).status == "confirmed"


def test_confirm_resize_sets_stopped_when_guest_stopped_by_itself(cloud: Cloud) -> None:
    server = boot_server(cloud)
    resize_to_bigger(cloud, server)
    host = cloud.hosts[cloud.show(server).host]
    host.driver.host.power_off(server)
    cloud.idle(65)
    cloud.close(server, "confirmResize")
    cloud.settle()
    check_rests(cloud, server, states.STOPPED, host.name)
    host.power_cut()
    host.power_on()
    cloud.settle()
    check_rests(cloud, server, states.STOPPED, host.name)


# --- quota ---
@pytest.mark.parametrize(("end", "counts"), [("confirmResize", 2), ("revertResize", 1)])
def test_resize_counts_larger_flavor_in_quota_until_reverted(
    cloud: Cloud, end: str, counts: int
) -> None:
    server = boot_server(cloud)
    ask(cloud, server, "resize")
    while cloud.show(server).vm_state != states.RESIZED:
        assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (2, 256)
        cloud.round()
    assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (2, 256)
    cloud.close(server, end)
    cloud.settle()
    assert (cloud.show(server).vcpus, cloud.show(server).memory_mb) == (counts, 128 * counts)


def test_resize_avoids_host_forced_down(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.kill("h2")
    ask(cloud, server, "resize")
    cloud.settle()
    check_rests(cloud, server, states.RESIZED, "h3")
    assert cloud.store.read(lambda tx: services.are_dead(tx, "h2"))
