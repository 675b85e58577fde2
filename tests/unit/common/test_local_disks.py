# SPDX-License-Identifier: Apache-2.0
"""Ephemeral and swap disks of a server: sizes, file systems and device names."""

from __future__ import annotations

import pytest

from common.domain.json_types import JsonObject
from common.domain.local_disks import devices, ephemeral_gb, format_of, of
from common.domain.models import Flavor, LocalDisk


def flavor(ephemeral_gb: int = 0, swap_mb: int = 0) -> Flavor:
    return Flavor("1", "m1", 1, 128, 1, ephemeral_gb, swap_mb)


def swap(mebibytes: int) -> LocalDisk:
    return LocalDisk("swap", mebibytes, "swap")


@pytest.mark.parametrize(
    ("current_flavor", "requested", "disks"),
    [
        (flavor(), None, []),
        (flavor(3), None, [LocalDisk("ephemeral0", 3072)]),
        (flavor(0, 64), None, [swap(64)]),
        (flavor(3, 64), None, [LocalDisk("ephemeral0", 3072), swap(64)]),
        (flavor(3, 64), {"swap_mb": 16}, [LocalDisk("ephemeral0", 3072), swap(16)]),
        (
            flavor(3, 64),
            {"ephemeral": [{"gb": 1, "format": "xfs"}, {"gb": 2}]},
            [LocalDisk("ephemeral0", 1024, "xfs"), LocalDisk("ephemeral1", 2048), swap(64)],
        ),
        (
            flavor(3),
            {"ephemeral": [{"gb": 0, "format": "ext3"}]},
            [LocalDisk("ephemeral0", 3072, "ext3")],
        ),
        # The flavor has changed since the request.
        (
            flavor(5, 8),
            {"ephemeral": [{"gb": 1}], "swap_mb": 16},
            [LocalDisk("ephemeral0", 1024), swap(8)],
        ),
        (flavor(5, 0), {"ephemeral": [{"gb": 0}], "swap_mb": 16}, [LocalDisk("ephemeral0", 5120)]),
    ],
)
def test_requested_sizes_of_local_disks_override_flavor_but_swap_is_capped(
    current_flavor: Flavor, requested: JsonObject | None, disks: list[LocalDisk]
) -> None:
    assert of(current_flavor, requested) == disks


@pytest.mark.parametrize(
    ("requested", "size"),
    [
        (None, 3),
        ({"swap_mb": 1}, 3),
        ({"ephemeral": [{"gb": 1}]}, 1),
        ({"ephemeral": [{"gb": 0}]}, 3),
    ],
)
def test_ephemeral_gb_is_size_of_flavor_when_no_or_zero_size_is_requested(
    requested: JsonObject | None, size: int
) -> None:
    assert ephemeral_gb(flavor(3, 64), requested) == size


@pytest.mark.parametrize(
    ("requested", "os_type", "default", "kind"),
    [
        ("", "linux", "", "ext4"),
        ("", "Linux", "", "ext4"),
        ("", "windows", "", "ntfs"),
        ("", "", "", "vfat"),
        ("", "beos", "", "vfat"),
        ("", "windows", "xfs", "xfs"),
        ("ext2", "windows", "xfs", "ext2"),
    ],
)
def test_format_of_local_disk_follows_request_then_default_then_os_type(
    requested: str, os_type: str, default: str, kind: str
) -> None:
    assert format_of(LocalDisk("ephemeral0", 1, requested), os_type, default) == kind


def test_device_names_of_local_disks_follow_the_root_disk() -> None:
    assert devices(of(flavor(3, 64), None), "/dev/sda", "scsi") == {
        "ephemeral0": "/dev/sdb",
        "swap": "/dev/sdc",
    }
