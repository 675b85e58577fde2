# SPDX-License-Identifier: Apache-2.0
"""The volume service when it is killed: at any line of a job, and while it serves other hosts.

A job runs in a forked process that ends without a word at its n-th line, for many n; a second one
does what is left.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import requests
from sqlalchemy import select

from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.certificates import QEMU, install_files
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.volume import schema
from deploy.one_machine.services.volume.exports import Exports
from deploy.one_machine.services.volume.files import VolumeFiles
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService, default_type
from deploy.one_machine.services.volume.worker import JobWorker
from deploy.testing.servers import free_ports
from tests.contract.volume_rig import MEGABYTE, Rig, marks, person, volume_rig, write
from tests.standalone import Cloud
from tests.waiting import await_true

WATCHED = "deploy/one_machine/services/volume/"
STRUCK, WHOLE = 9, 0
pytestmark = pytest.mark.slice("guests")
IMAGE = b"image" * 100_000


class Images:
    """Stands in for the image service, without a network."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def show(self, key: str, token: str) -> dict[str, Any] | None:
        return None

    def create(self, body: Mapping[str, Any], token: str) -> dict[str, Any]:
        return {}

    def download(self, key: str, path: Path, limit: int, check: Callable[[], None]) -> None:
        path.write_bytes(IMAGE)

    def upload(self, key: str, path: Path, check: Callable[[], None]) -> bool:
        (self._folder / f"image-{key}").write_bytes(path.open("rb").read(11))
        return True


class NoCompute:
    """Stands in for a compute service that hears everything."""

    def attachment_of(self, server: str, volume: str) -> str | None:
        return None

    def notify(self, events: Collection[Mapping[str, str]]) -> bool:
        return True


def opened(folder: Path) -> VolumeService:
    return VolumeService(
        Database(folder / "volumes.db", schema.METADATA),
        VolumeFiles(folder / "volumes"),
        Images(folder),
        NoCompute(),
        Exports(folder / "exports", "", (0, 0), ""),
    )


