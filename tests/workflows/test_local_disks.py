# SPDX-License-Identifier: Apache-2.0
"""What becomes of a server's ephemeral disks and swap in the workflows that make its guest anew or
move it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.domain import states
from common.domain.models import Flavor
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import simulator
from tests.workflows.moves import before, clouds, last, server_on, shares, stands
from tests.workflows.scenarios import KILL, ask
from tests.workflows.simulator import Cloud

FLAVOR = replace(simulator.FLAVOR, ephemeral_gb=1, swap_mb=64)
LARGER = Flavor("2", "m1.larger", 2, 256, 2, ephemeral_gb=2, swap_mb=96)
SIZES, LARGER_SIZES = {"ephemeral0": 1024, "swap": 64}, {"ephemeral0": 2048, "swap": 96}
BOTH = {"ephemeral0", "swap"}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = clouds()
    yield cloud
    cloud.store.close()


def server_with_disks(cloud: Cloud, flavor: Flavor = FLAVOR, **wishes: Any) -> str:
    """A server that has written a file on each of its disks."""
    server = server_on(cloud, flavor=flavor, **wishes)
    for name in sizes(cloud, server):
        cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive", name)
    return server


def local(cloud: Cloud, server: str) -> dict[str, dict[str, Any]]:
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].local


def sizes(cloud: Cloud, server: str) -> dict[str, int]:
    return {name: disk["size_mb"] for name, disk in local(cloud, server).items()}


def kept(cloud: Cloud, server: str) -> set[str]:
    """The disks that have what was written."""
    return {
        name for name, disk in local(cloud, server).items() if disk["files"] == {"canary": "alive"}
    }


def resize(cloud: Cloud, server: str, flavor: Flavor = LARGER) -> None:
    cloud.move(server, "resize", flavor)
    cloud.settle()
    assert cloud.show(server).vm_state == states.RESIZED, last(cloud, server).message


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_resize_takes_ephemeral_disks_along_and_back(either: Cloud, end: str) -> None:
    server = server_with_disks(either)
    resize(either, server)
    assert (sizes(either, server), kept(either, server)) == (LARGER_SIZES, {"ephemeral0"})
    either.close(server, end)
    either.settle()
    reverted = end == "revertResize"
    stands(either, server, states.ACTIVE, "h1" if reverted else either.migration(server).dest_host)
    assert sizes(either, server) == (SIZES if reverted else LARGER_SIZES)
    assert "ephemeral0" in kept(either, server)


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_resize_here_keeps_them_aside(end: str) -> None:
    cloud = clouds(hosts=1)
    cloud.engine.allow_resize_to_same_host = cloud.options["allow_resize_to_same_host"] = True
    server = server_with_disks(cloud)
    resize(cloud, server)
    assert (sizes(cloud, server), kept(cloud, server)) == (LARGER_SIZES, {"ephemeral0"})
    cloud.close(server, end)
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert (sizes(cloud, server), kept(cloud, server)) == (
        SIZES if end == "revertResize" else LARGER_SIZES,
        {"ephemeral0"},
    )
    cloud.store.close()


def test_resize_adds_disks_and_takes_swap_away(cloud: Cloud) -> None:
    server = server_with_disks(cloud, simulator.FLAVOR)
    assert sizes(cloud, server) == {}
    resize(cloud, server)
    assert sizes(cloud, server) == LARGER_SIZES
    cloud.close(server, "confirmResize")
    cloud.settle()
    resize(cloud, server, replace(LARGER, id="3", swap_mb=0))
    assert sizes(cloud, server) == {"ephemeral0": 2048}


def test_resize_keeps_the_sizes_that_were_asked_for(cloud: Cloud) -> None:
    asked = {"ephemeral": [{"gb": 1, "format": "xfs"}], "swap_mb": 16}
    server = server_with_disks(cloud, replace(FLAVOR, ephemeral_gb=2), disks=asked)
    assert sizes(cloud, server) == {"ephemeral0": 1024, "swap": 16}
    assert local(cloud, server)["ephemeral0"]["format"] == "xfs"
    resize(cloud, server)
    assert sizes(cloud, server) == {"ephemeral0": 1024, "swap": 16}


def test_resize_that_fails_leaves_them_as_they_were(cloud: Cloud) -> None:
    server = server_with_disks(cloud)
    before(
        cloud,
        "install",
        lambda host: cloud.hosts[host].driver.host.script.update(install=[Fail("No.")]),
    )
    cloud.move(server, "resize", LARGER)
    cloud.settle()
    stands(cloud, server, states.ACTIVE, "h1")
    assert (sizes(cloud, server), kept(cloud, server)) == (SIZES, BOTH)


def test_cold_migration_leaves_only_swap_behind(either: Cloud) -> None:
    server = server_with_disks(either)
    ask(either, server, "migrate")
    either.settle()
    assert either.show(server).vm_state == states.RESIZED
    assert sizes(either, server) == SIZES
    assert kept(either, server) == (BOTH if shares(either) else {"ephemeral0"})


def test_live_migration_takes_all_along(either: Cloud) -> None:
    server = server_with_disks(either)
    ask(either, server, "os-migrateLive")
    either.settle()
    stands(either, server, states.ACTIVE, either.migration(server).dest_host)
    assert (sizes(either, server), kept(either, server)) == (SIZES, BOTH)


def test_evacuation_finds_them_on_shared_storage_only(either: Cloud) -> None:
    server = server_with_disks(either)
    ask(either, server, KILL)
    ask(either, server, "evacuate")
    either.settle()
    assert either.show(server).host != "h1"
    assert sizes(either, server) == SIZES
    assert kept(either, server) == (BOTH if shares(either) else set())


def test_unshelved_server_has_new_ones(cloud: Cloud) -> None:
    server = server_with_disks(cloud)
    for wanted in ("shelve", "shelveOffload", "unshelve"):
        ask(cloud, server, wanted)
        cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE, last(cloud, server).message
    assert (sizes(cloud, server), kept(cloud, server)) == (SIZES, set())


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "new"])
def test_rebuild_keeps_ephemeral_disks_when_asked_to(cloud: Cloud, keeps: bool) -> None:
    server = server_with_disks(cloud)
    cloud.ask(server, "rebuild", args={"preserve_ephemeral": keeps})
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE, last(cloud, server).message
    assert (sizes(cloud, server), kept(cloud, server)) == (
        SIZES,
        {"ephemeral0"} if keeps else set(),
    )
