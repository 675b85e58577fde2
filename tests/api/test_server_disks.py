# SPDX-License-Identifier: Apache-2.0
"""Ephemeral disks and swap in creates and resizes: the stored disks, and errors by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.domain.models import Flavor
from common.store import schema
from tests.api.conftest import IMAGE, Cloud
from tests.api.moves import KEY, act, add_host2_and_large_flavor

BOOT: dict[str, Any] = {
    "uuid": IMAGE,
    "boot_index": 0,
    "source_type": "image",
    "destination_type": "local",
}
#: A local disk as clients request it.
BLANK: dict[str, Any] = {
    "boot_index": -1,
    "source_type": "blank",
    "destination_type": "local",
    "delete_on_termination": True,
}
SWAP = {**BLANK, "guest_format": "swap"}
FIELD = "block_device_mapping_v2"


def add_flavors(cloud: Cloud) -> None:
    """Add flavors with ephemeral disks, with swap, with both and with neither."""
    add_host2_and_large_flavor(cloud)
    for name, ephemeral_gb, swap_mb in (
        ("both", 10, 512),
        ("more", 20, 1024),
        ("eph", 10, 0),
        ("swap", 0, 512),
        ("bare", 0, 0),
        ("less", 9, 512),
    ):
        cloud.add_flavor(
            Flavor(name, f"m1.{name}", 1, 512, 1, ephemeral_gb=ephemeral_gb, swap_mb=swap_mb)
        )


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with these flavors."""
    return make_cloud(add_flavors, secret_key=KEY)


def post_server(cloud: Cloud, flavor: str, *mappings: dict[str, Any], mv: str = "2.1") -> Any:
    body: dict[str, Any] = {"name": "vm", "imageRef": IMAGE, "flavorRef": flavor}
    if mv != "2.1":
        body["networks"] = "none"
    return cloud.call(
        "POST", "/servers", {"server": body | ({FIELD: list(mappings)} if mappings else {})}, mv=mv
    )


def read_refusal(cloud: Cloud, flavor: str, *mappings: dict[str, Any], mv: str = "2.1") -> str:
    answer = post_server(cloud, flavor, *mappings, mv=mv)
    assert answer.status_code == 400, answer.text
    assert cloud.rows(schema.servers) == []
    return str(answer.json["badRequest"]["message"])


@pytest.mark.parametrize(
    ("flavor", "disk_gb"), [("both", 12), ("eph", 11), ("swap", 2), ("bare", 1)]
)
def test_create_server_without_disks_in_request_counts_disk_size_of_flavor(
    cloud: Cloud, flavor: str, disk_gb: int
) -> None:
    assert (
        post_server(cloud, flavor).status_code
        == post_server(cloud, flavor, BOOT).status_code
        == 202
    )
    assert [(row.disks, row.disk_gb) for row in cloud.rows(schema.servers)] == [(None, disk_gb)] * 2


@pytest.mark.parametrize(
    ("flavor", "mappings", "disks"),
    [
        ("both", [{**BLANK, "volume_size": 4}], {"ephemeral": [{"gb": 4, "format": ""}]}),
        ("both", [{**SWAP, "volume_size": "128"}], {"swap_mb": 128}),
        ("both", [SWAP], {"swap_mb": 512}),
        ("both", [{**BLANK, "guest_format": "xfs"}], {"ephemeral": [{"gb": 0, "format": "xfs"}]}),
        (
            "eph",
            [
                {**BLANK, "volume_size": 4, "boot_index": None},
                {**BLANK, "volume_size": 6, "guest_format": "ext3"},
            ],
            {"ephemeral": [{"gb": 4, "format": ""}, {"gb": 6, "format": "ext3"}]},
        ),
        (
            "both",
            [
                {**BLANK, "volume_size": 10, "device_type": "disk", "device_name": "/dev/vdb"},
                {**SWAP, "volume_size": 512},
            ],
            {"ephemeral": [{"gb": 10, "format": ""}], "swap_mb": 512},
        ),
    ],
)
def test_create_server_stores_local_disks_of_request(
    cloud: Cloud, flavor: str, mappings: list[dict[str, Any]], disks: Any
) -> None:
    assert post_server(cloud, flavor, BOOT, *mappings).status_code == 202
    assert post_server(cloud, flavor, *mappings, BOOT, mv="2.100").status_code == 202
    assert [row.disks for row in cloud.rows(schema.servers)] == [disks, disks]


