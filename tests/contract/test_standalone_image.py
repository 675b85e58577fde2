# SPDX-License-Identifier: Apache-2.0
"""The embedded image service as a real process behind keystonemiddleware.

python-openstackclient and openstacksdk use it unmodified. ``requests`` and a bare socket send
malformed and interrupted requests.
"""

import dataclasses
import hashlib
import os
import signal
import socket
import struct
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openstack
import pytest
import requests

from deploy.testing.servers import free_ports
from tests.standalone import Cloud, connect
from tests.waiting import await_true

PATCH = {"Content-Type": "application/openstack-images-v2.1-json-patch"}
OCTETS = {"Content-Type": "application/octet-stream"}
MEGABYTE = 1024 * 1024
LIMIT = 8 * MEGABYTE


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def admin(cloud: Cloud) -> Any:
    return connect(cloud, "admin", cloud.admin_password, "admin")


@pytest.fixture(scope="module")
def owner(cloud: Cloud, admin: Any) -> Any:
    return new_user(cloud, admin, "member")


@pytest.fixture(scope="module")
def stranger(cloud: Cloud, admin: Any) -> Any:
    return new_user(cloud, admin, "member")


def new_user(cloud: Cloud, admin: Any, role: str) -> Any:
    """Return the connection of a new user with ``role`` in a new project."""
    name, identity = f"user-{uuid.uuid4().hex[:8]}", admin.identity
    project = identity.create_project(name=name, domain_id="default")
    user = identity.create_user(name=name, password="correct horse", domain_id="default")
    identity.assign_project_role_to_user(project, user, identity.find_role(role))
    return connect(cloud, name, "correct horse", name)


def call(connection: Any, method: str, path: str, **options: Any) -> requests.Response:
    """Send a request to the image service and return the response with any status."""
    url = connection.session.get_endpoint(service_type="image") + path
    headers = {"X-Auth-Token": connection.session.get_token()} | options.pop("headers", {})
    return requests.request(method, url, headers=headers, timeout=30, **options)


