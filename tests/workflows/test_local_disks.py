# SPDX-License-Identifier: Apache-2.0
"""Tests of ephemeral disks and swap in moves, rebuild, unshelve and evacuation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.domain import states
from common.domain.models import Flavor
from compute_agent.virt.memory.state.script import Fail
from tests.workflows import simulator
from tests.workflows.moves import (
    before,
    boot_server,
    check_rests,
    create_cloud,
    has_shared_storage,
    last,
)
from tests.workflows.scenarios import KILL, ask
from tests.workflows.simulator import Cloud

FLAVOR = replace(simulator.FLAVOR, ephemeral_gb=1, swap_mb=64)
LARGER = Flavor("2", "m1.larger", 2, 256, 2, ephemeral_gb=2, swap_mb=96)
SIZES, LARGER_SIZES = {"ephemeral0": 1024, "swap": 64}, {"ephemeral0": 2048, "swap": 96}
BOTH = {"ephemeral0", "swap"}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = create_cloud()
    yield cloud
    cloud.store.close()


def boot_server_with_disks(cloud: Cloud, flavor: Flavor = FLAVOR, **options: Any) -> str:
    """Create a server on h1 with a file on each local disk, and return the id of the server."""
    server = boot_server(cloud, flavor=flavor, **options)
    for name in read_sizes(cloud, server):
        cloud.hosts["h1"].driver.host.write_file(server, "canary", "alive", name)
    return server


def read_local_disks(cloud: Cloud, server: str) -> dict[str, dict[str, Any]]:
    return cloud.hosts[cloud.show(server).host].driver.host.guests[server].local


def read_sizes(cloud: Cloud, server: str) -> dict[str, int]:
    return {name: disk["size_mb"] for name, disk in read_local_disks(cloud, server).items()}


def read_kept_disks(cloud: Cloud, server: str) -> set[str]:
    """Return the names of the local disks that still contain the file."""
    return {
        name
        for name, disk in read_local_disks(cloud, server).items()
        if disk["files"] == {"canary": "alive"}
    }


def resize(cloud: Cloud, server: str, flavor: Flavor = LARGER) -> None:
    cloud.move(server, "resize", flavor)
    cloud.settle()
    assert cloud.show(server).vm_state == states.RESIZED, last(cloud, server).message


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_resize_and_revert_keep_files_and_change_size_of_ephemeral_disk(
    either: Cloud, end: str
) -> None:
    server = boot_server_with_disks(either)
    resize(either, server)
    assert (read_sizes(either, server), read_kept_disks(either, server)) == (
        LARGER_SIZES,
        {"ephemeral0"},
    )
    either.close(server, end)
    either.settle()
    reverted = end == "revertResize"
    check_rests(
        either, server, states.ACTIVE, "h1" if reverted else either.migration(server).dest_host
    )
    assert read_sizes(either, server) == (SIZES if reverted else LARGER_SIZES)
    assert "ephemeral0" in read_kept_disks(either, server)


@pytest.mark.parametrize("end", ["confirmResize", "revertResize"])
def test_resize_on_same_host_keeps_ephemeral_disk(end: str) -> None:
    cloud = create_cloud(hosts=1)
    cloud.engine.allow_resize_to_same_host = cloud.options["allow_resize_to_same_host"] = True
    server = boot_server_with_disks(cloud)
    resize(cloud, server)
    assert (read_sizes(cloud, server), read_kept_disks(cloud, server)) == (
        LARGER_SIZES,
        {"ephemeral0"},
    )
    cloud.close(server, end)
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (read_sizes(cloud, server), read_kept_disks(cloud, server)) == (
        SIZES if end == "revertResize" else LARGER_SIZES,
        {"ephemeral0"},
    )
    cloud.store.close()


def test_resize_adds_ephemeral_disk_and_swap_or_removes_swap_by_flavor(cloud: Cloud) -> None:
    server = boot_server_with_disks(cloud, simulator.FLAVOR)
    assert read_sizes(cloud, server) == {}
    resize(cloud, server)
    assert read_sizes(cloud, server) == LARGER_SIZES
    cloud.close(server, "confirmResize")
    cloud.settle()
    resize(cloud, server, replace(LARGER, id="3", swap_mb=0))
    assert read_sizes(cloud, server) == {"ephemeral0": 2048}


def test_resize_keeps_ephemeral_and_swap_sizes_requested_at_create(cloud: Cloud) -> None:
    disks = {"ephemeral": [{"gb": 1, "format": "xfs"}], "swap_mb": 16}
    server = boot_server_with_disks(cloud, replace(FLAVOR, ephemeral_gb=2), disks=disks)
    assert read_sizes(cloud, server) == {"ephemeral0": 1024, "swap": 16}
    assert read_local_disks(cloud, server)["ephemeral0"]["format"] == "xfs"
    resize(cloud, server)
    assert read_sizes(cloud, server) == {"ephemeral0": 1024, "swap": 16}


def test_resize_failure_leaves_local_disks_unchanged(cloud: Cloud) -> None:
    server = boot_server_with_disks(cloud)
    before(
        cloud,
        "install",
        lambda host: cloud.hosts[host].driver.host.script.update(install=[Fail("No.")]),
    )
    cloud.move(server, "resize", LARGER)
    cloud.settle()
    check_rests(cloud, server, states.ACTIVE, "h1")
    assert (read_sizes(cloud, server), read_kept_disks(cloud, server)) == (SIZES, BOTH)


def test_migrate_keeps_ephemeral_disk_and_on_shared_storage_also_swap(either: Cloud) -> None:
    server = boot_server_with_disks(either)
    ask(either, server, "migrate")
    either.settle()
    assert either.show(server).vm_state == states.RESIZED
    assert read_sizes(either, server) == SIZES
    assert read_kept_disks(either, server) == (
        BOTH if has_shared_storage(either) else {"ephemeral0"}
    )


def test_live_migrate_keeps_content_of_ephemeral_disk_and_swap(either: Cloud) -> None:
    server = boot_server_with_disks(either)
    ask(either, server, "os-migrateLive")
    either.settle()
    check_rests(either, server, states.ACTIVE, either.migration(server).dest_host)
    assert (read_sizes(either, server), read_kept_disks(either, server)) == (SIZES, BOTH)


def test_evacuate_keeps_local_disks_on_shared_storage_only(either: Cloud) -> None:
    server = boot_server_with_disks(either)
    ask(either, server, KILL)
    ask(either, server, "evacuate")
    either.settle()
    assert either.show(server).host != "h1"
    assert read_sizes(either, server) == SIZES
    assert read_kept_disks(either, server) == (BOTH if has_shared_storage(either) else set())


def test_unshelve_creates_new_local_disks(cloud: Cloud) -> None:
    server = boot_server_with_disks(cloud)
    for key in ("shelve", "shelveOffload", "unshelve"):
        ask(cloud, server, key)
        cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE, last(cloud, server).message
    assert (read_sizes(cloud, server), read_kept_disks(cloud, server)) == (SIZES, set())


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "new"])
def test_rebuild_keeps_ephemeral_disks_only_when_requested(cloud: Cloud, keeps: bool) -> None:
    server = boot_server_with_disks(cloud)
    cloud.ask(server, "rebuild", args={"preserve_ephemeral": keeps})
    cloud.settle()
    assert cloud.show(server).vm_state == states.ACTIVE, last(cloud, server).message
    assert (read_sizes(cloud, server), read_kept_disks(cloud, server)) == (
        SIZES,
        {"ephemeral0"} if keeps else set(),
    )