@pytest.mark.parametrize(
    ("flavor", "mappings", "text"),
    [
        (
            "both",
            [{**BLANK, "volume_size": 11}],
            ".volume_size: flavor m1.both has 10 GiB for ephemeral disks, and 11 ",
        ),
        (
            "both",
            [{**BLANK, "volume_size": 5}, {**BLANK, "volume_size": 6}],
            ".volume_size: flavor m1.both has 10 GiB",
        ),
        (
            "eph",
            [{**BLANK, "volume_size": 1}, BLANK],
            ".volume_size: flavor m1.eph has 10 GiB for ephemeral disks, and 11",
        ),
        ("bare", [BLANK], ".volume_size: flavor m1.bare has 0 GiB for ephemeral disks, and some"),
        (
            "both",
            [{**SWAP, "volume_size": 513}],
            ".volume_size: flavor m1.both has 512 MiB of swap, and 513 ",
        ),
        ("eph", [SWAP], ".volume_size: flavor m1.eph has 0 MiB of swap, and some"),
        (
            "both",
            [{**SWAP, "volume_size": 1}, {**SWAP, "volume_size": 1}],
            ".guest_format: a server can have one swap",
        ),
        (
            "both",
            [{**BLANK, "guest_format": "zfs"}],
            ".guest_format: 'zfs' is not one of swap, ext2, ext3, ext4, xfs, ",
        ),
        ("both", [{**BLANK, "uuid": IMAGE}], ".uuid: a disk of source_type blank has no source"),
        (
            "both",
            [{**BLANK, "disk_bus": "ide"}],
            ".disk_bus: not allowed for a disk of source_type blank",
        ),
        (
            "both",
            [{**BLANK, "device_type": "cdrom"}],
            ".device_type: a disk of source_type blank always has the type disk",
        ),
        (
            "both",
            [{**BLANK, "no_device": True}],
            ".no_device: not allowed for a disk of source_type blank",
        ),
        (
            "both",
            [{**BLANK, "volume_size": 5}, {**BLANK, "volume_size": 5}],
            ": with the disks of the flavor, the server would have 4 local disks including the root disk; at most 3 ",
        ),
        (
            "both",
            [
                {
                    "source_type": "blank",
                    "destination_type": "volume",
                    "volume_size": 1,
                    "boot_index": -1,
                }
            ],
            ": this cloud has no volume service. ",
        ),
        (
            "both",
            [{"source_type": "blank", "volume_size": 1, "boot_index": -1}],
            ".destination_type: a disk of source_type blank needs",
        ),
    ],
)
def test_create_server_with_unsupported_local_disks_returns_400(
    cloud: Cloud, flavor: str, mappings: list[dict[str, Any]], text: str
) -> None:
    assert read_refusal(cloud, flavor, BOOT, *mappings).startswith(FIELD + text)


@pytest.mark.parametrize(
    "fields",
    [
        {"volume_size": 1},
        {"volume_size": "1"},
        {"disk_bus": "virtio", "device_type": "disk"},
        {"disk_bus": "", "device_type": "", "guest_format": ""},
    ],
)
def test_create_server_accepts_boot_disk_mapping_equal_to_flavor(
    cloud: Cloud, fields: dict[str, Any]
) -> None:
    """For example, the library gophercloud sends the size of the local boot disk."""
    assert post_server(cloud, "both", {**BOOT, **fields}, BLANK, mv="2.42").status_code == 202
    assert [row.disk_gb for row in cloud.rows(schema.servers)] == [12]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"volume_size": 2},
            ".volume_size: flavor m1.both has 1 GiB for the root disk, and 2 GiB ",
        ),
        ({"disk_bus": "scsi"}, ".disk_bus: the local boot disk has the bus virtio, "),
        ({"device_type": "cdrom"}, ".device_type: the local boot disk always has the type disk; "),
        ({"guest_format": "ext4"}, ".guest_format: not allowed for the image as local boot disk; "),
    ],
)
def test_create_server_with_boot_disk_unlike_flavor_returns_400_with_field(
    cloud: Cloud, fields: dict[str, Any], text: str
) -> None:
    assert read_refusal(cloud, "both", {**BOOT, **fields}, mv="2.42").startswith(FIELD + text)


@pytest.mark.parametrize(
    "mappings",
    [
        [BLANK],
        [SWAP, BLANK],
        [BOOT, {**BLANK, "boot_index": 0}],
        [BOOT, {**BLANK, "boot_index": "1"}],
        [BOOT, BOOT],
    ],
)
def test_create_server_with_boot_order_other_than_one_image_returns_400(
    cloud: Cloud, mappings: list[dict[str, Any]]
) -> None:
    message = read_refusal(cloud, "both", *mappings)
    assert (
        message.startswith("Block Device Mapping is Invalid: Boot sequence")
        or "only one disk can be" in message
    )


