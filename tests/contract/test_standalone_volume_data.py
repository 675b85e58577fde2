# SPDX-License-Identifier: Apache-2.0
"""Data of the embedded volume service: snapshots, copies, sizes, types, quotas and images."""

import json
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.one_machine.services.volume import qemu_img
from tests.contract.volume_rig import (
    GIGABYTE,
    HOST,
    MEGABYTE,
    Rig,
    image,
    marks,
    person,
    qcow2,
    volume_rig,
    write,
)
from tests.standalone import Cloud
from tests.waiting import await_true


@pytest.fixture(scope="module")
def rig(standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with volume_rig(standalone_cloud, tmp_path_factory.mktemp("volume")) as rig:
        yield rig


@pytest.fixture
def member(rig: Rig) -> Any:
    return person(rig.admin, rig.cloud, "member")


# Snapshots, copies, sizes


def test_volume_snapshot_keeps_data_after_volume_write(rig: Rig, member: Any) -> None:
    key = rig.volume(member, metadata={"a": "b"})
    write(rig.path(key), 3, 700)
    snapshot = rig.snapshot(member, key, name="s", metadata={"c": "d"})
    snapshot_record = rig.show(member, snapshot, "snapshots")
    assert (snapshot_record["size"], snapshot_record["volume_id"], snapshot_record["metadata"]) == (
        1,
        key,
        {"c": "d"},
    )
    assert snapshot_record["os-extended-snapshot-attributes:progress"] == "100%"
    write(rig.path(key), 5)
    copied = rig.volume(member, size=2, snapshot_id=snapshot)
    twin = rig.volume(member, source_volid=key)
    expected = [b"mark 000003", bytes(11), b"mark 000700"]
    assert marks(rig.path(copied), 3, 5, 700) == expected
    assert marks(rig.path(twin), 5) == [b"mark 000005"]
    assert rig.path(copied).stat().st_size == 2 * GIGABYTE
    assert rig.path(copied).stat().st_blocks * 512 < 64 * MEGABYTE
    assert rig.ask(member, "DELETE", f"/volumes/{key}").status_code == 400
    assert rig.ask(member, "DELETE", f"/volumes/{key}?cascade=true").status_code == 202
    rig.until(member, key, "gone")
    assert rig.show(member, snapshot, "snapshots")["status"] == "gone"
    assert marks(rig.path(copied), 3) == [b"mark 000003"]
    assert not (rig.folder / f"snapshot-{snapshot}").exists()
    for volume_id in (copied, twin):
        rig.ask(member, "DELETE", f"/volumes/{volume_id}")


def test_snapshot_of_attached_volume_needs_file_system_with_shared_blocks(
    rig: Rig, member: Any
) -> None:
    key = rig.volume(member)
    attachment = rig.attach(member, key, "server").json()["attachment"]["id"]
    rig.complete(rig.service, attachment)
    body = {"snapshot": {"volume_id": key}}
    old = rig.ask(member, "POST", "/snapshots", body, version="volume 3.65")
    assert old.status_code == 400  # Before 3.66 a snapshot of a used volume requires force.
    response = rig.ask(member, "POST", "/snapshots", body)
    if response.status_code == 202:  # The file system supports shared blocks.
        rig.until(member, response.json()["snapshot"]["id"], "available", "snapshots")
    else:
        assert response.status_code == 400
        assert "cannot share blocks" in response.text
        assert "Detach the volume" in response.text
    rig.ask(rig.service, "DELETE", f"/attachments/{attachment}")
    rig.ask(member, "DELETE", f"/volumes/{key}?cascade=true")


def test_volume_extend_grows_available_or_attached_volume_and_sends_event(
    rig: Rig, member: Any
) -> None:
    key, server = rig.volume(member), str(uuid.uuid4())
    for size, status in ((1, 400), ("x", 400), (2, 202)):
        assert rig.action(member, key, "os-extend", {"new_size": size}).status_code == status
    rig.until(member, key, "available")
    assert rig.path(key).stat().st_size == 2 * GIGABYTE
    attachment = rig.attach(member, key, server).json()["attachment"]["id"]
    assert rig.action(member, key, "os-extend", {"new_size": 3}).status_code == 400
    rig.complete(rig.service, attachment)
    old = rig.action(member, key, "os-extend", {"new_size": 3}, version="volume 3.41")
    assert old.status_code == 400
    assert rig.action(member, key, "os-extend", {"new_size": 3}).status_code == 202
    rig.until(member, key, "in-use")
    assert (rig.show(member, key)["size"], rig.path(key).stat().st_size) == (3, 3 * GIGABYTE)
    event = {"name": "volume-extended", "server_uuid": server, "tag": key, "status": "completed"}
    await_true(lambda: event in rig.compute.events, 20, "the event")
    rig.ask(rig.service, "DELETE", f"/attachments/{attachment}")
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_volume_bootable_and_readonly_flags_and_status_can_be_set(rig: Rig, member: Any) -> None:
    storage, key = member.block_storage, rig.volume(member)
    storage.set_volume_bootable_status(key, True)
    storage.set_volume_readonly(key, True)
    volume = rig.show(member, key)
    assert (volume["bootable"], volume["metadata"]["readonly"]) == ("true", "True")
    attached = rig.attach(member, key, "server", mode="rw").json()["attachment"]
    assert attached["attach_mode"] == "ro"
    assert rig.ask(rig.service, "DELETE", f"/attachments/{attached['id']}").ok
    for body, status in (
        ({"status": "error"}, 202),
        ({"status": "blue"}, 400),
        ({}, 400),
        ({"attach_status": "detached"}, 202),
    ):
        assert rig.action(rig.admin, key, "os-reset_status", body).status_code == status
    assert rig.show(member, key)["status"] == "error"
    assert rig.attach(member, key, "server").status_code == 400
    assert rig.action(rig.admin, key, "os-reset_status", {"status": "available"}).ok
    assert rig.action(member, key, "os-wish", {}).status_code == 400
    assert rig.ask(rig.admin, "DELETE", f"/volumes/{key}?force=true").status_code == 202
    rig.until(member, key, "gone")


def test_private_volume_type_returns_404_for_member_and_is_used_by_admin(
    rig: Rig, member: Any
) -> None:
    volume_type = rig.admin.block_storage.create_type(name="private", is_public=False)
    body = {"volume": {"size": 1, "volume_type": "private"}}
    assert rig.ask(member, "POST", "/volumes", body).status_code == 404
    assert volume_type.id not in {visible_type.id for visible_type in member.block_storage.types()}
    assert rig.ask(member, "GET", f"/types/{volume_type.id}").status_code == 404
    key = rig.volume(rig.admin, volume_type="private")
    refusal = rig.ask(rig.admin, "DELETE", f"/types/{volume_type.id}")
    assert (refusal.status_code, "volumes present" in refusal.text) == (400, True)
    assert rig.ask(rig.admin, "DELETE", f"/volumes/{key}").status_code == 202
    rig.until(rig.admin, key, "gone")
    rig.admin.block_storage.delete_type(volume_type)


def test_volume_type_extra_specs_are_set_by_admin(rig: Rig, member: Any) -> None:
    storage = rig.admin.block_storage
    volume_type = storage.create_type(name="fast", description="d", extra_specs={"disk": "ssd"})
    storage.update_type_extra_specs(volume_type, multiattach="<is> True")
    assert storage.get_type(volume_type.id).extra_specs == {
        "disk": "ssd",
        "multiattach": "<is> True",
    }
    assert member.block_storage.get_type(volume_type.id).extra_specs == {"multiattach": "<is> True"}
    again = rig.ask(rig.admin, "POST", "/types", {"volume_type": {"name": "fast"}})
    assert again.status_code == 409
    specs = {"extra_specs": {"disk": "tape"}}
    refusal = rig.ask(member, "POST", f"/types/{volume_type.id}/extra_specs", specs)
    assert refusal.status_code == 403
    default = rig.ask(member, "GET", "/types/default").json()["volume_type"]["name"]
    assert default == "__DEFAULT__"
    key = rig.volume(member, volume_type="fast")
    specs = {"extra_specs": {"multiattach": "<is> False"}}
    refusal_in_use = rig.ask(rig.admin, "POST", f"/types/{volume_type.id}/extra_specs", specs)
    assert (refusal_in_use.status_code, "in use" in refusal_in_use.text) == (400, True)
    [default] = [candidate for candidate in storage.types() if candidate.name == "__DEFAULT__"]
    assert rig.ask(rig.admin, "DELETE", f"/types/{default.id}").status_code == 400
    rig.ask(member, "DELETE", f"/volumes/{key}")
    rig.until(member, key, "gone")
    storage.delete_type(volume_type)


# Quotas


def test_volume_quotas_limit_creates_and_count_usage(rig: Rig, member: Any) -> None:
    project, kind = member.current_project_id, f"t-{uuid.uuid4().hex[:6]}"
    rig.admin.block_storage.create_type(name=kind)
    path = f"/os-quota-sets/{project}"
    quota = {"volumes": 3, "gigabytes": 6, f"volumes_{kind}": 1, "per_volume_gigabytes": 4}
    assert rig.ask(rig.admin, "PUT", path, {"quota_set": quota}).json()["quota_set"].items() >= (
        quota.items()
    )
    first = rig.volume(member, volume_type=kind)
    for body, text in (
        ({"size": 1, "volume_type": kind}, f"volumes_{kind}"),
        ({"size": 5}, "larger than maximum"),
    ):
        refusal = rig.ask(member, "POST", "/volumes", {"volume": body})
        assert (refusal.status_code, text in refusal.text) == (413, True), refusal.text
    rig.snapshot(member, first)
    second = rig.volume(member, size=3)
    refusal = rig.ask(member, "POST", "/volumes", {"volume": {"size": 2}})
    assert "Requested 2G, quota is 6G and 5G has been consumed" in refusal.text
    assert rig.action(member, second, "os-extend", {"new_size": 5}).status_code == 413
    assert rig.show(member, second)["status"] == "available"
    usage = rig.ask(member, "GET", f"{path}?usage=true").json()["quota_set"]
    assert usage["gigabytes"] == {"limit": 6, "in_use": 5, "reserved": 0}
    assert (usage["volumes"]["in_use"], usage["snapshots"]["in_use"]) == (2, 1)
    assert rig.ask(rig.admin, "PUT", path, {"quota_set": {"volumes": 1}}).status_code == 400
    for wrong in ({"volumes": "x"}, {"colors": 1}, {"volumes": -2}, {}):
        assert rig.ask(rig.admin, "PUT", path, {"quota_set": wrong}).status_code == 400
    answers: list[int] = []

    def create() -> None:
        volume = rig.ask(member, "POST", "/volumes", {"volume": {"size": 1}})
        answers.append(volume.status_code)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [202, 413, 413, 413, 413, 413]
    assert rig.ask(rig.admin, "DELETE", path).ok
    assert rig.ask(member, "GET", path).json()["quota_set"]["volumes"] == 10
    for volume in rig.ask(member, "GET", "/volumes").json()["volumes"]:
        rig.until(member, volume["id"], "available")
        rig.ask(member, "DELETE", f"/volumes/{volume['id']}?cascade=true")


@pytest.mark.parametrize("plural", ["backups", "groups", "group_snapshots", "messages"])
def test_list_of_unsupported_volume_service_resource_is_empty(
    rig: Rig, member: Any, plural: str
) -> None:
    assert rig.ask(member, "GET", f"/{plural}").json() == {plural: []}
    assert rig.ask(member, "GET", f"/{plural}/detail").json() == {plural: []}


# Images


def test_volume_is_created_from_image_and_uploaded_to_image(
    rig: Rig, member: Any, tmp_path: Path
) -> None:
    data = b"guest" * 200_000
    raw = image(rig.cloud, member, data, os_distro="x", min_disk=1)
    key = rig.volume(member, imageRef=raw)
    volume = rig.show(member, key)
    assert (volume["bootable"], volume["volume_image_metadata"]["image_id"]) == ("true", raw)
    assert volume["volume_image_metadata"]["os_distro"] == "x"
    with rig.path(key).open("rb") as file:
        assert file.read(len(data)) == data
    assert rig.path(key).stat().st_size == GIGABYTE
    packed = rig.volume(member, imageRef=image(rig.cloud, member, qcow2(tmp_path), "qcow2"))
    assert rig.path(packed).stat().st_size == GIGABYTE
    write(rig.path(packed), 1)
    body = {"image_name": "out", "disk_format": "qcow2", "container_format": "bare"}
    upload = rig.action(member, packed, "os-volume_upload_image", body)
    assert upload.status_code == 202, upload.text
    uploaded = upload.json()["os-volume_upload_image"]
    assert (uploaded["status"], uploaded["disk_format"]) == ("uploading", "qcow2")
    rig.until(member, packed, "available")
    out = member.image.get_image(uploaded["image_id"])
    assert (out.status, out.owner, out.min_disk) == ("active", member.current_project_id, 1)
    unpacked, source = tmp_path / "out.raw", tmp_path / "out.qcow2"
    source.write_bytes(member.image.download_image(out).content)
    subprocess.run(
        ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", source, unpacked],
        check=True,
        timeout=60,
    )
    assert marks(unpacked, 1) == [b"mark 000001"]
    reimaged = rig.action(member, packed, "os-reimage", {"image_id": raw})
    assert reimaged.status_code == 202, reimaged.text
    rig.until(member, packed, "available")
    with rig.path(packed).open("rb") as file:
        assert file.read(len(data)) == data
    old = rig.action(member, packed, "os-reimage", {"image_id": raw}, version="volume 3.67")
    assert old.status_code == 400
    for volume_id in (key, packed):
        rig.ask(member, "DELETE", f"/volumes/{volume_id}")


def test_create_volume_from_image_without_data_uses_its_snapshot(rig: Rig, member: Any) -> None:
    """The image of a server that was booted from a volume has no data."""
    key = rig.volume(member)
    write(rig.path(key), 7)
    snapshot = rig.snapshot(member, key)
    device = {"source_type": "snapshot", "snapshot_id": snapshot, "boot_index": 0}

    def image_with_mapping(*devices: object) -> str:
        mapping = json.dumps([{"source_type": "blank", "boot_index": -1}, *devices])
        return image(rig.cloud, member, b"", block_device_mapping=mapping)

    volume = rig.volume(member, imageRef=image_with_mapping(device))
    assert marks(rig.path(volume), 7) == [b"mark 000007"]
    assert rig.show(member, volume)["snapshot_id"] == snapshot
    body = {"volume": {"size": 1, "imageRef": image_with_mapping(device)}}
    older = rig.ask(member, "POST", "/volumes", body, version="volume 3.45")
    assert (older.status_code, "3.46" in older.text) == (400, True)
    body["volume"]["imageRef"] = image_with_mapping({**device, "snapshot_id": key})
    assert rig.ask(member, "POST", "/volumes", body).status_code == 404
    rig.ask(member, "DELETE", f"/volumes/{volume}")
    rig.ask(member, "DELETE", f"/volumes/{key}?cascade=true")


def test_reimage_of_reserved_volume_sends_event_to_server(rig: Rig, member: Any) -> None:
    raw, key, server = (
        image(rig.cloud, member, b"new" * 1000),
        rig.volume(member),
        str(uuid.uuid4()),
    )
    body = {"attachment": {"volume_uuid": key, "instance_uuid": server}}
    attachment = rig.ask(member, "POST", "/attachments", body).json()["attachment"]["id"]
    reimage_request = {"image_id": raw, "reimage_reserved": True}
    assert rig.action(member, key, "os-reimage", {"image_id": raw}).status_code == 400
    assert rig.action(member, key, "os-reimage", reimage_request).status_code == 202
    event = {"name": "volume-reimaged", "server_uuid": server, "tag": key, "status": "completed"}
    await_true(lambda: event in rig.compute.events, 20, "the event")
    assert rig.show(member, key)["status"] == "reserved"
    with rig.path(key).open("rb") as file:
        assert file.read(6) == b"newnew"
    connector = {"attachment": {"connector": {"host": HOST}}}
    assert rig.ask(member, "PUT", f"/attachments/{attachment}", connector).ok
    assert rig.action(member, key, "os-reimage", reimage_request).status_code == 409
    rig.ask(rig.service, "DELETE", f"/attachments/{attachment}")
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_create_volume_from_private_image_of_other_project_returns_400(
    rig: Rig, member: Any
) -> None:
    private = image(rig.cloud, rig.admin, b"secret", visibility="private")
    refusal = rig.ask(member, "POST", "/volumes", {"volume": {"size": 1, "imageRef": private}})
    assert (refusal.status_code, "Invalid image" in refusal.text) == (400, True)


@pytest.mark.parametrize("kind", ["backing file", "data file", "lies", "too large", "damaged"])
def test_create_volume_from_hostile_image_fails_and_leaves_no_file(
    rig: Rig, member: Any, tmp_path: Path, kind: str
) -> None:
    data, form = qcow2(tmp_path), "qcow2"
    if kind == "backing file":
        data = qcow2(tmp_path, "-u", "-b", "/etc/passwd", "-F", "raw")
    elif kind == "data file":
        data = qcow2(tmp_path, "-o", f"data_file={tmp_path}/data,data_file_raw=on")
    elif kind == "lies":
        form = "raw"
    elif kind == "too large":
        data = data[:24] + (5 * GIGABYTE).to_bytes(8, "big") + data[32:]
    else:
        data = data[:40] + bytes(24) + data[64:200]
    key = image(rig.cloud, member, data, form)
    response = rig.ask(member, "POST", "/volumes", {"volume": {"size": 1, "imageRef": key}})
    if response.status_code == 400:  # The image service reports the virtual size.
        assert kind == "too large"
        return
    volume = response.json()["volume"]["id"]
    rig.until(member, volume, "error")
    assert not list(rig.folder.glob(f"*{volume}*"))
    assert rig.attach(member, volume, "server").status_code == 400
    rig.ask(member, "DELETE", f"/volumes/{volume}")
    rig.until(member, volume, "gone")


def test_qemu_img_converts_within_quarter_of_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the limit is enough.

    Without a bound on malloc arenas, each qemu-img thread reserves 64 MiB of addresses.
    """
    monkeypatch.setattr(qemu_img, "MEMORY_BYTES", qemu_img.MEMORY_BYTES // 4)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(64 * MEGABYTE))
    for number in range(2):
        qemu_img.pack(source, "qcow2", tmp_path / f"image{number}", lambda: None)
        qemu_img.unpack(
            tmp_path / f"image{number}", "qcow2", tmp_path / f"raw{number}", lambda: None
        )
