# SPDX-License-Identifier: Apache-2.0
"""Images with a false format, references to other files, or damage.

Each is refused with a reason, and leaves no file on the host.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.live import Live, Rest

pytestmark = pytest.mark.slice("guests")

SECRET = "/etc/hostname"
GIBIBYTE = 1 << 30
VMDK = (
    f'# Disk DescriptorFile\nversion=1\ncreateType="monolithicFlat"\n\nRW 2048 FLAT "{SECRET}" 0\n'
)
#: The field of a qcow2 header with the offset of the cluster table.
L1_TABLE = slice(40, 48)


def qcow2(path: Path, size: int, *options: str) -> bytes:
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), str(size)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path.read_bytes()


def with_backing_file(folder: Path) -> bytes:
    return qcow2(folder / "disk", 1 << 20, "-u", "-b", SECRET, "-F", "raw")


def with_data_file(folder: Path) -> bytes:
    return qcow2(folder / "disk", 1 << 20, "-o", f"data_file={folder}/data,data_file_raw=on")


def descriptor(folder: Path) -> bytes:
    return VMDK.encode().ljust(64 << 10, b"\0")


def larger_than_the_flavor(folder: Path) -> bytes:
    return qcow2(folder / "disk", 5 * GIBIBYTE)


def header_only(folder: Path) -> bytes:
    return qcow2(folder / "disk", 1 << 20)[:64]


def misplaced_table(folder: Path) -> bytes:
    image = bytearray(qcow2(folder / "disk", 1 << 20))
    image[L1_TABLE] = (3).to_bytes(8, "big")
    return bytes(image)


def noise(folder: Path) -> bytes:
    return bytes(number * 7919 % 251 for number in range(100_000))


#: maker, declared format, words of the reason
IMAGES: list[tuple[Callable[[Path], bytes], str, str]] = [
    (with_backing_file, "qcow2", "not safe"),
    (with_backing_file, "raw", "declared as raw but its content is qcow2"),
    (with_data_file, "qcow2", "not safe"),
    (descriptor, "raw", "declared as raw but its content is vmdk"),
    (descriptor, "qcow2", "declared as qcow2 but its content is"),
    (descriptor, "vmdk", "its format is 'vmdk'"),
    (larger_than_the_flavor, "qcow2", "disk"),
    (header_only, "qcow2", "declared as qcow2 but its content is"),
    (noise, "qcow2", "declared as qcow2 but its content is"),
    (misplaced_table, "qcow2", "l1_table_offset 0x3 is not in the file"),
]


@pytest.fixture
def upload(cloud: Live) -> Iterator[Callable[[bytes, str], str]]:
    """Yield a function that uploads (content, disk format) as an image and returns the id."""
    image_ids: list[str] = []
    images = cloud.seed.demo.image

    def put(content: bytes, disk_format: str) -> str:
        image_ids.append(
            images.create_image(
                "hostile", data=content, disk_format=disk_format, container_format="bare"
            ).id
        )
        return image_ids[-1]

    yield put
    for image in image_ids:
        images.delete_image(image)


@pytest.mark.parametrize(
    ("make", "declared", "reason"), IMAGES, ids=[f"{m.__name__}-as-{d}" for m, d, _ in IMAGES]
)
def test_hostile_image_is_refused_with_reason_and_leaves_no_file(
    cloud: Live,
    demo: Rest,
    upload: Callable[[bytes, str], str],
    tmp_path: Path,
    make: Callable[[Path], bytes],
    declared: str,
    reason: str,
) -> None:
    cached = list_images_on_host(cloud)
    image = upload(make(tmp_path), declared)
    reply = demo.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "hostile",
                "imageRef": image,
                "flavorRef": cloud.flavor(),
                "networks": "none",
            }
        },
    )
    if reply.status == 400:
        kind, code, message = reply.fault
        assert (kind, code) == ("badRequest", 400)
    else:
        assert reply.status == 202, reply
        server = demo.await_status(reply.body["server"]["id"], "ERROR")
        message = server["fault"]["message"]
        cloud.await_removed(server["id"], 30)
    assert reason in message
    assert SECRET not in message
    # Tenants must not see paths of the host.
    assert str(cloud.home) not in message
    assert list_images_on_host(cloud) == cached


def test_damaged_image_fault_names_remedy_and_blames_no_host(
    cloud: Live, demo: Rest, tmp_path: Path, upload: Callable[[bytes, str], str]
) -> None:
    image = upload(misplaced_table(tmp_path), "qcow2")
    for _ in range(2):
        server = demo.create(image=image, flavor=cloud.flavor())
        fault = demo.await_status(server, "ERROR")["fault"]["message"]
        assert "qemu-img convert -O qcow2" in fault and "upload the new image" in fault
        assert "No valid host" not in fault, "no other host was tried"
        cloud.await_removed(server, 30)
    lines = cloud.kilonova("hosts").stdout.splitlines()
    assert any(f"image {image}: 2 builds failed on 1 of the hosts" in line for line in lines), lines
    assert not any("in a row" in line for line in lines)


def list_images_on_host(cloud: Live) -> set[str]:
    return {path.name for path in (cloud.home / "state" / "images").iterdir()}