def test_create_server_with_volume_type_or_tag_of_local_disk_returns_400(cloud: Cloud) -> None:
    assert read_refusal(cloud, "both", BOOT, {**BLANK, "volume_type": "ssd"}, mv="2.67").startswith(
        FIELD + ".volume_type: "
    )
    assert read_refusal(cloud, "both", BOOT, {**BLANK, "tag": "mine"}, mv="2.42").startswith(
        FIELD + ".tag: "
    )


@pytest.mark.parametrize("limit", [2, 4])
def test_create_server_returns_400_only_over_max_local_disks(
    make_cloud: Callable[..., Cloud], limit: int
) -> None:
    cloud = make_cloud(max_local_disks=limit)
    cloud.add_flavor(Flavor("both", "m1.both", 1, 512, 1, ephemeral_gb=10, swap_mb=512))
    assert post_server(cloud, "both").status_code == (202 if limit > 2 else 400)
    two = [{**BLANK, "volume_size": 5}] * 2
    assert post_server(cloud, "both", BOOT, *two).status_code == (202 if limit > 3 else 400)


# --- resize ---
@pytest.mark.parametrize(
    ("mappings", "flavor", "used_gb"),
    [([], "less", 10), ([], "swap", 10), ([BOOT, {**BLANK, "volume_size": 4}], "swap", 4)],
)
def test_resize_to_flavor_with_less_ephemeral_space_returns_400(
    cloud: Cloud, mappings: list[dict[str, Any]], flavor: str, used_gb: int
) -> None:
    server = post_server(cloud, "both", *mappings).json["server"]["id"]
    cloud.set_state(server)
    message = act(cloud, server, "resize", {"flavorRef": flavor}, status=400)
    assert message.startswith(
        "flavorRef: Server disk was unable to be resized because: the ephemeral disks have "
        f"{used_gb} GiB, and flavor m1.{flavor} has "
    )
    assert cloud.rows(schema.migrations) == []


@pytest.mark.parametrize(
    ("mappings", "flavor"),
    [([], "more"), ([], "eph"), ([BOOT, {**BLANK, "volume_size": 4}], "less")],
)
def test_resize_to_flavor_with_other_local_disks_is_accepted(
    cloud: Cloud, mappings: list[dict[str, Any]], flavor: str
) -> None:
    server = post_server(cloud, "both", *mappings).json["server"]["id"]
    cloud.set_state(server)
    act(cloud, server, "resize", {"flavorRef": flavor}, status=202)


@pytest.fixture
def two_disk_cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud that allows two local disks."""
    return make_cloud(add_flavors, secret_key=KEY, max_local_disks=2)


@pytest.mark.parametrize("flavor", ["eph", "swap"])
def test_resize_to_max_local_disks_is_accepted(two_disk_cloud: Cloud, flavor: str) -> None:
    server = post_server(two_disk_cloud, "bare").json["server"]["id"]
    two_disk_cloud.set_state(server)
    act(two_disk_cloud, server, "resize", {"flavorRef": flavor}, status=202)


def test_resize_over_max_local_disks_returns_400(two_disk_cloud: Cloud) -> None:
    server = post_server(two_disk_cloud, "eph").json["server"]["id"]
    two_disk_cloud.set_state(server)
    message = act(two_disk_cloud, server, "resize", {"flavorRef": "both"}, status=400)
    assert message == (
        "flavorRef: Server disk was unable to be resized because: with flavor m1.both the server would "
        "have 3 local disks including the root disk; at most 2 are allowed."
    )
    assert two_disk_cloud.rows(schema.migrations) == []


def test_resize_of_server_over_max_local_disks_is_accepted_without_new_disk(
    two_disk_cloud: Cloud,
) -> None:
    server = post_server(two_disk_cloud, "eph").json["server"]["id"]
    two_disk_cloud.set_state(server)
    two_disk_cloud.change(
        schema.servers,
        schema.servers.c.id == server,
        disks={"ephemeral": [{"gb": 5, "format": ""}] * 2},
    )
    assert "4 local disks" in act(
        two_disk_cloud, server, "resize", {"flavorRef": "both"}, status=400
    )
    two_disk_cloud.add_flavor(Flavor("wide", "m1.wide", 2, 512, 1, ephemeral_gb=10))
    act(two_disk_cloud, server, "resize", {"flavorRef": "wide"}, status=202)