def create(connection: Any, **attributes: Any) -> str:
    """Create an image without data and return the id."""
    body = {"name": "image", "disk_format": "raw", "container_format": "bare"} | attributes
    answer = call(connection, "POST", "/v2/images", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def upload(connection: Any, key: str, data: bytes | Iterator[bytes]) -> requests.Response:
    return call(connection, "PUT", f"/v2/images/{key}/file", data=data, headers=OCTETS)


def status_of(connection: Any, key: str) -> str:
    return str(call(connection, "GET", f"/v2/images/{key}").json().get("status"))


def files(cloud: Cloud) -> set[str]:
    return {path.name for path in (cloud.folder / "image" / "images").iterdir()}


def await_condition(condition: Callable[[], bool]) -> None:
    await_true(condition, 20, "the condition")


# Real clients


def test_openstackclient_runs_image_commands(cloud: Cloud, tmp_path: Path) -> None:
    data = os.urandom(3 * MEGABYTE + 17)
    source = tmp_path / "data"
    source.write_bytes(data)
    commands = (
        "image list -f json",
        f"image create --disk-format raw --container-format bare --public --file {source} img1 -f json",
        "image list -f json",
        "image list --name img1 --public --long -f json",
        "image show img1 -f json",
        "image set --property a=b --tag t1 --min-disk 2 --name img2 img1",
        "image show img2 -f json",
        f"image save --file {tmp_path}/saved img2",
        "image unset --property a img2",
        "image show img2 -f json",
        "image delete img2",
        "image list -f json",
        "versions show --service image -f json",
    )
    before, created, listed, filtered, image_record, changed, unset, remaining, versions = (
        cloud.openstack(*commands)
    )
    assert (
        created["status"],
        created["size"],
        created["virtual_size"] if "virtual_size" in created else len(data),
    ) == ("active", len(data), len(data))
    assert created["checksum"] == hashlib.md5(data).hexdigest()
    assert created["properties"]["os_hash_value"] == hashlib.sha512(data).hexdigest()
    assert [entry["Name"] for entry in listed if entry not in before] == ["img1"]
    assert [entry["Name"] for entry in filtered] == ["img1"]
    assert image_record["id"] == created["id"] == changed["id"]
    assert (changed["properties"]["a"], changed["tags"], changed["min_disk"]) == ("b", ["t1"], 2)
    assert (tmp_path / "saved").read_bytes() == data
    assert ("a" in unset["properties"], unset["status"]) == (False, "active")
    assert remaining == before
    assert {"CURRENT", "SUPPORTED"} == {entry["Status"] for entry in versions}


def test_openstacksdk_uploads_lists_changes_and_deletes_image(
    cloud: Cloud, owner: Any, tmp_path: Path
) -> None:
    before = files(cloud)
    (tmp_path / "data").write_bytes(b"guest" * 1000)
    image = owner.create_image(
        "sdk",
        filename=str(tmp_path / "data"),
        disk_format="raw",
        container_format="bare",
        wait=True,
        timeout=30,
        hw_disk_bus="virtio",
    )
    assert (image.status, image.visibility, image.owner) == (
        "active",
        "shared",
        owner.current_project_id,
    )
    assert owner.image.find_image("sdk").id == image.id
    assert [listed.id for listed in owner.image.images(id=f"in:{image.id},{uuid.uuid4()}")] == [
        image.id
    ]
    assert (
        owner.image.update_image(image.id, visibility="private", min_ram=64).visibility == "private"
    )
    assert owner.image.download_image(image.id).content == b"guest" * 1000
    assert owner.image.get_images_schema().name == "images"
    assert owner.image.get_image_schema().properties["disk_format"]["type"] == ["null", "string"]
    owner.image.delete_image(image.id, ignore_missing=False)
    with pytest.raises(openstack.exceptions.NotFoundException):
        owner.image.get_image(image.id)
    assert files(cloud) == before


def test_image_list_is_paged_sorted_and_filtered(owner: Any) -> None:
    mark = uuid.uuid4().hex
    keys = [create(owner, name=f"n{place % 2}", batch=mark) for place in range(5)]
    assert {image.id for image in owner.image.images(limit=2, batch=mark)} == set(keys)
    first = call(
        owner, "GET", "/v2/images", params={"batch": mark, "limit": 3, "sort": "name:asc,id:desc"}
    ).json()
    rest = call(owner, "GET", first["next"]).json()
    assert "next" not in rest
    pairs = [(image["name"], image["id"]) for image in first["images"] + rest["images"]]
    assert pairs == sorted(
        sorted(pairs, key=lambda entry: entry[1], reverse=True),
        key=lambda entry: entry[0],
    )
    assert {key for _, key in pairs} == set(keys)
    for query in (
        {"name": "n1"},
        {"status": "queued", "name": "in:n1,other"},
        {"size_min": 0, "name": "n1"},
    ):
        answer = call(owner, "GET", "/v2/images", params={"batch": mark} | query).json()["images"]
        assert len(answer) == (0 if "size_min" in query else 2)


# Visibility


def test_private_image_of_other_project_returns_404(owner: Any, stranger: Any, admin: Any) -> None:
    key = create(owner, visibility="private")
    assert upload(owner, key, b"secret").status_code == 204
    for method, path, options in (
        ("GET", "", {}),
        ("GET", "/file", {}),
        ("DELETE", "", {}),
        ("PATCH", "", {"headers": PATCH, "json": []}),
        ("PUT", "/file", {"headers": OCTETS, "data": b"x"}),
        ("GET", "/tasks", {}),
    ):
        assert call(stranger, method, f"/v2/images/{key}{path}", **options).status_code == 404, (
            method,
            path,
        )
    assert call(stranger, "GET", "/v2/images", params={"marker": key}).status_code == 404
    assert call(stranger, "POST", "/v2/images", json={"id": key}).status_code == 409
    assert key not in {image.id for image in stranger.image.images()}
    assert call(owner, "GET", f"/v2/images/{key}/file").content == b"secret"
    assert call(admin, "GET", f"/v2/images/{key}").status_code == 200


def test_image_visibility_limits_list_show_and_changes_by_other_project(
    owner: Any, stranger: Any, admin: Any
) -> None:
    assert call(owner, "POST", "/v2/images", json={"visibility": "public"}).status_code == 403
    public, community, hidden = (
        create(admin, visibility="public"),
        create(owner, visibility="community"),
        create(owner, visibility="community", os_hidden=True),
    )
    listed = {image.id for image in stranger.image.images()}
    assert public in listed
    assert not {community, hidden} & listed
    assert {image.id for image in stranger.image.images(visibility="community")} >= {community}
    assert hidden in {image.id for image in owner.image.images(is_hidden=True)}
    for key in (public, community):
        assert call(stranger, "GET", f"/v2/images/{key}").status_code == 200
        assert call(stranger, "DELETE", f"/v2/images/{key}").status_code == 403
        patched = call(stranger, "PATCH", f"/v2/images/{key}", headers=PATCH, json=[])
        assert patched.status_code == 403
    shared = create(owner)
    assert call(stranger, "GET", f"/v2/images/{shared}").status_code == 404
    assert shared not in {image.id for image in stranger.image.images()}
    assert shared in {image.id for image in owner.image.images(visibility="shared")}


def test_image_reader_may_only_read_and_invalid_token_returns_401(cloud: Cloud, admin: Any) -> None:
    reader = new_user(cloud, admin, "reader")
    assert call(reader, "GET", "/v2/images").status_code == 200
    assert call(reader, "POST", "/v2/images", json={}).status_code == 403
    for headers in (
        {"X-Auth-Token": "nonsense"},
        {"X-Auth-Token": ""},
        {
            "X-Auth-Token": "x",
            "X-Identity-Status": "Confirmed",
            "X-Roles": "admin",
            "X-Project-Id": "x",
        },
    ):
        assert call(reader, "GET", "/v2/images", headers=headers).status_code == 401
    for path, status in (
        ("/", 300),
        ("/versions", 200),
        ("/v2", 300),
        ("/v2/", 300),
        ("/v2//images", 401),
    ):
        spoofed = {"X-Identity-Status": "Confirmed", "X-Roles": "admin"}
        assert (
            requests.get(cloud.image_url + path, headers=spoofed, timeout=20).status_code == status
        )


def test_image_request_returns_503_when_identity_is_unreachable(
    cloud: Cloud, tmp_path: Path
) -> None:
    alone = dataclasses.replace(
        cloud, folder=tmp_path, image_port=free_ports(1), identity_port=free_ports(1)
    )
    with alone.image():
        response = requests.get(
            f"{alone.image_url}/v2/images", headers={"X-Auth-Token": "any"}, timeout=20
        )
    assert response.status_code == 503


# Data


def test_image_download_supports_ranges_and_protected_delete_returns_403(owner: Any) -> None:
    key = create(owner, protected=True)
    assert call(owner, "GET", f"/v2/images/{key}/file").status_code == 204
    assert upload(owner, key, b"0123456789").status_code == 204
    assert upload(owner, key, b"again").status_code == 409
    for requested_range, status, data in (
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=0-99", 200, b"0123456789"),
        ("bytes=50-60", 416, None),
    ):
        answer = call(owner, "GET", f"/v2/images/{key}/file", headers={"Range": requested_range})
        assert (answer.status_code, answer.content if data else None) == (status, data)
    assert call(owner, "DELETE", f"/v2/images/{key}").status_code == 403
    unprotect = [{"op": "replace", "path": "/protected", "value": False}]
    assert (
        call(owner, "PATCH", f"/v2/images/{key}", headers=PATCH, json=unprotect).status_code == 200
    )
    assert call(owner, "DELETE", f"/v2/images/{key}").status_code == 204


def test_image_virtual_size_is_set_for_valid_qcow2_and_null_otherwise(owner: Any) -> None:
    def header(size: int) -> bytes:
        return struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, size).ljust(MEGABYTE, b"\0")

    for data, size in (
        (header(5 * MEGABYTE), 5 * MEGABYTE),
        (header(2**64 - 1), None),
        (b"rubbish" * 9999, None),
        (b"", None),
    ):
        key = create(owner, disk_format="qcow2")
        assert upload(owner, key, data).status_code == 204
        assert call(owner, "GET", f"/v2/images/{key}").json()["virtual_size"] == size


