# SPDX-License-Identifier: Apache-2.0
"""The embedded volume service when the process is killed.

The kill occurs during a job, or while volumes are exported. Jobs run in forked processes. The first
process exits without cleanup at the n-th line of the service's code, for many n. A second process
continues the job.
"""

import json
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
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import requests
from sqlalchemy import select

from deploy.one_machine.cloud.authority import Authority
from deploy.one_machine.cloud.certificates import QEMU, install_files
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.external import Later
from deploy.one_machine.services.volume import schema
from deploy.one_machine.services.volume.exports import Exports
from deploy.one_machine.services.volume.files import VolumeFiles
from deploy.one_machine.services.volume.neighbours import ImageNeighbour, ImageRefused
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService, default_type
from deploy.one_machine.services.volume.volumes import remove
from deploy.one_machine.services.volume.worker import JobWorker
from deploy.testing.servers import free_ports
from tests.contract.volume_rig import MEGABYTE, Rig, marks, person, volume_rig, write
from tests.standalone import Cloud
from tests.waiting import await_true

WATCHED = "deploy/one_machine/services/volume/"
KILLED, COMPLETED = 9, 0
pytestmark = pytest.mark.slice("guests")
IMAGE = b"image" * 100_000


class Images:
    """An image service without a network.

    ``problem`` is raised by uploads. ``removed`` has the images without data that were deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problem: Exception | None = None
        self.removed: list[str] = []

    def show(self, key: str, token: str) -> dict[str, Any] | None:
        return None

    def create(self, body: Mapping[str, Any], token: str) -> dict[str, Any]:
        return {}

    def download(self, key: str, path: Path, limit: int, check: Callable[[], None]) -> None:
        path.write_bytes(IMAGE)

    def upload(self, key: str, path: Path, check: Callable[[], None]) -> bool:
        if self.problem is not None:
            raise self.problem
        (self._folder / f"image-{key}").write_bytes(path.open("rb").read(11))
        return True

    def remove_unfinished(self, key: str) -> None:
        self.removed.append(key)


class NoCompute:
    """A compute service that accepts every event."""

    def attachment_of(self, server: str, volume: str) -> str | None:
        return None

    def notify(self, events: Collection[Mapping[str, str]]) -> bool:
        return True


def open_service(folder: Path) -> VolumeService:
    return VolumeService(
        Database(folder / "volumes.db", schema.METADATA),
        VolumeFiles(folder / "volumes"),
        Images(folder),
        NoCompute(),
        Exports(folder / "exports", "", (0, 0), ""),
    )


def run_jobs_in_child(folder: Path, lines: int | None) -> int:
    """Run the jobs in a forked process, which exits after this many lines of the service's code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    exit_code = 1
    try:
        service, remaining_lines = open_service(folder), lines

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal remaining_lines
            if WATCHED not in frame.f_code.co_filename:
                return None
            if event == "line" and remaining_lines is not None:
                remaining_lines -= 1
                if remaining_lines < 0:
                    os._exit(KILLED)
            return trace

        sys.settrace(trace)
        worker = JobWorker(service)
        while worker.step():
            pass
        exit_code = COMPLETED
    finally:
        if exit_code:
            traceback.print_exc()
        os._exit(exit_code)


def order_job(
    folder: Path, order: Callable[[VolumeChange, str], None], status: str, has_file: bool
) -> str:
    """Create a volume with a job, and return the volume's id.

    The database is closed, so that a fork can open it again.
    """
    service, key = open_service(folder), str(uuid.uuid4())
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


def read_row(folder: Path, table: Any, key: str) -> Any:
    service = open_service(folder)
    try:
        with service.database.read() as connection:
            assert connection.execute(select(schema.jobs)).all() == []
            return connection.execute(select(table).where(table.c.id == key)).first()
    finally:
        service.database.close()


def _order_snapshot(change: VolumeChange, key: str) -> None:
    row = {"id": f"s-{key}", "volume_id": key, "project_id": "p", "size": 1, "type_id": "t"}
    change.add(schema.snapshots, row | {"status": "creating"})
    change.order("snapshot", f"s-{key}", key, read="volume")


def _order_upload(change: VolumeChange, key: str) -> None:
    change.order("upload", key, key, image_id=key, disk_format="raw", clone=True)


def _check_created(folder: Path, key: str) -> None:
    assert read_row(folder, schema.volumes, key).status == "available"
    assert (folder / f"volumes/volume-{key}").stat().st_size == 1024 * MEGABYTE


