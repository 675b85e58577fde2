# SPDX-License-Identifier: Apache-2.0
"""Volumes that a host connects for guests, with a connector that records calls.

Invariant: each connected volume is in a guest's file, is still the same device, and is disconnected
when the guest no longer needs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.domain.models import AttachedVolume
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.volumes.connector import Found, Secrets
from compute_agent.virt.libvirt.volumes.connectors import Connectors
from compute_agent.virt.libvirt.volumes.volumes import GuestVolumes
from compute_agent.virt.libvirt.xml.volume_xml import VolumeSource
from compute_agent.virt.volumes import VolumeLink

VOLUME, OTHER_VOLUME = (f"5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e9{n}" for n in range(2))
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)


class Device:
    """A connector that records connected volumes instead of calling a kernel."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self.serial, self.stuck = "6001", False

    def source(self, volume: AttachedVolume, link: VolumeLink) -> VolumeSource:
        return VolumeSource("block", f"/dev/{volume.volume_id}")

    def connect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> Found:
        self.connected.append(volume.volume_id)
        return Found(1 << 30, self.serial)

    def disconnect(self, volume: AttachedVolume, link: VolumeLink, secrets: Secrets) -> None:
        if self.stuck:
            raise VerbFailed("It is busy.")
        self.connected = [key for key in self.connected if key != volume.volume_id]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def guests(tmp_path: Path, device: Device) -> GuestVolumes:
    for name in ("s1", "s2"):
        (tmp_path / name).mkdir()
    return GuestVolumes(tmp_path, Connectors({"nbd": device}))


def volume(key: str = VOLUME, at: str = "a", **changed: bool) -> AttachedVolume:
    connection = {"driver_volume_type": "nbd", "data": {"at": at}, "attachment_id": "x"}
    return replace(AttachedVolume(key, "/dev/vdb", 1, connection), **changed)


def test_keep_volumes_disconnects_volumes_removed_from_guest(
    guests: GuestVolumes, device: Device
) -> None:
    guests.keep("s1", [volume(), volume(OTHER_VOLUME)])
    guests.connect("s1", QUIET)
    assert set(device.connected) == {VOLUME, OTHER_VOLUME}
    other_attachment = replace(volume(), connection={**volume().connection, "attachment_id": "y"})
    guests.keep("s1", [other_attachment])
    assert (device.connected, guests.of("s1")) == ([VOLUME], [other_attachment])
    guests.keep("s1", [volume(at="b")])
    assert device.connected == []
    guests.keep("s1", [])
    assert not guests.file("s1").exists()


def test_keep_volumes_leaves_volume_in_file_when_disconnect_fails(
    guests: GuestVolumes, device: Device
) -> None:
    guests.keep("s1", [volume()])
    guests.connect("s1", QUIET)
    device.stuck = True
    with pytest.raises(VerbFailed, match="busy"):
        guests.keep("s1", [])
    assert guests.of("s1") == [volume()]
    device.stuck = False
    guests.keep("s1", [])
    assert (guests.of("s1"), device.connected) == ([], [])


def test_multiattach_volume_stays_connected_for_second_guest(
    guests: GuestVolumes, device: Device
) -> None:
    for name in ("s1", "s2"):
        guests.keep(name, [volume(multiattach=True)])
        guests.connect(name, QUIET)
    guests.keep("s1", [])
    assert device.connected == [VOLUME, VOLUME]
    guests.keep("s2", [])
    assert device.connected == []


def test_connect_volume_again_refuses_device_with_another_serial(
    guests: GuestVolumes, device: Device
) -> None:
    guests.keep("s1", [volume()])
    guests.connect("s1", QUIET)
    guests.keep("s1", [volume()])
    device.serial = "6002"
    with pytest.raises(VerbFailed, match="is another device than before") as refused:
        guests.connect("s1", QUIET)
    assert "6002" in refused.value.details and "6001" in refused.value.details
    device.serial = "6001"
    guests.connect("s1", QUIET)
    device.serial = "6002"
    guests.keep("s1", [volume(at="b")])  # the volume was moved to another device
    guests.connect("s1", QUIET)
    device.serial = ""
    guests.connect("s1", QUIET)