def test_create_image_with_used_id_returns_409(owner: Any) -> None:
    key = str(uuid.uuid4())
    assert create(owner, id=key) == key
    assert call(owner, "POST", "/v2/images", json={"id": key}).status_code == 409


@pytest.mark.parametrize("chunked", [False, True])
def test_image_upload_over_limit_returns_413_and_leaves_image_queued(
    cloud: Cloud, owner: Any, chunked: bool
) -> None:
    key, before = create(owner), files(cloud)
    blocks = [b"x" * MEGABYTE] * 9
    assert upload(owner, key, iter(blocks) if chunked else b"".join(blocks)).status_code == 413
    assert (status_of(owner, key), files(cloud)) == ("queued", before)
    assert upload(owner, key, b"".join(blocks[:8])).status_code == 204
    assert call(owner, "GET", f"/v2/images/{key}").json()["size"] == LIMIT


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 1000000\r\n\r\nbeginning",
        b"Transfer-Encoding: chunked\r\n\r\n50000\r\n" + b"x" * 300_000,
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_image_interrupted_upload_leaves_image_queued_without_file(
    cloud: Cloud, owner: Any, framing: bytes
) -> None:
    key, before = create(owner), files(cloud)
    with socket.create_connection(("127.0.0.1", cloud.image_port)) as line:
        line.sendall(
            b"PUT /v2/images/%s/file HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
            b"X-Auth-Token: %s\r\n" % (key.encode(), owner.session.get_token().encode()) + framing
        )
        if framing.endswith(b"zz\r\n"):
            assert line.recv(100).startswith(b"HTTP/1.1 400 ")
        else:
            await_condition(lambda: status_of(owner, key) == "saving")
    await_condition(lambda: status_of(owner, key) == "queued")
    assert files(cloud) == before
    assert upload(owner, key, b"whole").status_code == 204


