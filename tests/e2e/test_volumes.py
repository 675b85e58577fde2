# SPDX-License-Identifier: Apache-2.0
"""Volumes with the ``openstack`` command, in a cloud with the embedded volume service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from keystoneauth1.exceptions import ConnectFailure

from deploy.one_machine.cloud import lifecycle, process_control
from tests.e2e.conftest import without_guests
from tests.e2e.live import Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("guests")
JSON, ADMIN = " -f json", "kilonova-admin"


@pytest.fixture(scope="module")
def volume_cloud() -> Iterator[Live]:
    with without_guests(hosts=("one",), volumes=True) as live:
        yield live


def await_volume(live: Live, volume: str, status: str) -> None:
    """Wait until the volume has the status, also while the service restarts."""
    storage = live.seed.demo.block_storage

    def has_status() -> bool:
        with contextlib.suppress(ConnectFailure):
            return bool(storage.get_volume(volume).status == status)
        return False

    await_true(has_status, 60, f"{volume} {status}")


def run_for_json(live: Live, command: str, cloud: str = "kilonova") -> Any:
    [result] = live.openstack(command + JSON, cloud=cloud)
    return result


def test_openstack_volume_create_snapshot_resize_and_delete(volume_cloud: Live) -> None:
    live = volume_cloud
    key = run_for_json(live, "volume create --size 1 --property a=b data")["id"]
    await_volume(live, key, "available")
    image = live.image("empty")
    boot_volume = run_for_json(live, f"volume create --size 1 --image {image} boot")["id"]
    await_volume(live, boot_volume, "available")
    snapshot = run_for_json(live, "volume snapshot create --volume data kept")["id"]
    storage = live.seed.demo.block_storage
    await_true(lambda: storage.get_snapshot(snapshot).status == "available", 60, "the snapshot")
    live.openstack("volume set --size 2 data")
    await_volume(live, key, "available")
    listed, shown, boot = live.openstack(
        "volume list" + JSON, "volume show data" + JSON, "volume show boot" + JSON
    )
    assert {row["Name"]: row["Size"] for row in listed} == {"data": 2, "boot": 1}
    assert (shown["properties"], shown["size"], boot["bootable"]) == ({"a": "b"}, 2, True)
    live.openstack("volume delete boot")
    live.openstack("volume snapshot delete kept")
    await_true(lambda: not list(storage.snapshots()), 60, "no snapshot")
    live.openstack("volume delete data")
    await_true(lambda: not list(storage.volumes()), 60, "no volume")
    folder = live.home / "volume/volumes"
    await_true(lambda: not list(folder.iterdir()), 60, "no file")


def test_catalog_has_volume_service_under_three_types(volume_cloud: Live) -> None:
    session = volume_cloud.seed.demo.session
    for kind in ("block-storage", "volumev3", "volume"):
        assert session.get_endpoint(service_type=kind) == volume_cloud.cloud.volume_url


def test_volume_service_keeps_volumes_after_kill(volume_cloud: Live) -> None:
    live = volume_cloud
    key = run_for_json(live, "volume create --size 1 kept")["id"]
    process_control.kill(live.cloud, "volume")
    lifecycle.await_http(live.cloud, "volume", live.cloud.volume_url)
    await_volume(live, key, "available")
    live.openstack("volume delete kept")
