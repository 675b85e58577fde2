# SPDX-License-Identifier: Apache-2.0
"""Where moves lead: named and forced hosts, pinned zones, hard groups, parts of hosts, and hosts
that still owe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import HardwareAssignment
from common.domain.wire import from_wire
from common.store import schema
from compute_agent.virt.memory.state.script import Fail
from tests.workflows.moves import clouds, failures, last, resized, server_on, stands
from tests.workflows.scenarios import PINNED, ask
from tests.workflows.simulator import Cloud

MOVES = ("migrate", "os-migrateLive", "evacuate")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


def after_move(key: str) -> str:
    return states.RESIZED if key == "migrate" else states.ACTIVE


def moves(cloud: Cloud, server: str, key: str, **args: object) -> None:
    """The whole of it; a dead host comes back afterwards."""
    if key == "evacuate":
        cloud.kill("h1")
    cloud.move(server, key, **args)
    cloud.settle()
    if key == "evacuate":
        cloud.hosts["h1"].power_on()
        cloud.settle()
        cloud.force_down("h1", False)


def refused(cloud: Cloud, server: str) -> str:
    assert last(cloud, server).state == "failed"
    return str(last(cloud, server).message)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("key", MOVES)
@pytest.mark.parametrize("host", ["h2", "h3"])
def test_a_server_goes_to_the_host_that_is_named(
    cloud: Cloud, key: str, host: str, forced: bool
) -> None:
    server = server_on(cloud)
    moves(cloud, server, key, host=host, forced=forced)
    stands(cloud, server, after_move(key), host)


@pytest.mark.parametrize("forced", [False, True])
def test_when_the_named_host_cannot_no_other_is_tried(cloud: Cloud, forced: bool) -> None:
    server = server_on(cloud)
    cloud.hosts["h2"].driver.host.script["receive"] = [Fail("Disk full.", retryable=True)]
    moves(cloud, server, "migrate", host="h2", forced=forced)
    assert refused(cloud, server).endswith("Disk full.")
    stands(cloud, server, states.ACTIVE, "h1")


def test_the_host_where_it_is_is_no_destination(cloud: Cloud) -> None:
    server = server_on(cloud)
    moves(cloud, server, "migrate", host="h1", forced=True)
    assert refused(cloud, server).startswith("No valid host")
    stands(cloud, server, states.ACTIVE, "h1")


def test_a_server_that_is_pinned_to_a_zone_stays_in_it(cloud: Cloud) -> None:
    server = server_on(cloud)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).values(pinned_availability_zone="elsewhere")
        )
    )
    for key in ("migrate", "os-migrateLive"):
        moves(cloud, server, key)
        assert refused(cloud, server).startswith("No valid host")
        stands(cloud, server, states.ACTIVE, "h1")


@pytest.mark.parametrize("key", MOVES)
def test_a_hard_anti_affinity_group_is_kept_while_its_servers_are_in_two_places(
    cloud: Cloud, key: str
) -> None:
    group = cloud.group("anti-affinity")
    server = server_on(cloud, group=group)
    other = server_on(cloud, "h2", group=group)
    moves(cloud, server, key)
    stands(cloud, server, after_move(key), "h3")
    if key == "migrate":
        cloud.move(other, "migrate")
        cloud.settle()
        assert refused(cloud, other).startswith("No valid host")
        cloud.close(server, "confirmResize")
        cloud.settle()
    cloud.move(other, "migrate")
    cloud.settle()
    stands(cloud, other, states.RESIZED, "h1")


@pytest.mark.parametrize("key", MOVES)
def test_a_hard_affinity_group_holds_its_servers_together(cloud: Cloud, key: str) -> None:
    group = cloud.group("affinity")
    server = server_on(cloud, group=group)
    moves(cloud, server, key)
    host = cloud.show(server).host
    assert host != "h1", "alone it may go"
    if key == "migrate":
        cloud.close(server, "confirmResize")
        cloud.settle()
    server_on(cloud, host, group=group)
    cloud.move(server, "migrate")
    cloud.settle()
    assert refused(cloud, server).startswith("No valid host")
    stands(cloud, server, states.ACTIVE, host)


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_cpus_of_its_own_are_those_of_the_host_where_it_is(cloud: Cloud, end: str) -> None:
    server = server_on(cloud, flavor=PINNED)
    was = cloud.hosts["h1"].driver.host.guests[server].assignment
    resized(cloud, server)
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
    assert end == "confirmResize" or cloud.hosts["h1"].driver.host.guests[server].assignment == was
    stands(cloud, server, states.ACTIVE, host)


def test_a_server_that_comes_back_from_nowhere_has_its_own_cpus_again() -> None:
    cloud = clouds(storage="nfs")
    server = server_on(cloud, flavor=PINNED)
    was = cloud.hosts["h1"].driver.host.guests[server].assignment
    for host in ("h2", "h3"):
        cloud.hosts[host].driver.host.script["arrived"] = [Fail("Confused.")]
    ask(cloud, server, "os-migrateLive")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert cloud.hosts["h1"].driver.host.guests[server].assignment == was is not None


@pytest.mark.parametrize("forced", [False, True])
def test_a_host_that_owes_an_older_guest_of_it_gets_no_second_one(
    cloud: Cloud, forced: bool
) -> None:
    server = server_on(cloud)
    moves(cloud, server, "migrate", host="h2")
    cloud.cut.add("h1")
    cloud.close(server, "confirmResize")
    for _ in range(3):
        cloud.round()
    cloud.until_down("h1")
    cloud.settle()
    assert (cloud.show(server).vm_state, cloud.show(server).host) == (states.ACTIVE, "h2")
    cloud.lose = lambda kind: kind == "answer"  # it is heard, and hears nothing
    cloud.cut.clear()
    cloud.round()
    cloud.lose = lambda kind: False
    cloud.move(server, "migrate", host="h1", forced=forced)
    cloud.advance()
    cloud.settle()
    assert cloud.show(server).host in ("h2", "h1")
    assert cloud.findings() == []


@pytest.mark.parametrize("key", MOVES)
def test_a_guest_waits_where_it_comes_until_its_ports_are_wired(cloud: Cloud, key: str) -> None:
    server = server_on(cloud)
    cloud.networks.wires_after = 3
    moves(cloud, server, key)
    host = cloud.show(server).host
    assert host != "h1"
    stands(cloud, server, after_move(key), host)
    if key == "migrate":
        cloud.close(server, "revertResize")
        cloud.settle()
        stands(cloud, server, states.ACTIVE, "h1")


def test_one_whose_ports_are_never_wired_where_it_was_resized_can_be_reverted(cloud: Cloud) -> None:
    cloud.engine.vif_plugging_timeout = 20
    server = server_on(cloud)
    cloud.networks.wires_after = 1000
    cloud.move(server, "migrate")
    cloud.settle()
    assert "has not wired port" in refused(cloud, server)
    assert cloud.show(server).vm_state == states.RESIZED
    cloud.networks.wires_after = 0
    cloud.close(server, "revertResize")
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")


def test_two_servers_change_places(cloud: Cloud) -> None:
    """Each claim locks what the other leaves."""
    one, two = server_on(cloud), server_on(cloud, "h2")
    cloud.move(one, "migrate", host="h2")
    cloud.move(two, "migrate", host="h1")
    cloud.settle()
    stands(cloud, one, states.RESIZED, "h2")
    stands(cloud, two, states.RESIZED, "h1")
    assert set(failures(cloud).values()) == {0}