def _check_filled(folder: Path, key: str) -> None:
    _check_created(folder, key)
    with (folder / f"volumes/volume-{key}").open("rb") as file:
        assert file.read(len(IMAGE)) == IMAGE


def _check_deleted(folder: Path, key: str) -> None:
    assert read_row(folder, schema.volumes, key) is None
    assert not (folder / f"volumes/volume-{key}").exists()


def _check_snapshot(folder: Path, key: str) -> None:
    assert read_row(folder, schema.snapshots, f"s-{key}").status == "available"
    assert marks(folder / f"volumes/snapshot-s-{key}", 2) == [b"mark 000002"]


def _check_extended(folder: Path, key: str) -> None:
    row = read_row(folder, schema.volumes, key)
    assert (row.size, row.status) == (2, "available")
    assert (folder / f"volumes/volume-{key}").stat().st_size == 2048 * MEGABYTE
    assert marks(folder / f"volumes/volume-{key}", 2) == [b"mark 000002"]


def _check_uploaded(folder: Path, key: str) -> None:
    assert read_row(folder, schema.volumes, key).status == "available"
    assert (folder / f"image-{key}").exists()


CASES: dict[str, tuple[Any, str, bool, Any]] = {
    "create": (lambda change, key: change.order("create", key), "creating", False, _check_created),
    "download": (
        lambda change, key: change.order("download", key, image_id="i", disk_format="raw"),
        "downloading",
        False,
        _check_filled,
    ),
    "snapshot": (_order_snapshot, "available", True, _check_snapshot),
    "extend": (
        lambda change, key: change.order("extend", key, size=2),
        "extending",
        True,
        _check_extended,
    ),
    "upload": (_order_upload, "uploading", True, _check_uploaded),
    "delete": (lambda change, key: change.order("delete", key), "deleting", True, _check_deleted),
}


@pytest.mark.parametrize("kind", CASES)
def test_volume_job_killed_at_any_line_is_completed_by_next_process(
    tmp_path: Path, kind: str
) -> None:
    order, status, has_file, check = CASES[kind]
    kills, lines = 0, 0
    while True:
        key = order_job(tmp_path, order, status, has_file)
        exit_code = run_jobs_in_child(tmp_path, lines)
        assert exit_code in (KILLED, COMPLETED)
        if exit_code == KILLED:
            kills += 1
            assert run_jobs_in_child(tmp_path, None) == COMPLETED
        check(tmp_path, key)
        assert not list((tmp_path / "volumes").glob("*.part"))
        if exit_code == COMPLETED:
            break
        lines += 5
    assert kills > 10


# Failed jobs