def in_a_child(folder: Path, lines: int | None) -> int:
    """Do the jobs in another process, which dies at this line of the service's code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended = 1
    try:
        service, left = opened(folder), lines

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if WATCHED not in frame.f_code.co_filename:
                return None
            if event == "line" and left is not None:
                left -= 1
                if left < 0:
                    os._exit(STRUCK)
            return trace

        sys.settrace(trace)
        worker = JobWorker(service)
        while worker.step():
            pass
        ended = WHOLE
    finally:
        if ended:
            traceback.print_exc()
        os._exit(ended)


def ordered(
    folder: Path, order: Callable[[VolumeChange, str], None], status: str, has_file: bool
) -> str:
    """The id of a volume with a job; closed again, so that a fork may open it."""
    service, key = opened(folder), str(uuid.uuid4())
    if has_file:
        service.files.make_blank(service.files.path("volume", key), 1)
        write(service.files.path("volume", key), 2)
    with service.change() as change:
        row = {"id": key, "project_id": "p", "size": 1, "availability_zone": "nova"}
        kind = default_type(change.connection)
        change.add(schema.volumes, row | {"status": status, "type_id": kind})
        order(change, key)
    service.database.close()
    return key


def found(folder: Path, table: Any, key: str) -> Any:
    service = opened(folder)
    try:
        with service.database.read() as connection:
            assert connection.execute(select(schema.jobs)).all() == []
            return connection.execute(select(table).where(table.c.id == key)).first()
    finally:
        service.database.close()


def _snapshot(change: VolumeChange, key: str) -> None:
    row = {"id": f"s-{key}", "volume_id": key, "project_id": "p", "size": 1, "type_id": "t"}
    change.add(schema.snapshots, row | {"status": "creating"})
    change.order("snapshot", f"s-{key}", key, read="volume")


def _upload(change: VolumeChange, key: str) -> None:
    change.order("upload", key, key, image_id=key, disk_format="raw", clone=True)


def _check_made(folder: Path, key: str) -> None:
    assert found(folder, schema.volumes, key).status == "available"
    assert (folder / f"volumes/volume-{key}").stat().st_size == 1024 * MEGABYTE


def _check_filled(folder: Path, key: str) -> None:
    _check_made(folder, key)
    with (folder / f"volumes/volume-{key}").open("rb") as file:
        assert file.read(len(IMAGE)) == IMAGE


def _check_gone(folder: Path, key: str) -> None:
    assert found(folder, schema.volumes, key) is None
    assert not (folder / f"volumes/volume-{key}").exists()


def _check_snapshot(folder: Path, key: str) -> None:
    assert found(folder, schema.snapshots, f"s-{key}").status == "available"
    assert marks(folder / f"volumes/snapshot-s-{key}", 2) == [b"mark 000002"]


def _check_grown(folder: Path, key: str) -> None:
    row = found(folder, schema.volumes, key)
    assert (row.size, row.status) == (2, "available")
    assert (folder / f"volumes/volume-{key}").stat().st_size == 2048 * MEGABYTE
    assert marks(folder / f"volumes/volume-{key}", 2) == [b"mark 000002"]


def _check_uploaded(folder: Path, key: str) -> None:
    assert found(folder, schema.volumes, key).status == "available"
    assert (folder / f"image-{key}").exists()


CASES: dict[str, tuple[Any, str, bool, Any]] = {
    "create": (lambda change, key: change.order("create", key), "creating", False, _check_made),
    "download": (
        lambda change, key: change.order("download", key, image_id="i", disk_format="raw"),
        "downloading",
        False,
        _check_filled,
    ),
    "snapshot": (_snapshot, "available", True, _check_snapshot),
    "extend": (
        lambda change, key: change.order("extend", key, size=2),
        "extending",
        True,
        _check_grown,
    ),
    "upload": (_upload, "uploading", True, _check_uploaded),
    "delete": (lambda change, key: change.order("delete", key), "deleting", True, _check_gone),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_job_that_is_struck_at_any_line_is_done(tmp_path: Path, kind: str) -> None:
    order, status, has_file, check = CASES[kind]
    struck, lines = 0, 0
    while True:
        key = ordered(tmp_path, order, status, has_file)
        ended = in_a_child(tmp_path, lines)
        assert ended in (STRUCK, WHOLE)
        if ended == STRUCK:
            struck += 1
            assert in_a_child(tmp_path, None) == WHOLE
        check(tmp_path, key)
        assert not list((tmp_path / "volumes").glob("*.part"))
        if ended == WHOLE:
            break
        lines += 5
    assert struck > 10


# Other hosts


@pytest.fixture(scope="module")
def rig(standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    port, folder = free_ports(4), tmp_path_factory.mktemp("standalone")
    options = ("--export-address", "127.0.0.1", "--export-ports", f"{port}-{port + 3}")
    try:
        with volume_rig(standalone_cloud, folder, *options) as made:
            yield made
    finally:
        # What a failed test left: while the service runs, it would start it again.
        end_exports(folder / "volume")


def end_exports(folder: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "deploy.one_machine.services.volume",
            "end-exports",
            "--data",
            folder,
        ],
        check=True,
        timeout=60,
    )


@pytest.fixture
def member(rig: Rig) -> Any:
    return person(rig.admin, rig.cloud, "member")


def served(info: Mapping[str, Any], command: str, *options: str) -> bool:
    """Does QEMU do this to the volume over NBD?"""
    target = f"driver=nbd,host={info['host']},port={info['port']},export={info['export']}"
    tls, mode = ",tls-creds=tls" if options else "", ["-r"] if command.startswith("read") else []
    done = subprocess.run(
        ["qemu-io", *mode, *options, "--image-opts", target + tls, "-c", command],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode == 0 and b"failed" not in done.stdout + done.stderr


def connection(rig: Rig, who: Any, key: str, server: str, host: str, **more: Any) -> Any:
    made = rig.attach(who, key, server, host, **more)
    assert made.status_code == 200, made.text
    return made.json()["attachment"]


def test_another_host_has_a_volume_over_nbd_as_long_as_attached(rig: Rig, member: Any) -> None:
    key, server = rig.volume(member), str(uuid.uuid4())
    here = connection(rig, member, key, server, "other-host")
    info = here["connection_info"]
    assert (info["driver_volume_type"], info["export"], info["tls"]) == ("nbd", key, False)
    assert served(info, "write -P 7 1M 4k")
    with rig.path(key).open("rb") as file:
        file.seek(MEGABYTE)
        assert file.read(3) == b"\7\7\7"
    rig.complete(rig.service, here["id"])
    said = rig.action(member, key, "os-extend", {"new_size": 2})
    assert (said.status_code, "over NBD" in said.text) == (400, True)
    # The server moves: the same bytes on two hosts, each with its own connection.
    there = connection(rig, member, key, server, "third-host")
    assert there["connection_info"]["port"] != info["port"]
    assert served(there["connection_info"], "read -P 7 1M 4k")
    assert rig.ask(rig.service, "DELETE", f"/attachments/{here['id']}").ok
    assert not served(info, "read 0 4k")
    assert served(there["connection_info"], "write -P 8 2M 4k")
    assert rig.ask(rig.service, "DELETE", f"/attachments/{there['id']}").ok
    assert not served(there["connection_info"], "read 0 4k")
    assert rig.show(member, key)["status"] == "available"
    only = connection(rig, member, key, server, "other-host", mode="ro")
    assert served(only["connection_info"], "read -P 8 2M 4k")
    assert not served(only["connection_info"], "write -P 9 2M 4k")
    rig.ask(rig.service, "DELETE", f"/attachments/{only['id']}")
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_a_connection_outlives_service_and_server_process(rig: Rig, member: Any) -> None:
    key = rig.volume(member)
    made = connection(rig, member, key, "server", "other-host")
    info, marker = made["connection_info"], rig.cloud.folder / f"volume/exports/{made['id']}.pid"
    served_by = int(marker.read_text())
    rig.kill()
    assert served(info, "write -P 5 1M 4k")
    rig.restart()
    time.sleep(2.5)  # the thread that makes processes what the rows say has looked twice
    assert int(marker.read_text()) == served_by  # it is found again, not started twice
    os.kill(served_by, signal.SIGKILL)
    await_true(lambda: served(info, "read -P 5 1M 4k"), 30, "the volume is served again")
    assert int(marker.read_text()) != served_by
    assert rig.ask(rig.service, "DELETE", f"/attachments/{made['id']}").ok
    assert not marker.exists()
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_no_host_is_told_of_a_connection_that_does_not_start(rig: Rig, member: Any) -> None:
    keys = [rig.volume(member) for _ in range(5)]
    made = [connection(rig, member, key, "s", "other-host")["id"] for key in keys[:4]]
    refused = rig.attach(member, keys[4], "s", "other-host")  # four ports
    assert (refused.status_code, "No port is free" in refused.text) == (503, True)
    assert rig.show(member, keys[4])["status"] == "available"
    assert rig.ask(member, "GET", f"/attachments?volume_id={keys[4]}").json()["attachments"] == []
    for one in made:
        assert rig.ask(rig.service, "DELETE", f"/attachments/{one}").ok
    for key in keys:
        rig.ask(member, "DELETE", f"/volumes/{key}")


def test_jobs_of_a_killed_service_are_done_by_the_next(rig: Rig, member: Any) -> None:
    source = rig.volume(member)
    with rig.path(source).open("r+b") as file:
        for _ in range(256):
            file.write(os.urandom(MEGABYTE))
    made = [
        rig.ask(member, "POST", "/volumes", {"volume": {"size": 1, "source_volid": source}})
        for _ in range(3)
    ]
    rig.kill()
    rig.restart()
    keys = [one.json()["volume"]["id"] for one in made]
    whole = rig.path(source).read_bytes()[: 256 * MEGABYTE]
    for key in keys:
        rig.until(member, key, "available")
        with rig.path(key).open("rb") as file:
            assert file.read(256 * MEGABYTE) == whole
        rig.ask(member, "DELETE", f"/volumes/{key}")
    rig.kill()
    rig.restart()
    for key in keys:
        rig.until(member, key, "gone")
    assert not list(rig.folder.glob("*.part"))
    rig.until(member, source, "available")
    rig.ask(member, "DELETE", f"/volumes/{source}")


def test_with_certificates_only_hosts_of_the_authority_connect(
    standalone_cloud: Cloud, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    install_files(tmp_path / "server", authority.issue("server", "127.0.0.1"), QEMU)
    install_files(tmp_path / "host", authority.issue("host", "127.0.0.1"), QEMU)
    install_files(tmp_path / "thief", Authority(tmp_path / "other").issue("thief", "127.0.0.1"), QEMU)
    (tmp_path / "thief/ca-cert.pem").write_bytes((tmp_path / "host/ca-cert.pem").read_bytes())
    port = free_ports(1)
    options = ("--export-address", "127.0.0.1", "--export-ports", f"{port}-{port}")
    cloud = replace(standalone_cloud, volume_port=free_ports(1))
    with volume_rig(cloud, tmp_path, *options, "--tls-folder", str(tmp_path / "server")) as rig:
        who = person(rig.admin, rig.cloud, "member")
        made = connection(rig, who, rig.volume(who), "server", "other-host")
        info = made["connection_info"]
        assert info["tls"] is True

        def shown(name: str) -> tuple[str, str]:
            files = f"tls-creds-x509,id=tls,endpoint=client,dir={tmp_path / name}"
            return ("--object", f"{files},verify-peer=yes")

        assert served(info, "write -P 1 0 4k", *shown("host"))
        assert not served(info, "read 0 4k", *shown("thief"))
        assert not served(info, "read 0 4k")
        assert rig.ask(rig.service, "DELETE", f"/attachments/{made['id']}").ok
    with pytest.raises(requests.ConnectionError):
        requests.get(rig.url, timeout=5)
