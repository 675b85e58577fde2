# SPDX-License-Identifier: Apache-2.0
"""Tests of the destinations of moves: named and forced hosts, zones, groups, CPUs and ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import HardwareAssignment
from common.domain.wire import from_wire
from common.store import schema
from compute_agent.virt.memory.state.script import Fail
from tests.workflows.moves import (
    boot_server,
    check_rests,
    create_cloud,
    failures,
    last,
    resize_to_bigger,
)
from tests.workflows.scenarios import PINNED, ask
from tests.workflows.simulator import Cloud

MOVES = ("migrate", "os-migrateLive", "evacuate")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


def get_state_after(key: str) -> str:
    """Return the vm_state of a server after a successful move, before any confirm."""
    return states.RESIZED if key == "migrate" else states.ACTIVE


def move_and_settle(cloud: Cloud, server: str, key: str, **args: object) -> None:
    """Run a move to its end. Before an evacuation host h1 dies, and afterwards h1 returns."""
    if key == "evacuate":
        cloud.kill("h1")
    cloud.move(server, key, **args)
    cloud.settle()
    if key == "evacuate":
        cloud.hosts["h1"].power_on()
        cloud.settle()
        cloud.force_down("h1", False)


def read_failure(cloud: Cloud, server: str) -> str:
    """Check that the last action failed, and return its message."""
    assert last(cloud, server).state == "failed"
    return str(last(cloud, server).message)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("key", MOVES)
@pytest.mark.parametrize("host", ["h2", "h3"])
def test_move_request_with_host_moves_server_to_requested_host(
    cloud: Cloud, key: str, host: str, forced: bool
) -> None:
    server = boot_server(cloud)
    move_and_settle(cloud, server, key, host=host, forced=forced)
    check_rests(cloud, server, get_state_after(key), host)


@pytest.mark.parametrize("forced", [False, True])
def test_migrate_to_failing_requested_host_is_not_retried_on_other_host(
    cloud: Cloud, forced: bool
) -> None:
    server = boot_server(cloud)
    cloud.hosts["h2"].driver.host.script["receive"] = [Fail("Disk full.", retryable=True)]
    move_and_settle(cloud, server, "migrate", host="h2", forced=forced)
    assert read_failure(cloud, server).endswith("Disk full.")
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_migrate_to_own_host_fails_with_no_valid_host(cloud: Cloud) -> None:
    server = boot_server(cloud)
    move_and_settle(cloud, server, "migrate", host="h1", forced=True)
    assert read_failure(cloud, server).startswith("No valid host")
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_move_of_server_pinned_to_zone_without_hosts_fails(cloud: Cloud) -> None:
    server = boot_server(cloud)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).values(pinned_availability_zone="elsewhere")
        )
    )
    for key in ("migrate", "os-migrateLive"):
        move_and_settle(cloud, server, key)
        assert read_failure(cloud, server).startswith("No valid host")
        check_rests(cloud, server, states.ACTIVE, "h1")


@pytest.mark.parametrize("key", MOVES)
def test_anti_affinity_move_avoids_hosts_of_members_and_open_migrate(
    cloud: Cloud, key: str
) -> None:
    group = cloud.group("anti-affinity")
    server = boot_server(cloud, group=group)
    other = boot_server(cloud, "h2", group=group)
    move_and_settle(cloud, server, key)
    check_rests(cloud, server, get_state_after(key), "h3")
    if key == "migrate":
        cloud.move(other, "migrate")
        cloud.settle()
        assert read_failure(cloud, other).startswith("No valid host")
        cloud.close(server, "confirmResize")
        cloud.settle()
    cloud.move(other, "migrate")
    cloud.settle()
    check_rests(cloud, other, states.RESIZED, "h1")


@pytest.mark.parametrize("key", MOVES)
def test_move_of_affinity_group_member_fails_unless_group_has_one_server(
    cloud: Cloud, key: str
) -> None:
    group = cloud.group("affinity")
    server = boot_server(cloud, group=group)
    move_and_settle(cloud, server, key)
    host = cloud.show(server).host
    assert host != "h1", "a server alone in its group may move"
    if key == "migrate":
        cloud.close(server, "confirmResize")
        cloud.settle()
    boot_server(cloud, host, group=group)
    cloud.move(server, "migrate")
    cloud.settle()
    assert read_failure(cloud, server).startswith("No valid host")
    check_rests(cloud, server, states.ACTIVE, host)


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_resize_assigns_cpus_of_destination_and_revert_restores_them(
    cloud: Cloud, end: str
) -> None:
    server = boot_server(cloud, flavor=PINNED)
    before = cloud.hosts["h1"].driver.host.guests[server].assignment
    resize_to_bigger(cloud, server)
    cloud.close(server, end)
    cloud.settle()
    host = cloud.show(server).host
    row = cloud.store.read(
        lambda tx: tx.execute(
            sa.select(schema.guests).where(schema.guests.c.server_id == server)
        ).one()
    )
    assert cloud.hosts[host].driver.host.guests[server].assignment == from_wire(
        HardwareAssignment, row.assignment
    )
    assert (
        end == "confirmResize" or cloud.hosts["h1"].driver.host.guests[server].assignment == before
    )
    check_rests(cloud, server, states.ACTIVE, host)


def test_live_migrate_undo_restores_cpu_assignment_at_source() -> None:
    cloud = create_cloud(storage="nfs")
    server = boot_server(cloud, flavor=PINNED)
    before = cloud.hosts["h1"].driver.host.guests[server].assignment
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script["arrived"] = [Fail("Confused.")]
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert cloud.hosts["h1"].driver.host.guests[server].assignment == before is not None


@pytest.mark.parametrize("forced", [False, True])
def test_migrate_to_host_with_pending_removal_makes_no_second_guest(
    cloud: Cloud, forced: bool
) -> None:
    server = boot_server(cloud)
    move_and_settle(cloud, server, "migrate", host="h2")
    cloud.cut.add("h1")
    cloud.close(server, "confirmResize")
    for _ in range(3):
        cloud.round()
    cloud.until_down("h1")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    cloud.lose = lambda kind: kind == "answer"  # Reports arrive, and answers are lost.
    cloud.cut.clear()
    cloud.round()
    cloud.lose = lambda kind: False
    cloud.move(server, "migrate", host="h1", forced=forced)
    cloud.advance()
    cloud.settle()
    assert cloud.show(server).host in ("h2", "h1")
    assert cloud.findings() == []


@pytest.mark.parametrize("key", MOVES)
def test_move_waits_until_ports_are_wired_at_destination(cloud: Cloud, key: str) -> None:
    server = boot_server(cloud)
    cloud.networks.wires_after = 3
    move_and_settle(cloud, server, key)
    host = cloud.show(server).host
    assert host != "h1"
    check_rests(cloud, server, get_state_after(key), host)
    if key == "migrate":
        cloud.close(server, "revertResize")
        cloud.settle()
        check_rests(cloud, server, states.ACTIVE, "h1")


def test_revert_resize_succeeds_after_migrate_with_ports_never_wired(cloud: Cloud) -> None:
    cloud.engine.vif_plugging_timeout = 20
    server = boot_server(cloud)
    cloud.networks.wires_after = 1000
    cloud.move(server, "migrate")
    cloud.settle()
    assert "has not wired port" in read_failure(cloud, server)
    assert cloud.show(server).vm_state == states.RESIZED
    cloud.networks.wires_after = 0
    cloud.close(server, "revertResize")
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")


def test_concurrent_migrates_swap_hosts_of_two_servers(cloud: Cloud) -> None:
    """Each server claims resources of the other server's host while both moves run."""
    first, second = boot_server(cloud), boot_server(cloud, "h2")
    cloud.move(first, "migrate", host="h2")
    cloud.move(second, "migrate", host="h1")
    cloud.settle()
    check_rests(cloud, first, states.RESIZED, "h2")
    check_rests(cloud, second, states.RESIZED, "h1")
    assert set(failures(cloud).values()) == {0}
