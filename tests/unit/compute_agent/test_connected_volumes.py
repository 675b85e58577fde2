# SPDX-License-Identifier: Apache-2.0
"""What a host has connected for its guests: nothing that no file names, nothing that is another
device than it was, and nothing longer than a guest needs it."""

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

ONE, TWO = (f"5c2d3f64-1f3b-4a4e-9d3c-0b1f6a7d8e9{n}" for n in range(2))
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)


class Device:
    """A protocol whose devices are connected, as a kernel has them."""

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
        self.connected = [one for one in self.connected if one != volume.volume_id]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def guests(tmp_path: Path, device: Device) -> GuestVolumes:
    for name in ("s1", "s2"):
        (tmp_path / name).mkdir()
    return GuestVolumes(tmp_path, Connectors({"nbd": device}))


def volume(key: str = ONE, at: str = "a", **changed: bool) -> AttachedVolume:
    connection = {"driver_volume_type": "nbd", "data": {"at": at}, "attachment_id": "x"}
    return replace(AttachedVolume(key, "/dev/vdb", 1, connection), **changed)


def test_what_a_guest_has_no_more_is_let_go(guests: GuestVolumes, device: Device) -> None:
    guests.keep("s1", [volume(), volume(TWO)])
    guests.connect("s1", QUIET)
    assert set(device.connected) == {ONE, TWO}
    again = replace(volume(), connection={**volume().connection, "attachment_id": "y"})
    guests.keep("s1", [again])
    assert (device.connected, guests.of("s1")) == ([ONE], [again])
    guests.keep("s1", [volume(at="b")])
    assert device.connected == []
    guests.keep("s1", [])
    assert not guests.file("s1").exists()


def test_what_is_not_let_go_stays_in_the_file(guests: GuestVolumes, device: Device) -> None:
    guests.keep("s1", [volume()])
    guests.connect("s1", QUIET)
    device.stuck = True
    with pytest.raises(VerbFailed, match="busy"):
        guests.keep("s1", [])
    assert guests.of("s1") == [volume()]
    device.stuck = False
    guests.keep("s1", [])
    assert (guests.of("s1"), device.connected) == ([], [])


def test_a_volume_of_two_guests_stays_for_the_second(guests: GuestVolumes, device: Device) -> None:
    for name in ("s1", "s2"):
        guests.keep(name, [volume(multiattach=True)])
        guests.connect(name, QUIET)
    guests.keep("s1", [])
    assert device.connected == [ONE, ONE]
    guests.keep("s2", [])
    assert device.connected == []


def test_another_device_is_not_taken(guests: GuestVolumes, device: Device) -> None:
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
    guests.keep("s1", [volume(at="b")])  # it was moved to another device, and is reached there
    guests.connect("s1", QUIET)
    device.serial = ""
    guests.connect("s1", QUIET)