def run_jobs_here(service: VolumeService) -> None:
    """Run the jobs in this process, without the pauses between attempts."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 3600
        return time.time() + now

    worker = JobWorker(service, clock)
    while worker.step():
        pass


@pytest.mark.parametrize("problem", [ImageRefused("no"), OSError("full"), Later("silent"), None])
def test_failed_upload_of_volume_deletes_image_without_data(
    tmp_path: Path, problem: Exception | None
) -> None:
    key = order_job(tmp_path, _order_upload, "uploading", True)
    service, images = open_service(tmp_path), Images(tmp_path)
    service.images, images.problem = images, problem
    run_jobs_here(service)
    service.database.close()
    assert read_row(tmp_path, schema.volumes, key).status == "available"
    assert images.removed == ([] if problem is None else [key])


def test_upload_of_volume_deleted_meanwhile_deletes_image_without_data(tmp_path: Path) -> None:
    key = order_job(tmp_path, _order_upload, "deleting", True)
    service, images = open_service(tmp_path), Images(tmp_path)
    service.images = images
    run_jobs_here(service)
    service.database.close()
    assert images.removed == [key]


@pytest.mark.parametrize(
    ("status", "is_deleted"),
    [("queued", True), ("saving", True), ("active", False), ("deactivated", False)],
)
def test_volume_service_deletes_only_images_without_data(status: str, is_deleted: bool) -> None:
    methods: list[str] = []

    def respond(url: str, method: str, **options: Any) -> requests.Response:
        assert url == "http://images/v2/images/i"
        methods.append(method)
        response = requests.Response()
        response.status_code = 200 if method == "GET" else 204
        response._content = json.dumps({"status": status}).encode()
        return response

    session: Any = SimpleNamespace(request=respond)
    ImageNeighbour(session, "http://images").remove_unfinished("i")
    assert methods == (["GET", "DELETE"] if is_deleted else ["GET"])


def test_failed_delete_of_volume_with_snapshots_is_shown_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(change: VolumeChange, key: str) -> None:
        row = {"id": f"s-{key}", "volume_id": key, "project_id": "p", "size": 1, "type_id": "t"}
        change.add(schema.snapshots, row | {"status": "deleting"})
        change.order("delete", key, snapshots=[f"s-{key}"])

    def refuse(files: VolumeFiles, path: Path) -> None:
        raise OSError("the file system is read-only")

    key = order_job(tmp_path, order, "deleting", True)
    service = open_service(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(VolumeFiles, "remove", refuse)
        run_jobs_here(service)
    service.database.close()
    assert read_row(tmp_path, schema.volumes, key).status == "error_deleting"
    assert read_row(tmp_path, schema.snapshots, f"s-{key}").status == "error_deleting"
    service = open_service(tmp_path)
    with service.change() as change:
        change.set(schema.volumes, key, {"status": "error"})
        query = select(schema.volumes).where(schema.volumes.c.id == key)
        remove(change, change.connection.execute(query).one(), force=False, cascade=True)
    run_jobs_here(service)
    service.database.close()
    assert read_row(tmp_path, schema.volumes, key) is None
    assert read_row(tmp_path, schema.snapshots, f"s-{key}") is None


# Other hosts


@pytest.fixture(scope="module")
def rig(standalone_cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    port, folder = free_ports(4), tmp_path_factory.mktemp("standalone")
    options = ("--export-address", "127.0.0.1", "--export-ports", f"{port}-{port + 3}")
    try:
        with volume_rig(standalone_cloud, folder, *options) as volume_service:
            yield volume_service
    finally:
        # Exports of failed tests end here, because a running service would start them again.
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


def can_run(info: Mapping[str, Any], command: str, *options: str) -> bool:
    """Return True if qemu-io can run this command on the volume over NBD."""
    target = f"driver=nbd,host={info['host']},port={info['port']},export={info['export']}"
    tls, mode = ",tls-creds=tls" if options else "", ["-r"] if command.startswith("read") else []
    process = subprocess.run(
        ["qemu-io", *mode, *options, "--image-opts", target + tls, "-c", command],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return process.returncode == 0 and b"failed" not in process.stdout + process.stderr


def connect_volume(rig: Rig, user: Any, key: str, server: str, host: str, **more: Any) -> Any:
    response = rig.attach(user, key, server, host, **more)
    assert response.status_code == 200, response.text
    return response.json()["attachment"]


def test_nbd_export_serves_other_host_only_while_volume_is_attached(rig: Rig, member: Any) -> None:
    key, server = rig.volume(member), str(uuid.uuid4())
    first = connect_volume(rig, member, key, server, "other-host")
    info = first["connection_info"]
    assert (info["driver_volume_type"], info["export"], info["tls"]) == ("nbd", key, False)
    assert can_run(info, "write -P 7 1M 4k")
    with rig.path(key).open("rb") as file:
        file.seek(MEGABYTE)
        assert file.read(3) == b"\7\7\7"
    rig.complete(rig.service, first["id"])
    response = rig.action(member, key, "os-extend", {"new_size": 2})
    assert (response.status_code, "over NBD" in response.text) == (400, True)
    # During a move two hosts have connections to the volume.
    second = connect_volume(rig, member, key, server, "third-host")
    assert second["connection_info"]["port"] != info["port"]
    assert can_run(second["connection_info"], "read -P 7 1M 4k")
    assert rig.ask(rig.service, "DELETE", f"/attachments/{first['id']}").ok
    assert not can_run(info, "read 0 4k")
    assert can_run(second["connection_info"], "write -P 8 2M 4k")
    assert rig.ask(rig.service, "DELETE", f"/attachments/{second['id']}").ok
    assert not can_run(second["connection_info"], "read 0 4k")
    assert rig.show(member, key)["status"] == "available"
    read_only = connect_volume(rig, member, key, server, "other-host", mode="ro")
    assert can_run(read_only["connection_info"], "read -P 8 2M 4k")
    assert not can_run(read_only["connection_info"], "write -P 9 2M 4k")
    rig.ask(rig.service, "DELETE", f"/attachments/{read_only['id']}")
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_nbd_export_continues_when_service_or_export_process_is_killed(
    rig: Rig, member: Any
) -> None:
    key = rig.volume(member)
    attachment = connect_volume(rig, member, key, "server", "other-host")
    info, marker = (
        attachment["connection_info"],
        rig.cloud.folder / f"volume/exports/{attachment['id']}.pid",
    )
    export_pid = int(marker.read_text())
    rig.kill()
    assert can_run(info, "write -P 5 1M 4k")
    rig.restart()
    # Meanwhile the thread that starts and ends export processes runs twice.
    time.sleep(2.5)
    assert int(marker.read_text()) == export_pid
    os.kill(export_pid, signal.SIGKILL)
    await_true(lambda: can_run(info, "read -P 5 1M 4k"), 30, "the volume is served again")
    assert int(marker.read_text()) != export_pid
    assert rig.ask(rig.service, "DELETE", f"/attachments/{attachment['id']}").ok
    assert not marker.exists()
    rig.ask(member, "DELETE", f"/volumes/{key}")


def test_attach_without_free_export_port_returns_503_and_no_attachment(
    rig: Rig, member: Any
) -> None:
    keys = [rig.volume(member) for _ in range(5)]
    attachment_ids = [connect_volume(rig, member, key, "s", "other-host")["id"] for key in keys[:4]]
    # The service has four export ports.
    refused = rig.attach(member, keys[4], "s", "other-host")
    assert (refused.status_code, "No port is free" in refused.text) == (503, True)
    assert rig.show(member, keys[4])["status"] == "available"
    assert rig.ask(member, "GET", f"/attachments?volume_id={keys[4]}").json()["attachments"] == []
    for attachment_id in attachment_ids:
        assert rig.ask(rig.service, "DELETE", f"/attachments/{attachment_id}").ok
    for key in keys:
        rig.ask(member, "DELETE", f"/volumes/{key}")


def test_volume_jobs_of_killed_service_are_completed_after_restart(rig: Rig, member: Any) -> None:
    source = rig.volume(member)
    with rig.path(source).open("r+b") as file:
        for _ in range(256):
            file.write(os.urandom(MEGABYTE))
    responses = [
        rig.ask(member, "POST", "/volumes", {"volume": {"size": 1, "source_volid": source}})
        for _ in range(3)
    ]
    rig.kill()
    rig.restart()
    keys = [response.json()["volume"]["id"] for response in responses]
    content = rig.path(source).read_bytes()[: 256 * MEGABYTE]
    for key in keys:
        rig.until(member, key, "available")
        with rig.path(key).open("rb") as file:
            assert file.read(256 * MEGABYTE) == content
        rig.ask(member, "DELETE", f"/volumes/{key}")
    rig.kill()
    rig.restart()
    for key in keys:
        rig.until(member, key, "gone")
    assert not list(rig.folder.glob("*.part"))
    rig.until(member, source, "available")
    rig.ask(member, "DELETE", f"/volumes/{source}")


def test_nbd_export_with_tls_accepts_only_certificates_of_own_authority(
    standalone_cloud: Cloud, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    install_files(tmp_path / "server", authority.issue("server", "127.0.0.1"), QEMU)
    install_files(tmp_path / "host", authority.issue("host", "127.0.0.1"), QEMU)
    install_files(
        tmp_path / "thief", Authority(tmp_path / "other").issue("thief", "127.0.0.1"), QEMU
    )
    (tmp_path / "thief/ca-cert.pem").write_bytes((tmp_path / "host/ca-cert.pem").read_bytes())
    port = free_ports(1)
    options = ("--export-address", "127.0.0.1", "--export-ports", f"{port}-{port}")
    cloud = replace(standalone_cloud, volume_port=free_ports(1))
    with volume_rig(cloud, tmp_path, *options, "--tls-folder", str(tmp_path / "server")) as rig:
        user = person(rig.admin, rig.cloud, "member")
        attachment = connect_volume(rig, user, rig.volume(user), "server", "other-host")
        info = attachment["connection_info"]
        assert info["tls"] is True

        def credentials(name: str) -> tuple[str, str]:
            files = f"tls-creds-x509,id=tls,endpoint=client,dir={tmp_path / name}"
            return ("--object", f"{files},verify-peer=yes")

        assert can_run(info, "write -P 1 0 4k", *credentials("host"))
        assert not can_run(info, "read 0 4k", *credentials("thief"))
        assert not can_run(info, "read 0 4k")
        assert rig.ask(rig.service, "DELETE", f"/attachments/{attachment['id']}").ok
    with pytest.raises(requests.ConnectionError):
        requests.get(rig.url, timeout=5)