def test_delete_image_during_upload_leaves_no_file(cloud: Cloud, owner: Any) -> None:
    key, before, is_deleted, answers = create(owner), files(cloud), threading.Event(), []

    def slow_body() -> Iterator[bytes]:
        yield b"x" * MEGABYTE
        assert is_deleted.wait(20)
        yield b"y"

    sender = threading.Thread(target=lambda: answers.append(upload(owner, key, slow_body())))
    sender.start()
    await_condition(lambda: status_of(owner, key) == "saving")
    assert upload(owner, key, b"second").status_code == 409
    assert call(owner, "DELETE", f"/v2/images/{key}").status_code == 204
    is_deleted.set()
    sender.join()
    assert answers[0].status_code == 410
    assert files(cloud) == before


def begin_upload(cloud: Cloud, key: str, token: str) -> socket.socket:
    """Open a connection that has sent two of the announced bytes of an upload."""
    line = socket.create_connection(("127.0.0.1", cloud.image_port), timeout=20)
    line.sendall(
        b"PUT /v2/images/%s/file HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
        b"X-Auth-Token: %s\r\nContent-Length: 999999\r\n\r\nxx" % (key.encode(), token.encode())
    )
    return line


def test_image_service_removes_partial_upload_after_kill_or_stall(
    cloud: Cloud, owner: Any, tmp_path: Path
) -> None:
    other = dataclasses.replace(cloud, folder=tmp_path, image_port=free_ports(1))
    url, token = f"{other.image_url}/v2/images", owner.session.get_token()
    headers, body = {"X-Auth-Token": token}, {"disk_format": "raw", "container_format": "bare"}
    with other.image() as process:
        key = requests.post(url, headers=headers, json=body, timeout=20).json()["id"]
        with begin_upload(other, key, token):
            await_condition(lambda: len(files(other)) == 1)
            children = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=True
            )
            for pid in [process.pid, *map(int, children.stdout.split())]:
                os.kill(pid, signal.SIGKILL)
    with other.image(idle_seconds=0.5):
        assert (
            requests.get(f"{url}/{key}", headers=headers, timeout=20).json()["status"] == "queued"
        )
        assert files(other) == set()
        with begin_upload(other, key, token) as line:
            assert line.recv(100).startswith(b"HTTP/1.1 400 ")
        assert files(other) == set()


def test_image_request_with_malformed_body_returns_400_and_large_413(owner: Any) -> None:
    assert call(owner, "POST", "/v2/images", data=b"{").status_code == 400
    assert (
        "levels" in (deep := call(owner, "POST", "/v2/images", data=b"[" * 900 + b"]" * 900)).text
    )
    assert deep.status_code == 400
    assert (
        call(owner, "POST", "/v2/images", data=b'{"a": "%s"}' % (b"x" * 300_000)).status_code == 413
    )
    assert upload(owner, "nothing", b"x").status_code == 404
    assert call(owner, "PUT", f"/v2/images/{create(owner)}/file", json={}).status_code == 415
